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

from planner.calling import LossFn
from planner.cards import resolve_card
from planner.choose import BaselineTime, Choice, Chooser
from planner.decisions import KINDS, Checkpoint, Decision, Fidelity, Freeze
from planner.errors import PlanFileError
from planner.footprint import Measured, measure, smallest_capacity_bytes, with_workspaces
from planner.options import Offer, Rules, floor_bytes, offer, prefixes
from planner.plan_file import NextStep, Plan, Shortfall, SolverFacts
from planner.recordings import Recordings
from planner.references import load_workload
from planner.sizes import parse_size
from planner.step_graph import Category, StepGraph
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
        self.solve_seconds = 0.0
        self.undecided = 0
        self.notes: list[str] = []

    def run(self) -> Plan:
        self._rehearse_as_it_is()
        if self.vram_bytes is None:
            return self._plan(self._unchanged(), shortfall=None)
        offered = offer(self.work, self.card, self.rules)
        self.notes += offered.notes
        best = self._best(offered, self.rules)
        if best is not None:
            return self._plan(best, shortfall=None)
        smallest = self._smallest(offered)
        return self._plan(smallest, shortfall=self._missing(smallest, next_step=self._next_step()))

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

    # ---- choosing ---------------------------------------------------------------------------------------------

    def _best(self, offered: Offer, rules: Rules) -> Certified | None:
        """The fastest certified plan; parameters are frozen only if nothing else fits, and as few as possible."""
        frozen_forced = rules.force(Freeze)
        found = None if frozen_forced else self._fastest(offered, rules, frozen=())
        if found is not None or not rules.allow(Freeze):
            return found
        candidates = self._prefixes()
        low, high, best = 0, len(candidates) - 1, None
        while low <= high:
            middle = low if frozen_forced and low == 0 else (low + high) // 2
            tried = self._fastest(offered, rules, frozen=(candidates[middle],))
            if tried is None:
                low = middle + 1
            else:
                best, high = tried, middle - 1
        return best

    def _fastest(self, offered: Offer, rules: Rules, *, frozen: tuple[Decision, ...]) -> Certified | None:
        """Choose, certify, and choose again with less where the allocator's slack did not fit."""
        chooser = self._chooser(offered, frozen, force_checkpoint=rules.force(Checkpoint))
        capacity = self.vram_bytes - self.card.context_bytes
        budget = capacity - (round(capacity * _FIRST_SLACK) if self.card.allocator else 0)
        try:
            for _ in range(_ATTEMPTS):
                choice = chooser.fastest(budget)
                if choice is None:
                    return None
                certified = self._certify(choice)
                if certified.measured.fits:
                    return certified
                short = smallest_capacity_bytes(certified.graph, self.card) - self.vram_bytes
                budget = min(budget, choice.peak_bytes) - max(short, 1 << 20)
            return None
        finally:
            self._close(chooser)

    def _smallest(self, offered: Offer) -> Certified:
        chooser = self._chooser(offered, (), force_checkpoint=False)
        try:
            return self._certify(chooser.smallest())
        finally:
            self._close(chooser)

    def _chooser(self, offered: Offer, frozen: tuple[Decision, ...], *, force_checkpoint: bool) -> Chooser:
        offered = dataclasses.replace(offered, precisions=tuple((*frozen, *choice) for choice in offered.precisions))
        return Chooser(
            offered,
            Recordings(self._start_what_if, self._with_workspaces),
            self.card,
            baseline=BaselineTime.of(self.baseline_graph, self.card)
            if not frozen
            else BaselineTime(step_ns=0, optimizer_ns=0),
            floor_bytes=functools.partial(floor_bytes, self.work),
            force_checkpoint=force_checkpoint,
        )

    def _close(self, chooser: Chooser) -> None:
        self.solve_seconds += chooser.solve_seconds
        self.undecided += chooser.undecided
        chooser.close()

    def _start_what_if(self, decisions: tuple[Decision, ...], sizes: tuple[int, ...]):
        return start_rehearsal(self.work, decisions, self.card, sizes=sizes, steps=1, primed=True, what_if=True)

    def _with_workspaces(self, graph: StepGraph) -> StepGraph:
        return with_workspaces(graph, self.card.cublas_workspace_bytes(torch.__version__))

    def _prefixes(self) -> tuple[Freeze, ...]:
        starts = [(call.module, call.start) for call in self.baseline_graph.calls]
        owners = [
            name
            for name, module in self.work.model.named_modules()
            if any(True for _ in module.parameters(recurse=False))
        ]
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
        if self.undecided:
            self.notes.append(
                f"{self.undecided} programs hit their time limit without an answer: a faster plan may exist"
            )
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
                seconds=self.solve_seconds,
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
