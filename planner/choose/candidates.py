"""A case: one outer choice with one split of the batch, from its recording to a problem that can be solved."""

from __future__ import annotations

import dataclasses
import functools

from planner.choose.recordings import Recordings
from planner.estimate import roofline
from planner.estimate.footprint import granularity_bytes, with_whole_batch
from planner.plan_types.decisions import ChunkedLoss, Decision
from planner.profiles.device import DeviceProfile
from planner.recompute.units import Units, units_of
from planner.recording.step_graph import Category, Phase, StepGraph
from planner.search import milp
from planner.search.problem import Selection
from planner.space.lm_head import ChunkedLossOption
from planner.space.micro_batches import MicroBatching

RECOMPUTE_TOLERANCE = 1000
"""Recompute costs are proven minimal to within one part in this of the step: less means nothing."""


class Candidate:
    """What is known of an outer choice with a split. Costly parts are made when they are first asked for."""

    def __init__(
        self,
        outer: tuple[Decision, ...],
        split: MicroBatching,
        graph: StepGraph,
        card: DeviceProfile,
        *,
        recompute: tuple[type[Decision], ...],
    ) -> None:
        self.outer, self.split, self._kinds = outer, split, recompute
        self._graph, self._granularity_bytes = graph, granularity_bytes(card)
        self._host_copies = roofline.HostCopies(card=card, repeats=roofline.repetitions(graph, split.micro_batches))
        self._op_ns = roofline.op_times_ns(graph, card, split.micro_batches)
        self.step_ns = sum(self._op_ns)
        """Without any recompute: no plan of this case is faster."""
        self.optimizer_ns = optimizer_ns(graph, self._op_ns)
        self._cheapest: dict[tuple[int, int | None], Selection | None] = {}
        self._could_pay: dict[tuple[int, int | None, bool, int | None], bool] = {}

    @functools.cached_property
    def peak_bytes(self) -> int:
        """Without any recompute."""
        return int(self._graph.live_bytes(granularity_bytes=self._granularity_bytes).max())

    @functools.cached_property
    def units(self) -> Units:
        return units_of(
            self._graph,
            self._op_ns,
            granularity_bytes=self._granularity_bytes,
            kinds=self._kinds,
            host_copies=self._host_copies,
        )

    @functools.cached_property
    def search(self) -> milp.Search:
        return milp.Search(self.units.problem)

    @property
    def lower_bound_bytes(self) -> int:
        """Bytes alive at some moment whatever is recomputed: no plan of this case is smaller."""
        return int(self.units.problem.fixed_bytes.max())

    def cheapest(self, budget_bytes: int, *, below_ns: int | None) -> Selection | None:
        """The cheapest units to recompute for a peak inside the budget, if they cost less than `below_ns`."""
        asked = (budget_bytes, below_ns)
        if asked not in self._cheapest:
            tolerance_ns = self.step_ns // RECOMPUTE_TOLERANCE
            self._cheapest[asked] = self.search.solve(budget_bytes, tolerance_ns=tolerance_ns, below_ns=below_ns)
        return self._cheapest[asked]

    def could_pay(self, budget_bytes: int, *, state_bytes: int | None, gradients: bool, below_ns: int | None) -> bool:
        """Whether some units, or none, could be enough and cost less than `below_ns`, if the optimizer kept less.

        False is certain: the relaxed problem leaves out all that another optimizer would need during its update.

        Args:
            state_bytes: at least what the other optimizer keeps; None: as it is.
            gradients: whether they are kept until the update.
        """
        asked = (budget_bytes, state_bytes, gradients, below_ns)
        if asked not in self._could_pay:
            self._could_pay[asked] = self._has_relaxed_plan(*asked)
        return self._could_pay[asked]

    def _has_relaxed_plan(
        self, budget_bytes: int, state_bytes: int | None, gradients: bool, below_ns: int | None
    ) -> bool:
        if self._graph.update_tick is None:
            return True
        fixed = self.units.problem.fixed_bytes.copy()
        if state_bytes is not None:
            fixed -= max(self._graph.bytes_of(Category.OPTIMIZER_STATE) - state_bytes, 0)
        if not gradients:
            kept = [s for s in self._graph.storages if s.category is Category.GRADIENT]
            gradients_alone = dataclasses.replace(self._graph, storages=kept, saves=[])
            fixed -= gradients_alone.live_bytes(granularity_bytes=self._granularity_bytes)[: len(fixed)]
        fixed[self._graph.update_tick :] = 0
        relaxed = milp.Search(dataclasses.replace(self.units.problem, fixed_bytes=fixed))
        try:
            tolerance_ns = self.step_ns if below_ns is None else below_ns
            return relaxed.solve(budget_bytes, tolerance_ns=tolerance_ns, below_ns=below_ns) is not None
        except milp.SearchTimeout:
            return True

    def smallest(self) -> Selection:
        return self.search.smallest_peak(tolerance_ns=self.step_ns // RECOMPUTE_TOLERANCE)

    def cheapest_single(self, budget_bytes: int) -> Selection | None:
        """The one unit that costs least, for when checkpointing is forced and nothing needs it."""
        costs = self.units.problem.cost_ns
        for unit in sorted(range(len(costs)), key=lambda unit: (costs[unit], unit)):
            peak = self.search.exact.peak((unit,))
            if peak <= budget_bytes:
                return Selection(
                    units=(unit,), peak_bytes=peak, cost_ns=costs[unit], status="optimal", gap=0.0, seconds=0.0
                )
        return None

    def decisions(self, units: tuple[int, ...]) -> tuple[Decision, ...]:
        """Outer choice, split and these units, as a plan states them."""
        return (*self.outer, *self.split.decisions(), *self.units.decisions(units))


class Candidates:
    """All cases of one planning under one set of ways to recompute, each made once."""

    def __init__(
        self,
        recordings: Recordings,
        card: DeviceProfile,
        *,
        batch_bytes: int,
        recompute: tuple[type[Decision], ...] = (),
    ) -> None:
        self._recordings, self._card, self._batch_bytes, self._recompute = recordings, card, batch_bytes, recompute
        self._made: dict[tuple[tuple[Decision, ...], MicroBatching], Candidate] = {}
        self._others = {recompute: self}

    def under(self, recompute: tuple[type[Decision], ...]) -> Candidates:
        """The cases under these ways to recompute: from the same recordings."""
        if recompute not in self._others:
            other = Candidates(self._recordings, self._card, batch_bytes=self._batch_bytes, recompute=recompute)
            self._others[recompute], other._others = other, self._others
        return self._others[recompute]

    def prefetch(self, outer: tuple[Decision, ...], splits: tuple[MicroBatching, ...]) -> None:
        """Begin the recordings of these cases."""
        self._recordings.prefetch(outer, splits)

    def of(self, outer: tuple[Decision, ...], split: MicroBatching) -> Candidate:
        key = (outer, split)
        if key not in self._made:
            graph = with_whole_batch(self._recordings.of(outer, split), self._batch_bytes)
            self._made[key] = Candidate(outer, split, graph, self._card, recompute=self._recompute)
        return self._made[key]

    def made(self) -> tuple[Candidate, ...]:
        """All so far."""
        return tuple(self._made.values())

    def known(self, outer: tuple[Decision, ...], split: MicroBatching) -> Candidate | None:
        """The case, if it has been made already."""
        return self._made.get((outer, split))


class ChunkedCandidates:
    """The same cases, by outer choices in which the loss is in as many chunks as the whole batch needs."""

    def __init__(self, cases: Candidates, chunks: ChunkedLossOption | None) -> None:
        self._cases, self._chunks = cases, chunks

    def outer(self, outer: tuple[Decision, ...], split: MicroBatching) -> tuple[Decision, ...]:
        """The outer choice with the number of chunks that a micro-batch needs; without them where it needs none."""
        if self._chunks is None or not any(isinstance(decision, ChunkedLoss) for decision in outer):
            return outer
        part = self._chunks.for_micro_batches(split.micro_batches)
        replaced = (part if isinstance(decision, ChunkedLoss) else decision for decision in outer)
        return tuple(decision for decision in replaced if decision is not None)

    def prefetch(self, outer: tuple[Decision, ...], splits: tuple[MicroBatching, ...]) -> None:
        for found in dict.fromkeys(self.outer(outer, split) for split in splits):
            self._cases.prefetch(found, tuple(split for split in splits if self.outer(outer, split) == found))

    def of(self, outer: tuple[Decision, ...], split: MicroBatching) -> Candidate:
        return self._cases.of(self.outer(outer, split), split)

    def known(self, outer: tuple[Decision, ...], split: MicroBatching) -> Candidate | None:
        return self._cases.known(self.outer(outer, split), split)

    def made(self) -> tuple[Candidate, ...]:
        return self._cases.made()


def optimizer_ns(graph: StepGraph, op_times_ns: list[int]) -> int:
    """Time of the optimizer phase."""
    return sum(ns for ns, op in zip(op_times_ns, graph.ops, strict=True) if op.phase is Phase.OPTIMIZER)
