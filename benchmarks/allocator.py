"""Compare options of the caching allocator: memory that stays unused in the baseline, and the plans that they allow.

    python -m benchmarks.allocator [--only NAME ...] [--gpu rtx-3090]
    python -m benchmarks.allocator --plans [--shares 0.95 0.8 0.6] [--only NAME ...]
    python -m benchmarks.allocator --smallest [--only NAME ...] [--limit 240]

The first form prints a table with one row for each model: bytes allocated by tensors, and for each setting the bytes
that the allocator reserves in two training steps, from the simulated allocator. The second form plans each model for
shares of its baseline's memory, without and with the technique `allocator`, and prints the plans that differ. The third
form searches for the smallest exact plan, without and with it. Both searches share their recordings, and a model whose
searches take longer than the limit gets no row.
No card is used, and models have no weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import transformers

from benchmarks.card import models as smaller
from benchmarks.card.budgets import CASES
from benchmarks.card.models import Built, tokens
from planner import pipeline
from planner.choose import fitting
from planner.choose.choice import TIE, Certified
from planner.errors import TimeLimitError
from planner.estimate.footprint import measure
from planner.plan_types.constraints import parse_constraints
from planner.plan_types.decision_base import Decision
from planner.plan_types.decisions import Allocator
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import MIB
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.workload.budget import Budget
from planner.workload.cards import resolve_card
from planner.workload.workload import Workload, workload

SETTINGS = {
    "default": (),
    "expandable": (Allocator(expandable_segments=True),),
    "split 512": (Allocator(max_split_size_mb=512),),
    "split 128": (Allocator(max_split_size_mb=128),),
}


def _of_case(name: str) -> Callable[[], Built]:
    case = CASES[name]
    module, _, function = case.reference.partition(":")
    sizes = {"batch_size": case.batch_size} | ({} if case.seq_len is None else {"seq_len": case.seq_len})
    return lambda: getattr(importlib.import_module(module), function)(**sizes)


def _of_transformers(kind: str, samples: int, length: int) -> Callable[[], Built]:
    """Returns a function that builds a text model with the default configuration of its class."""

    def build() -> Built:
        model_class = getattr(transformers, kind)
        config = model_class.config_class()
        return model_class(config).train(), tokens(config.vocab_size, samples, length), None

    return build


def _images(kind: str, samples: int) -> Callable[[], Built]:
    """Returns a function that builds an image classifier with the default configuration of its class."""

    def build() -> Built:
        model_class = getattr(transformers, kind)
        config = model_class.config_class(num_labels=1000, image_size=224)
        batch = {"pixel_values": torch.randn(samples, 3, 224, 224), "labels": torch.randint(1000, (samples,))}
        return model_class(config).train(), batch, None

    return build


MODELS: dict[str, Callable[[], Built]] = {
    **{name: _of_case(name) for name in CASES},
    **{name: getattr(smaller, name) for name in ("llama_300m", "vit_base", "t5_small", "whisper_tiny", "convnet")},
    "distilbert": _of_transformers("DistilBertForMaskedLM", 64, 256),
    "electra": _of_transformers("ElectraForMaskedLM", 64, 256),
    "opt_125m": _of_transformers("OPTForCausalLM", 8, 512),
    "gpt_neo": _of_transformers("GPTNeoForCausalLM", 2, 512),
    "bloom": _of_transformers("BloomForCausalLM", 8, 512),
    "swin": _images("SwinForImageClassification", 64),
    "convnext": _images("ConvNextForImageClassification", 64),
    "mobilenet": _images("MobileNetV2ForImageClassification", 128),
}
"""The models by name: those of `benchmarks.card`, and classes of transformers in their default configurations."""


_EXACT = parse_constraints(fidelity="exact", force=(), forbid=(), margin=0)
_WITHOUT_AND_WITH = (dataclasses.replace(_EXACT, forbidden=("allocator",)), _EXACT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=list(MODELS), help="names of models")
    parser.add_argument("--gpu", default="rtx-3090", help="profile of the card (default rtx-3090)")
    parser.add_argument("--plans", action="store_true", help="compare plans")
    parser.add_argument("--smallest", action="store_true", help="compare the smallest plans")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.95, 0.8, 0.6], help="of the baseline's memory")
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="of the smallest plans of a model (default none)"
    )
    options = parser.parse_args()
    card = resolve_card(options.gpu, None)
    if options.smallest:
        _compare_smallest(options.only, card, options.limit)
    elif options.plans:
        _compare_plans(options.only, card, options.shares)
    else:
        _compare_settings(options.only, card)


def work_of(name: str) -> Workload:
    """Builds a model on the meta device, with AdamW."""
    with torch.device("meta"):
        model, batch, loss_fn = MODELS[name]()
    return workload(model, batch, loss_fn=loss_fn, optimizer="adamw")


def _compare_settings(names: list[str], card: DeviceProfile) -> None:
    print(f"| model | allocated (MiB) | {' | '.join(f'{name}: reserved, slack' for name in SETTINGS)} |")
    print(f"|---|---:|{'---:|' * len(SETTINGS)}")
    slack: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for name in names:
        graph = pipeline.record_step(work_of(name), card)
        cells = []
        for setting, decisions in SETTINGS.items():
            found = measure(graph, card, vram_bytes=None, decisions=decisions).footprint
            share = found.reserved_bytes / found.allocated_bytes - 1
            slack[setting].append(share)
            cells.append(f"{found.reserved_bytes // MIB:,} ({share:.1%})")
        print(f"| {name} | {found.allocated_bytes // MIB:,} | {' | '.join(cells)} |", flush=True)
    for setting, shares in slack.items():
        print(f"{setting}: median slack {statistics.median(shares):.1%}, largest {max(shares):.1%}")


def _compare_plans(names: list[str], card: DeviceProfile, shares: list[float]) -> None:
    print("| model | budget (MiB) | without `allocator` | with it | options |\n|---|---:|---|---|---|")
    counts = {"equal": 0, "faster": 0, "possible": 0, "slower": 0}
    for name in names:
        work = work_of(name)
        baseline = pipeline.plan_workload(work, card, vram_bytes=None, constraints=_WITHOUT_AND_WITH[1]).baseline
        for share in shares:
            budget = int(baseline.total_bytes * share)
            before, after = (
                pipeline.plan_workload(work, card, vram_bytes=budget, constraints=each) for each in _WITHOUT_AND_WITH
            )
            verdict = _verdict(before, after)
            counts[verdict] += 1
            if verdict != "equal":
                print(
                    f"| {name} | {budget // MIB:,} | {_cell(before)} | {_cell(after)} | {_options(after.decisions)} |",
                    flush=True,
                )
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))


def _compare_smallest(names: list[str], card: DeviceProfile, limit_seconds: float | None) -> None:
    print("| model | smallest plan without `allocator` (MiB) | with it | options | seconds |\n|---|---:|---:|---|---:|")
    for name in names:
        work, began = work_of(name), time.perf_counter()
        try:
            before, after = _smallest_plans(work, card, Watch(seconds=limit_seconds))
        except TimeLimitError:
            print(f"| {name} | limit of {limit_seconds:g} s reached | | | |", flush=True)
            continue
        sizes = " | ".join(f"{plan.measured.footprint.total_bytes // MIB:,}" for plan in (before, after))
        seconds = time.perf_counter() - began
        print(f"| {name} | {sizes} | {_options(after.choice.decisions)} | {seconds:.0f} |", flush=True)


def _smallest_plans(work: Workload, card: DeviceProfile, watch: Watch) -> tuple[Certified, Certified]:
    """Returns the smallest plan without the technique `allocator`, and with it. No budget is as small as theirs."""
    budget = Budget.of_total(card, card.context_bytes + MIB)
    with pipeline.open_session(work, card, budget, watch) as session:
        before, after = (fitting.smallest(session, session.search_space(each), each) for each in _WITHOUT_AND_WITH)
        return before, after


def _options(decisions: Sequence[Decision]) -> str:
    return next((d.describe().partition("=")[2] for d in decisions if d.kind == "allocator"), "")


def _verdict(before: Plan, after: Plan) -> str:
    """Compares two plans. Step times that the planner counts as a tie are equal."""
    if before.fits != after.fits:
        return "possible" if after.fits else "slower"
    if not before.fits or max(before.peak.step_ns, after.peak.step_ns) <= TIE * min(
        before.peak.step_ns, after.peak.step_ns
    ):
        return "equal"
    return "faster" if after.peak.step_ns < before.peak.step_ns else "slower"


def _cell(plan: Plan) -> str:
    return f"{plan.slowdown:.3f} x the baseline's time" if plan.fits else "does not fit"


if __name__ == "__main__":
    main()
