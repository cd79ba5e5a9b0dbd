"""The pipeline, and the one place that knows planner and rewriter both.

    workload -> record -> step graph -> cost -> search -> decisions -> rewrite -> rehearse again -> Plan

Read `Planning.run` from top to bottom.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import platform
import time
from collections.abc import Sequence
from typing import Any

import torch

from planner import cost
from planner.calling import LossFn
from planner.cards import resolve_card
from planner.cases import Cases, optimizer_ns
from planner.child import Child
from planner.choose import Bounds, Choice, Chooser
from planner.decisions import KINDS, Checkpoint, Decision, Fidelity, Freeze, Optimizer, Precision
from planner.errors import PlanFileError
from planner.footprint import Measured, measure, smallest_capacity_bytes, with_workspaces
from planner.fx_graph import to_fx
from planner.options import Offer, Rules, floor_bytes, frozen_offer, offer, prefixes
from planner.plan_file import NextStep, Plan, Shortfall, SolverFacts
from planner.recordings import Recordings
from planner.references import load_workload
from planner.search.threshold import first_true
from planner.sizes import parse_size
from planner.step_graph import Category, Phase, StepGraph
from planner.workload import OptimizerSpec, Workload, workload
from profiles.device import DeviceProfile
from rewrite.certify import certifying_graph, micro_batches_of, start_rehearsal

_ATTEMPTS = 8
"""Rounds of choosing and certifying until the allocator's slack is paid for."""
_FIRST_SLACK = 0.01
"""Share of the budget left to the allocator in the first round."""


def plan_live_model(
    model: torch.nn.Module,
    batch: Any,
    *,
    vram: str | int | None,
    loss_fn: LossFn | None,
    gpu: str | None,
    fidelity: str,
    optimizer: OptimizerSpec,
    force: Sequence[str],
    forbid: Sequence[str],
) -> Plan:
    """`planner.plan`."""
    rules = Rules(fidelity=Fidelity.parse(fidelity), forced=tuple(force), forbidden=tuple(forbid))
    work = workload(model, batch, loss_fn=loss_fn, optimizer=optimizer)
    card, vram_bytes = card_and_budget(gpu, vram)
    return plan_workload(work, card, vram_bytes=vram_bytes, rules=rules)


def record_live_model(
    model: torch.nn.Module, batch: Any, *, loss_fn: LossFn | None, gpu: str | None, optimizer: OptimizerSpec
) -> torch.fx.Graph:
    """`planner.record`."""
    work = workload(model, batch, loss_fn=loss_fn, optimizer=optimizer)
    return to_fx(certifying_graph(work, (), resolve_card(gpu, None)))


def card_and_budget(gpu: str | None, vram: str | int | None) -> tuple[DeviceProfile, int | None]:
    """The card, and the budget in bytes; '80%' is of the card named or at hand."""
    relative = isinstance(vram, str) and vram.strip().endswith("%")
    size = None if vram is None or relative else parse_size(vram, device_bytes=None)
    card = resolve_card(gpu, size)
    return card, parse_size(vram, device_bytes=card.vram_bytes) if relative else size


def plan_workload(work: Workload, card: DeviceProfile, *, vram_bytes: int | None, rules: Rules) -> Plan:
    """Plan one optimizer step of `work` on `card` so that its total stays inside `vram_bytes`."""
    return Planning(work, card, vram_bytes=vram_bytes, rules=rules).run()


def replan(saved: Plan, *, vram: str | None, gpu: str | None) -> Plan:
    """Rehearse a saved plan again, perhaps on another card or under another budget.

    Raises:
        PlanFileError: the plan was made for a live object, or its model is another one by now.
    """
    if saved.model.reference is None:
        raise PlanFileError("the plan was made for a live model: use rewrite.certify(plan, model, batch)")
    work = load_workload(
        saved.model.reference,
        batch_size=saved.workload.batch_size,
        seq_len=saved.workload.seq_len,
        optimizer=saved.workload.optimizer,
    )
    if work.model_facts().fingerprint != saved.model.fingerprint:
        raise PlanFileError(
            f"'{saved.model.reference}' is not the {saved.model.name} that the plan was made for: names, shapes or "
            "dtypes of its parameters differ; make the plan again"
        )
    if vram is None:
        card, vram_bytes = resolve_card(gpu or saved.card, saved.vram_bytes), saved.vram_bytes
    else:
        card, vram_bytes = card_and_budget(gpu or saved.card, vram)
    rules = Rules(fidelity=Fidelity.parse(saved.fidelity), forced=saved.forced, forbidden=saved.forbidden)
    return Planning(work, card, vram_bytes=vram_bytes, rules=rules).rehearse(saved.decisions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certified:
    """A choice whose rewritten step was rehearsed."""

    choice: Choice
    graph: StepGraph
    measured: Measured


class Planning:
    """One call of `plan`."""

    def __init__(self, work: Workload, card: DeviceProfile, *, vram_bytes: int | None, rules: Rules) -> None:
        self.work, self.card, self.vram_bytes, self.rules = work, card, vram_bytes, rules
        self.began = time.perf_counter()
        self.recordings = Recordings(self._start_what_if, self._with_workspaces)
        self.cases = Cases(self.recordings, card)
        self.choosers: list[Chooser] = []
        self.notes: list[str] = []

    def run(self) -> Plan:
        """Baseline, choice, certificate; where nothing fits, the smallest plan and what is missing."""
        if self.vram_bytes is None:
            self._rehearse_as_it_is()
            return self._plan(self._unchanged(), shortfall=None)
        offered = offer(self.work, self.card, self.rules)
        self.notes += offered.notes
        try:
            self.cases.prefetch((*offered.precisions[-1], *offered.optimizers[0]), offered.splits[:1])
            self._rehearse_as_it_is()
            best = self._best(offered, self.rules)
            if best is not None:
                return self._plan(best, shortfall=None)
            smallest = self._certify(self._chooser(offered, self.rules).smallest())
            return self._plan(smallest, shortfall=self._missing(smallest, next_step=self._next_step()))
        finally:
            self.recordings.close()

    def rehearse(self, decisions: tuple[Decision, ...]) -> Plan:
        """The plan that these decisions make, without choosing."""
        self._rehearse_as_it_is()
        certified = self._certify(Choice(decisions=decisions, peak_bytes=0, step_ns=0, status="not needed", gap=0.0))
        promised = dataclasses.replace(certified.choice, peak_bytes=certified.measured.curve_bytes)
        certified = dataclasses.replace(certified, choice=promised)
        fits = self.vram_bytes is None or certified.measured.fits
        return self._plan(certified, shortfall=None if fits else self._missing(certified, next_step=None))

    def _rehearse_as_it_is(self) -> None:
        self.baseline_graph = certifying_graph(self.work, (), self.card)
        self.baseline = measure(self.baseline_graph, self.card, vram_bytes=self.vram_bytes, micro_batches=1)

    # ---- choosing -----------------------------------------------------------------------------------------------

    def _best(self, offered: Offer, rules: Rules) -> Certified | None:
        """The fastest certified plan; parameters are frozen only if nothing else fits, and as few as possible."""
        if not rules.force(Freeze):
            found = self._fastest(offered, rules)
            if found is not None or not rules.allow(Freeze):
                return found
        candidates = self._prefixes()
        budget = self._budget()

        def suffices(number: int) -> bool:
            return self._chooser(frozen_offer(offered, candidates[number]), rules).fastest(budget) is not None

        guess = 0 if rules.force(Freeze) else self._guessed_prefix(candidates, offered, rules)
        for frozen in candidates[first_true(len(candidates), suffices, guess=guess) :]:
            if (found := self._fastest(frozen_offer(offered, frozen), rules)) is not None:
                return found  # the first, unless the allocator's slack asks for more
        return None

    def _guessed_prefix(self, candidates: tuple[Freeze, ...], offered: Offer, rules: Rules) -> int:
        """The prefix that suffices if freezing spared nothing but gradients and optimizer state."""
        smallest = self._chooser(offered, rules).smallest()
        outer = tuple(d for d in smallest.decisions if isinstance(d, (Precision, Optimizer)))
        missing = smallest.peak_bytes - self._budget()
        floors = [self._floor_bytes((frozen, *outer)) for frozen in candidates]
        return next(
            (n for n, floor in enumerate(floors) if self._floor_bytes(outer) - floor >= missing), len(candidates)
        )

    def _fastest(self, offered: Offer, rules: Rules) -> Certified | None:
        """Choose, certify, and choose again with less where the allocator's slack did not fit."""
        chooser, budget = self._chooser(offered, rules), self._budget()
        for _ in range(_ATTEMPTS):
            choice = chooser.fastest(budget)
            if choice is None:
                break
            certified = self._certify(choice)
            if certified.measured.fits:
                return certified
            short = smallest_capacity_bytes(certified.graph, self.card) - self.vram_bytes
            budget = min(budget, choice.peak_bytes) - max(short, 1 << 20)
        return None

    def _budget(self) -> int:
        """Bytes for tensors: what the context leaves, less a first guess of the allocator's slack."""
        capacity = self.vram_bytes - self.card.context_bytes
        return capacity - (round(capacity * _FIRST_SLACK) if self.card.allocator else 0)

    def _chooser(self, offered: Offer, rules: Rules) -> Chooser:
        frozen = any(isinstance(decision, Freeze) for decision in offered.precisions[0])
        times = cost.op_times_ns(self.baseline_graph, self.card, 1)
        ops = zip(self.baseline_graph.ops, times, strict=True)
        forward_ns = sum(ns for op, ns in ops if op.phase is Phase.FORWARD)
        bounds = Bounds(
            step_ns=forward_ns if frozen else sum(times),
            optimizer_ns=0 if frozen else optimizer_ns(self.baseline_graph, times),
            floor_bytes=self._floor_bytes,
        )
        chooser = Chooser(offered, self.cases, bounds, force_checkpoint=rules.force(Checkpoint))
        self.choosers.append(chooser)
        return chooser

    @functools.cache  # noqa: B019  lives as long as the planning
    def _floor_bytes(self, outer: tuple[Decision, ...]) -> int:
        return floor_bytes(self.work, self._optimizer_peak_bytes(), outer)

    @functools.cache  # noqa: B019  lives as long as the planning
    def _optimizer_peak_bytes(self) -> int:
        """Largest number of bytes alive while the baseline's optimizer steps."""
        live = self.baseline_graph.live_bytes()
        ticks = [op.tick + 1 for op in self.baseline_graph.ops if op.phase is Phase.OPTIMIZER]
        return int(live[ticks].max()) if ticks else 0

    def _start_what_if(self, decisions: tuple[Decision, ...], sizes: tuple[int, ...]) -> Child:
        return start_rehearsal(self.work, decisions, self.card, sizes=sizes, steps=1, primed=True, what_if=True)

    def _with_workspaces(self, graph: StepGraph) -> StepGraph:
        return with_workspaces(graph, self.card.cublas_workspace_bytes(torch.__version__))

    @functools.cache  # noqa: B019  lives as long as the planning
    def _prefixes(self) -> tuple[Freeze, ...]:
        starts = [(call.module, call.start) for call in self.baseline_graph.calls]
        modules = self.work.model.named_modules()
        owners = [name for name, module in modules if any(True for _ in module.parameters(recurse=False))]
        return prefixes(starts, owners)

    # ---- certifying -------------------------------------------------------------------------------------------

    def _certify(self, choice: Choice) -> Certified:
        if not choice.decisions:
            graph, measured = self.baseline_graph, self.baseline
        else:
            graph = certifying_graph(self.work, choice.decisions, self.card)
            measured = measure(
                graph, self.card, vram_bytes=self.vram_bytes, micro_batches=micro_batches_of(choice.decisions)
            )
        return Certified(choice=choice, graph=graph, measured=measured)

    def _unchanged(self) -> Certified:
        footprint = self.baseline.footprint
        choice = Choice(
            decisions=(), peak_bytes=self.baseline.curve_bytes, step_ns=footprint.step_ns, status="not needed", gap=0.0
        )
        return Certified(choice=choice, graph=self.baseline_graph, measured=self.baseline)

    # ---- when nothing fits ------------------------------------------------------------------------------------

    def _missing(self, smallest: Certified, *, next_step: NextStep | None) -> Shortfall:
        needed = smallest_capacity_bytes(smallest.graph, self.card)
        parts = {
            category: size
            for category, size in smallest.measured.footprint.breakdown.items()
            if category != Category.SLACK
        }
        binding = max(parts, key=lambda category: parts[category])
        return Shortfall(
            missing_bytes=max(needed - self.vram_bytes, 1),
            binding=str(binding),
            binding_bytes=parts[binding],
            next_step=next_step,
        )

    def _next_step(self) -> NextStep | None:
        """The cheapest single relaxation under which something fits."""
        found: list[NextStep] = []
        for words, rules in self._relaxations():
            best = self._best(offer(self.work, self.card, rules), rules)
            if best is not None:
                footprint = best.measured.footprint
                found.append(
                    NextStep(
                        relax=words,
                        decisions=best.choice.decisions,
                        total_bytes=footprint.total_bytes,
                        slowdown=footprint.step_ns / max(self.baseline.footprint.step_ns, 1),
                    )
                )
                if rules.fidelity == self.rules.fidelity:
                    continue
                break
        return min(found, key=lambda step: step.slowdown, default=None)

    def _relaxations(self):
        for kind in KINDS.values():
            if kind.kind in self.rules.forbidden and kind.fidelity <= self.rules.fidelity:
                forbidden = tuple(name for name in self.rules.forbidden if name != kind.kind)
                yield f"allow {kind.kind}", dataclasses.replace(self.rules, forbidden=forbidden)
        for fidelity in Fidelity:
            if fidelity > self.rules.fidelity:
                yield f"--fidelity {fidelity.name.lower()}", dataclasses.replace(self.rules, fidelity=fidelity)

    # ---- the plan ---------------------------------------------------------------------------------------------

    def _plan(self, certified: Certified, *, shortfall: Shortfall | None) -> Plan:
        choice, measured = certified.choice, certified.measured
        if undecided := sum(chooser.undecided for chooser in self.choosers):
            self.notes.append(f"{undecided} programs hit their time limit without an answer: a faster plan may exist")
        return Plan(
            model=self.work.model_facts(),
            workload=self.work.facts(),
            card=self.card.name,
            card_source=self.card.source,
            vram_bytes=self.vram_bytes,
            fidelity=self.rules.fidelity.name.lower(),
            forced=self.rules.forced,
            forbidden=self.rules.forbidden,
            baseline=self.baseline.footprint,
            peak=measured.footprint,
            decisions=choice.decisions,
            fits=shortfall is None and (self.vram_bytes is None or measured.fits),
            certified=True,
            solver=SolverFacts(
                status=choice.status,
                gap=choice.gap,
                seconds=sum(chooser.solve_seconds for chooser in self.choosers),
                promised_bytes=choice.peak_bytes,
                certified_bytes=measured.curve_bytes,
            ),
            shortfall=shortfall,
            notes=tuple(dict.fromkeys((*self.notes, *certified.graph.notes))),
            versions=versions(),
            seconds=time.perf_counter() - self.began,
        )


def versions() -> dict[str, str]:
    """Of everything whose version can change a plan."""
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "bitsandbytes"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
