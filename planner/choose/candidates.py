"""Candidates: one configuration with one split of the batch, from its recording to a problem that can be solved.

A configuration is the decisions about the whole step: precision, optimizer, loss, time of the update. A candidate knows
the time and the peak of its step without recompute, which bound all of its plans: recompute only makes a plan slower.
Which modules to recompute or offload is an integer program over the units of its recording (`recompute.units`,
`search.milp`). Building that problem is costly, so each part is built when it is first needed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from planner.choose.recordings import Recordings
from planner.estimate import roofline
from planner.estimate.footprint import granularity_bytes, with_whole_batch
from planner.plan_types.decision_base import Decision, Role, has_role
from planner.profiles.device import DeviceProfile
from planner.recompute.units import Units, units_of
from planner.recording.step_graph import Category, Phase, StepGraph
from planner.search import milp
from planner.search.problem import Selection
from planner.space.lm_head import ChunkedLossOption
from planner.space.micro_batches import MicroBatching

RECOMPUTE_TOLERANCE = 1000
"""The search for the cheapest recompute stops at a gap of the step time divided by this number."""


class Candidate:
    """A configuration with a split of the batch."""

    def __init__(
        self,
        config: tuple[Decision, ...],
        split: MicroBatching,
        graph: StepGraph,
        card: DeviceProfile,
        *,
        recompute: tuple[type[Decision], ...],
    ) -> None:
        self.config, self.split, self._kinds = config, split, recompute
        self._graph, self._granularity_bytes = graph, granularity_bytes(card)
        self._host_copies = roofline.HostCopies(card=card, repeats=roofline.repetitions(graph, split.micro_batches))
        self._op_ns = roofline.op_times_ns(graph, card, split.micro_batches)
        self.step_ns = sum(self._op_ns)
        """Step time without recompute: no plan of this candidate is faster."""
        self.optimizer_ns = optimizer_ns(graph, self._op_ns)
        self._cheapest: dict[tuple[int, int | None], Selection | None] = {}
        self._could_pay: dict[tuple[int, int | None, bool, int | None], bool] = {}

    @functools.cached_property
    def peak_bytes(self) -> int:
        """Peak of the tensors without recompute."""
        return int(self._graph.live_bytes(granularity_bytes=self._granularity_bytes).max())

    @functools.cached_property
    def units(self) -> Units:
        """The modules and segments that can be recomputed or offloaded."""
        return units_of(
            self._graph,
            self._op_ns,
            granularity_bytes=self._granularity_bytes,
            kinds=self._kinds,
            host_copies=self._host_copies,
        )

    @functools.cached_property
    def search(self) -> milp.Search:
        """The integer program over the units."""
        return milp.Search(self.units.problem)

    @property
    def lower_bound_bytes(self) -> int:
        """Maximum over time of the bytes that no unit can free: no plan of this candidate has a smaller peak."""
        return int(self.units.problem.fixed_bytes.max())

    def cheapest(self, budget_bytes: int, *, below_ns: int | None) -> Selection | None:
        """The cheapest units to recompute for a peak inside the budget; None if they cost `below_ns` or more."""
        asked = (budget_bytes, below_ns)
        if asked not in self._cheapest:
            tolerance_ns = self.step_ns // RECOMPUTE_TOLERANCE
            self._cheapest[asked] = self.search.solve(budget_bytes, tolerance_ns=tolerance_ns, below_ns=below_ns)
        return self._cheapest[asked]

    def could_pay(self, budget_bytes: int, *, state_bytes: int | None, gradients: bool, below_ns: int | None) -> bool:
        """True if, with another optimizer, a plan could fit at a cost of less than `below_ns` of recompute.

        False is certain; True is not, because the relaxed problem ignores what another optimizer needs during its
        update.

        Args:
            state_bytes: lower bound on the state of the other optimizer; None for the state of this candidate.
            gradients: True if gradients are kept until the update.
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
        # Take the saved bytes out of what is always alive, and ignore everything from the update on.
        fixed = self.units.problem.fixed_bytes.copy()
        if state_bytes is not None:
            fixed -= max(self._graph.bytes_of(Category.OPTIMIZER_STATE) - state_bytes, 0)
        if not gradients:
            gradient_storages = [s for s in self._graph.storages if s.category is Category.GRADIENT]
            gradients_only = dataclasses.replace(self._graph, storages=gradient_storages, saves=[])
            fixed -= gradients_only.live_bytes(granularity_bytes=self._granularity_bytes)[: len(fixed)]
        fixed[self._graph.update_tick :] = 0
        relaxed = milp.Search(dataclasses.replace(self.units.problem, fixed_bytes=fixed))
        try:
            tolerance_ns = self.step_ns if below_ns is None else below_ns
            return relaxed.solve(budget_bytes, tolerance_ns=tolerance_ns, below_ns=below_ns) is not None
        except milp.SearchTimeout:
            return True

    def smallest(self) -> Selection:
        """The units with the smallest peak."""
        return self.search.smallest_peak(tolerance_ns=self.step_ns // RECOMPUTE_TOLERANCE)

    def cheapest_single(self, budget_bytes: int) -> Selection | None:
        """The cheapest single unit whose recompute keeps the peak inside the budget; None if there is none.

        If recompute is forced but not needed, the plan recomputes this unit.
        """
        costs = self.units.problem.cost_ns
        for unit in sorted(range(len(costs)), key=lambda unit: (costs[unit], unit)):
            peak = self.search.exact.peak((unit,))
            if peak <= budget_bytes:
                return Selection(
                    units=(unit,), peak_bytes=peak, cost_ns=costs[unit], status="optimal", gap=0.0, seconds=0.0
                )
        return None

    def decisions(self, units: tuple[int, ...]) -> tuple[Decision, ...]:
        """Configuration, split and these units, as a plan lists them."""
        return (*self.config, *self.split.decisions(), *self.units.decisions(units))


class Candidates:
    """All candidates of one planning session for one set of ways to recompute. Each candidate is created once."""

    def __init__(
        self,
        recordings: Recordings,
        card: DeviceProfile,
        *,
        batch_bytes: int,
        recompute: tuple[type[Decision], ...] = (),
    ) -> None:
        self._recordings, self._card, self._batch_bytes, self._recompute = recordings, card, batch_bytes, recompute
        self._candidates: dict[tuple[tuple[Decision, ...], MicroBatching], Candidate] = {}
        self._by_recompute = {recompute: self}

    def with_recompute(self, recompute: tuple[type[Decision], ...]) -> Candidates:
        """The candidates for another set of ways to recompute, from the same recordings."""
        if recompute not in self._by_recompute:
            other = Candidates(self._recordings, self._card, batch_bytes=self._batch_bytes, recompute=recompute)
            self._by_recompute[recompute], other._by_recompute = other, self._by_recompute
        return self._by_recompute[recompute]

    def prefetch(self, config: tuple[Decision, ...], splits: tuple[MicroBatching, ...]) -> None:
        """Start the recordings of these candidates."""
        self._recordings.prefetch(config, splits)

    def of(self, config: tuple[Decision, ...], split: MicroBatching) -> Candidate:
        """Returns the candidate. Raises `PlannerError` if its step cannot be rehearsed."""
        key = (config, split)
        if key not in self._candidates:
            graph = with_whole_batch(self._recordings.of(config, split), self._batch_bytes)
            self._candidates[key] = Candidate(config, split, graph, self._card, recompute=self._recompute)
        return self._candidates[key]

    def all(self) -> tuple[Candidate, ...]:
        """All candidates that were made so far."""
        return tuple(self._candidates.values())

    def get(self, config: tuple[Decision, ...], split: MicroBatching) -> Candidate | None:
        """The candidate if it has been made, else None."""
        return self._candidates.get((config, split))


class ChunkedCandidates:
    """The same candidates, looked up by configurations that state the number of loss chunks for the whole batch.

    A micro-batch needs fewer chunks: this class replaces the number of chunks by that for the split.
    """

    def __init__(self, candidates: Candidates, chunks: ChunkedLossOption | None) -> None:
        self._candidates, self._chunks = candidates, chunks

    def config(self, config: tuple[Decision, ...], split: MicroBatching) -> tuple[Decision, ...]:
        """The configuration with the number of chunks that a micro-batch needs; without chunks if it needs none."""
        if self._chunks is None or not has_role(config, Role.LOSS):
            return config
        chunked = self._chunks.for_micro_batches(split.micro_batches)
        replaced = (chunked if decision.role is Role.LOSS else decision for decision in config)
        return tuple(decision for decision in replaced if decision is not None)

    def prefetch(self, config: tuple[Decision, ...], splits: Iterable[MicroBatching]) -> None:
        """Start the recordings of these candidates; splits with equal numbers of chunks share them."""
        by_config: dict[tuple[Decision, ...], list[MicroBatching]] = {}
        for split in splits:
            by_config.setdefault(self.config(config, split), []).append(split)
        for chunked, members in by_config.items():
            self._candidates.prefetch(chunked, tuple(members))

    def of(self, config: tuple[Decision, ...], split: MicroBatching) -> Candidate:
        """Returns the candidate. Raises `PlannerError` if its step cannot be rehearsed."""
        return self._candidates.of(self.config(config, split), split)

    def get(self, config: tuple[Decision, ...], split: MicroBatching) -> Candidate | None:
        """The candidate if it has been made, else None."""
        return self._candidates.get(self.config(config, split), split)

    def all(self) -> tuple[Candidate, ...]:
        """All candidates that were made so far."""
        return self._candidates.all()


def optimizer_ns(graph: StepGraph, op_times_ns: list[int]) -> int:
    """Time of the optimizer phase."""
    return sum(ns for ns, op in zip(op_times_ns, graph.ops, strict=True) if op.phase is Phase.OPTIMIZER)
