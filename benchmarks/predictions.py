"""Compare predicted totals with rehearsed totals, for plans that recompute and offload.

    python -m benchmarks.predictions [--only NAME] [--seed 0]

The search predicts all allocations of a plan from one what-if recording (`planner.recompute.selected_step`), so that
most plans that do not fit are never rehearsed. For each model, this benchmark selects units (modules, segments and
offloads): those of the fastest plans at 0.8, 0.65 and 0.5 of the baseline's peak and of the smallest plan, and some at
random. For each selection, it finds the smallest total in which the predicted step runs on an RTX 3090, and compares it
with the total of a rehearsal of the rewritten step. A selection counts as equal if both totals are equal to the byte.
Selections that are found more than once count once.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.main_job import EXAMPLES, MIB
from planner import profiles
from planner.assemble import versions
from planner.estimate.add_workspaces import with_workspaces
from planner.estimate.footprint import granularity_bytes
from planner.estimate.roofline import HostCopies, op_times_ns, repetitions
from planner.estimate.smallest_total import smallest_of
from planner.plan_types.decision_base import Decision, micro_batches_of
from planner.plan_types.decisions import Accumulation, ChunkedLoss, Optimizer, Precision, StepInBackward
from planner.plan_types.recompute_decisions import Checkpoint, Offload, Replay
from planner.recompute.units import Units, units_of
from planner.rewrite.rehearse import certifying_graph, rehearsed_sizes, start_rehearsal
from planner.search.curve import CompiledProblem
from planner.search.milp import Search
from planner.workload.loading import load_workload

CARD = profiles.load("rtx-3090")
CHUNKED = (Precision(dtype="fp16"), ChunkedLoss(module="lm_head.decoder", chunks=8), Optimizer(name="adamw8bit"))
SPLIT = Accumulation(micro_batch_size=4, micro_batches=2)
MODELS: dict[str, tuple[str, int, int | None, tuple[Decision, ...]]] = {
    "RoBERTa-84M, fp16": ("roberta_84m", 64, 128, (Precision(dtype="fp16"),)),
    "RoBERTa-84M, fp16, chunked loss, 8-bit AdamW": ("roberta_84m", 64, 128, CHUNKED),
    "RoBERTa-84M, bf16, 2 micro-batches": ("roberta_84m", 8, 128, (SPLIT, Precision(dtype="bf16"))),
    "GPT-2": ("gpt2", 8, 512, ()),
    "GPT-2, step in backward": ("gpt2", 8, 512, (StepInBackward(),)),
    "Llama-1B, bf16": ("llama_1b", 2, 256, (Precision(dtype="bf16"),)),
    "ViT-base": ("vit_base", 16, None, ()),
    "U-Net": ("unet.py:build", 8, None, ()),
    "network without submodules": ("flat.py:build", 16, None, ()),
}
SHARES = (0.8, 0.65, 0.5)
"""Budgets as fractions of the baseline's peak."""
RANDOM, MOST_UNITS = 6, 8
"""Number of random selections, and the maximum number of units in one of them."""


def selections(found: Units, draws: random.Random) -> Iterator[tuple[int, ...]]:
    """Yields the selections of a model. A selection may be empty, or come more than once."""
    search = Search(found.problem)
    baseline_bytes = CompiledProblem(found.problem).peak(())
    for share in SHARES:
        if (solution := search.solve(int(share * baseline_bytes))) is not None:
            yield tuple(sorted(solution.units))
    yield tuple(sorted(search.smallest_peak().units))
    for _ in range(RANDOM):
        chosen = set(draws.sample(range(len(found.units)), draws.randint(1, min(MOST_UNITS, len(found.units)))))
        nested = {unit for path in found.problem.paths if len(chosen.intersection(path)) > 1 for unit in path}
        yield tuple(sorted(chosen - nested))


def differences(name: str, seed: int) -> list[int]:
    """Returns by how many bytes the predicted total of each selection of a model exceeds the rehearsed one."""
    example, batch_size, seq_len, decisions = MODELS[name]
    work = load_workload(str(EXAMPLES / example), batch_size=batch_size, seq_len=seq_len, optimizer="adamw")
    sizes = rehearsed_sizes(work, decisions)
    child = start_rehearsal(work, decisions, CARD, sizes=sizes, steps=1, primed=True, what_if=True)
    graph = with_workspaces(child.result(), CARD, torch.__version__)
    micro_batches = micro_batches_of(decisions)
    found = units_of(
        graph,
        op_times_ns(graph, CARD, micro_batches),
        granularity_bytes=granularity_bytes(CARD),
        launch_ns=CARD.launch_ns,
        kinds=(Checkpoint, Replay, Offload),
        host_copies=HostCopies(card=CARD, repeats=repetitions(graph, micro_batches)),
    )
    result = []
    for selected in filter(None, dict.fromkeys(selections(found, random.Random(seed)))):
        rehearsed = certifying_graph(work, (*decisions, *found.decisions(selected)), CARD)
        predicted_bytes = smallest_of(found.two_steps(graph, selected), CARD, [()])
        result.append(predicted_bytes - smallest_of(rehearsed, CARD, [()]))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only models whose name contains this text")
    parser.add_argument("--seed", type=int, default=0, help="for the random selections (default: 0)")
    options = parser.parse_args()
    title = ", ".join(f"{name} {version}" for name, version in versions().items())
    table = Table("model", "selections", "equal", "largest difference, MiB", title=title)
    for name in (name for name in MODELS if options.only in name):
        missed = differences(name, options.seed)
        table.add_row(name, str(len(missed)), str(missed.count(0)), f"{max(missed, key=abs) / MIB:+.1f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
