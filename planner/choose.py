"""The fastest plan that fits: outer choices by best bound first, checkpoints by the integer program for each.

A choice without any recompute is a lower bound of its time; choices that cannot beat the best one found are never
recorded. Plans whose times are within `TIE` count as equally fast; among them the more faithful, then the simpler.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from planner import cost
from planner.decisions import Checkpoint, Decision, Optimizer, Precision
from planner.footprint import granularity_bytes
from planner.options import Offer, Split
from planner.recordings import Recordings
from planner.search import milp
from planner.search.curve import CompiledProblem
from planner.step_graph import Phase, StepGraph
from planner.units import Units, units_of
from profiles.device import DeviceProfile

TIE = 1.05
"""Predicted times closer than this factor say nothing about which is faster."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to train, with what the program promises of it."""

    decisions: tuple[Decision, ...]
    peak_bytes: int
    step_ns: int
    status: str
    gap: float

    @property
    def rank(self) -> tuple[int, int, int]:
        """Order among equally fast plans."""
        return fidelity_of(self.decisions), len(self.decisions), self.step_ns


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaselineTime:
    """Of the step without any decision: a bound for every choice that keeps its precision."""

    step_ns: int
    optimizer_ns: int

    @classmethod
    def of(cls, graph: StepGraph, card: DeviceProfile) -> BaselineTime:
        times = cost.op_times_ns(graph, card, 1)
        return cls(step_ns=sum(times), optimizer_ns=_optimizer_ns(graph, times))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Case:
    """An outer choice and a split, ready to be solved."""

    units: Units
    compiled: CompiledProblem
    search: milp.Search
    step_ns: int
    optimizer_ns: int
    split: Split


class Chooser:
    """Answers for many budgets: recordings and problems are kept."""

    def __init__(
        self,
        offer: Offer,
        recordings: Recordings,
        card: DeviceProfile,
        *,
        baseline: BaselineTime,
        floor_bytes: Callable[[tuple[Decision, ...]], int],
        force_checkpoint: bool,
    ) -> None:
        self.offer = offer
        self._baseline = baseline
        self._floor_bytes = floor_bytes
        self._recordings = recordings
        self._card = card
        self._force_checkpoint = force_checkpoint
        self._cases: dict[tuple[tuple[Decision, ...], Split], _Case] = {}
        self.solve_seconds = 0.0
        self.undecided = 0
        """Programs that hit their time limit without an answer."""

    def fastest(self, budget_bytes: int) -> Choice | None:
        """The fastest choice whose promised peak is at most `budget_bytes`; None if there is none."""
        found: list[Choice] = []
        for outer in self._by_bound(found):
            if self._floor_bytes(outer) > budget_bytes:
                continue
            found += self._fastest_splits(outer, budget_bytes)
        if not found:
            return None
        quickest = min(choice.step_ns for choice in found)
        return min((choice for choice in found if choice.step_ns <= TIE * quickest), key=lambda choice: choice.rank)

    def smallest(self) -> Choice:
        """The choice with the smallest promised peak; cases whose unconditional bytes exceed it are not solved."""
        splits = dict.fromkeys((self.offer.splits[-1], self.offer.splits[0]))
        cases = [(outer, self._case(outer, split)) for outer in self._outer_choices() for split in splits]
        best: Choice | None = None
        for outer, case in sorted(cases, key=lambda item: int(item[1].units.problem.fixed_bytes.max())):
            if best is not None and case.units.problem.fixed_bytes.max() >= best.peak_bytes:
                break
            found = self._smallest_of(outer, case)
            if best is None or (found.peak_bytes, found.step_ns) < (best.peak_bytes, best.step_ns):
                best = found
        return best

    def close(self) -> None:
        self._recordings.close()

    # ---- outer choices ----------------------------------------------------------------------------------------

    def _outer_choices(self) -> Iterator[tuple[Decision, ...]]:
        """The quickest precision first, so that its time prunes the others; simple optimizers before 8-bit ones."""
        for optimizer in self.offer.optimizers:
            for precision in reversed(self.offer.precisions):
                yield (*precision, *optimizer)

    def _by_bound(self, found: list[Choice]) -> Iterator[tuple[Decision, ...]]:
        """Outer choices that may still win, given what has been found up to then."""
        for outer in self._outer_choices():
            if found:
                quickest = min(choice.step_ns for choice in found)
                more_faithful = fidelity_of(outer) < min(choice.rank[0] for choice in found)
                if self._bound_ns(outer) > (quickest * TIE if more_faithful else quickest / TIE):
                    continue
            yield outer

    def _bound_ns(self, outer: tuple[Decision, ...]) -> int:
        """Time that no plan of this outer choice can go below, from what has been recorded already."""
        if not any(isinstance(decision, Precision) for decision in outer):
            eight_bit = any(isinstance(decision, Optimizer) for decision in outer)
            return self._baseline.step_ns - (self._baseline.optimizer_ns if eight_bit else 0)
        simpler = self._cases.get((tuple(d for d in outer if not isinstance(d, Optimizer)), self.offer.splits[0]))
        return 0 if simpler is None else simpler.step_ns - simpler.optimizer_ns

    def _fastest_splits(self, outer: tuple[Decision, ...], budget_bytes: int) -> list[Choice]:
        """What one outer choice gives, in rising number of micro-batches, as long as more of them may be quicker."""
        self._recordings.prefetch(outer, self.offer.splits)
        found: list[Choice] = []
        for split in self.offer.splits:
            case = self._case(outer, split)
            if found and case.step_ns >= min(choice.step_ns for choice in found):
                break
            if (choice := self._solve(outer, case, budget_bytes)) is not None:
                found.append(choice)
        return found

    # ---- one case ---------------------------------------------------------------------------------------------

    def _case(self, outer: tuple[Decision, ...], split: Split) -> _Case:
        key = (outer, split)
        if key not in self._cases:
            graph = self._recordings.of(outer, split)
            times = cost.op_times_ns(graph, self._card, split.micro_batches)
            units = units_of(graph, times, granularity_bytes=granularity_bytes(self._card))
            self._cases[key] = _Case(
                units=units,
                compiled=CompiledProblem(units.problem),
                search=milp.Search(units.problem),
                step_ns=sum(times),
                optimizer_ns=_optimizer_ns(graph, times),
                split=split,
            )
        return self._cases[key]

    def _solve(self, outer: tuple[Decision, ...], case: _Case, budget_bytes: int) -> Choice | None:
        unchanged = case.compiled.peak(())
        if unchanged <= budget_bytes:
            if self._force_checkpoint:
                return self._cheapest_single(outer, case, budget_bytes)
            return self._choice(outer, case, (), unchanged, "optimal", 0.0)
        if not self.offer.checkpoint:
            return None
        try:
            best = self._timed(lambda: case.search.solve(budget_bytes))
        except milp.SearchTimeout:
            self.undecided += 1
            return None
        return None if best is None else self._choice(outer, case, best.units, best.peak_bytes, best.status, best.gap)

    def _smallest_of(self, outer: tuple[Decision, ...], case: _Case) -> Choice:
        if not self.offer.checkpoint:
            return self._choice(outer, case, (), case.compiled.peak(()), "optimal", 0.0)
        best = self._timed(case.search.smallest_peak)
        return self._choice(outer, case, best.units, best.peak_bytes, best.status, best.gap)

    def _cheapest_single(self, outer: tuple[Decision, ...], case: _Case, budget_bytes: int) -> Choice | None:
        """Checkpointing is forced where none is needed: the one unit that costs least."""
        by_cost = sorted(range(len(case.units.modules)), key=lambda unit: (case.units.problem.cost_ns[unit], unit))
        for unit in by_cost:
            if (peak := case.compiled.peak((unit,))) <= budget_bytes:
                return self._choice(outer, case, (unit,), peak, "optimal", 0.0)
        return None

    def _timed(self, function: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        try:
            return function()
        finally:
            self.solve_seconds += time.perf_counter() - began

    def _choice(self, outer, case: _Case, units: tuple[int, ...], peak: int, status: str, gap: float) -> Choice:
        recompute_ns = sum(case.units.problem.cost_ns[unit] for unit in units)
        checkpoint = (Checkpoint(modules=tuple(case.units.modules[unit] for unit in units)),) if units else ()
        return Choice(
            decisions=(*outer, *case.split.decisions(), *checkpoint),
            peak_bytes=peak,
            step_ns=case.step_ns + recompute_ns,
            status=status,
            gap=gap,
        )


def fidelity_of(decisions: tuple[Decision, ...]) -> int:
    return max((decision.fidelity for decision in decisions), default=0)


def _optimizer_ns(graph: StepGraph, op_times_ns: list[int]) -> int:
    return sum(ns for ns, op in zip(op_times_ns, graph.ops, strict=True) if op.phase is Phase.OPTIMIZER)
