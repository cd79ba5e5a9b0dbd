"""Candidates: a candidate is one configuration with one split of the batch, and its plans differ only in recompute.

A configuration is the decisions about the whole step: precision, loss, optimizer, and whether it steps in the
backward. The recording of a candidate gives the time and the peak of its step without recompute. No plan of the
candidate is faster, because recompute only takes more time. Which modules to recompute or offload is an integer program
over the units of the recording (`recompute.units`, `search.milp`). The units and the program are costly to build, so
they are built when they are first needed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable

import numpy as np

from planner.choose.bounds import UpdateMemoryBound, optimizer_ns
from planner.choose.choice import Choice, Prediction
from planner.choose.recordings import Recordings
from planner.estimate import roofline
from planner.estimate.footprint import granularity_bytes, with_whole_batch
from planner.plan_types.decision_base import Decision, Role, has_role, without_roles
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.recompute.failing import Excluded, setting_of
from planner.recompute.programs import Program, Programs
from planner.recompute.repeated_gathers import RepeatedGathers, gathered_once, repeated_gathers
from planner.recompute.selected_step import two_selected_steps
from planner.recompute.units import Units, checkpointable, outermost, units_of
from planner.recording.step_graph import StepGraph
from planner.search import milp
from planner.search.problem import Selection
from planner.space.configurations import Config
from planner.space.lm_head import ChunkedLossOption
from planner.space.micro_batches import MicroBatching

RECOMPUTE_TOLERANCE = 1000
"""The selected units may cost more than the cheapest ones, by at most the step time divided by this number."""
_SOLVER_SECONDS = 10.0
"""Time limit of one integer program, if the watch does not leave less."""


class Candidate:
    """A configuration with a split of the batch, and the bounds and the integer program of its plans."""

    def __init__(
        self,
        config: tuple[Decision, ...],
        split: MicroBatching,
        recording: Callable[[], StepGraph],
        card: DeviceProfile,
        *,
        recompute: tuple[type[Decision], ...],
        programs: Programs,
        excluded: Collection[Excluded] = (),
        sharding: tuple[Decision, ...] = (),
        watch: Watch | None = None,
    ) -> None:
        """
        Args:
            recording: returns a what-if recording of the step, each time the same. Under FSDP2, all parameters are
                gathered again for the backward.
            recompute: kinds of decisions that may free saved tensors.
            programs: builds the integer program, for candidates with the same `card`, `recompute` and `excluded`.
            excluded: modules to which techniques must not be applied.
            sharding: how several cards train together; empty for one card.
        """
        self.config, self.split, self._kinds, self._programs = config, split, recompute, programs
        setting = setting_of((*config, *split.decisions()))
        self._excluded = {(kind, module) for under, kind, module in excluded if under == setting}
        self._watch = watch or Watch()
        self._recording, self._granularity_bytes = recording, granularity_bytes(card)
        graph = recording()  # a recording of a large model is not kept, because it takes hundreds of megabytes
        self._host_copies = roofline.HostCopies(card=card, repeats=roofline.repetitions(graph, split.micro_batches))
        self._op_ns = roofline.op_times_ns(graph, card, split.micro_batches)
        self._sharding = sharding
        self._gathers = repeated_gathers(graph, [unit for way in sharding for unit in way.units_gathered_again])
        self.step_ns = roofline.step_ns(gathered_once(graph, self._gathers), card, split.micro_batches)
        """Step time in nanoseconds without recompute: no plan of this candidate is faster."""
        self._gather_ns = roofline.step_ns(graph, card, split.micro_batches) - self.step_ns if self._gathers else 0
        self.optimizer_ns = optimizer_ns(graph, self._op_ns)
        self.has_update = graph.update_tick is not None
        """True if the recorded optimizer update is separate from the backward, so that another one can replace it."""
        self._cheapest: dict[tuple[int, int | None], Selection | None] = {}
        self._may_fit: dict[tuple[UpdateMemoryBound, int, int | None, bool], bool] = {}
        self._predictions: dict[tuple[int, ...], Prediction] = {}
        self._least_peaks: dict[UpdateMemoryBound, int] = {}
        self._relaxed: dict[UpdateMemoryBound, milp.Search] = {}
        self._smallest: Selection | None = None
        """The selection with the smallest peak; None if it is not known."""
        self._above_bytes = 0.0
        """It is proven that all peaks are above this number of bytes."""

    @functools.cached_property
    def peak_bytes(self) -> int:
        """Peak of the tensors without recompute."""
        return int(self._live_bytes.max())

    @functools.cached_property
    def _live_bytes(self) -> np.ndarray:
        """int64[ticks]: bytes of the tensors without recompute."""
        graph = gathered_once(self._recording(), self._gathers)
        return graph.live_bytes(granularity_bytes=self._granularity_bytes)

    @functools.cached_property
    def _program(self) -> Program:
        if self._gathers:
            return Program(self._units_of(self._recording(), self._op_ns))
        key, size = (without_roles(self.config, Role.OPTIMIZER), self.split), self._granularity_bytes
        return self._programs.of(self._recording, self._op_ns, self._units_of, granularity_bytes=size, key=key)

    def _units_of(self, graph: StepGraph, op_ns: list[int]) -> Units:
        return units_of(
            graph,
            op_ns,
            granularity_bytes=self._granularity_bytes,
            launch_ns=self._host_copies.card.launch_ns,
            kinds=self._kinds,
            host_copies=self._host_copies,
            gathers=self._gathers_with_time(),
            excluded=self._excluded,
            watch=self._watch,
        )

    def _gathers_with_time(self) -> list[tuple[RepeatedGathers, int]]:
        """Returns the repeated gathers, each with its part of the time in ns that all of them take."""
        sent_bytes = max(sum(unit.sent_bytes for unit in self._gathers), 1)
        return [(unit, max(self._gather_ns, 0) * unit.sent_bytes // sent_bytes) for unit in self._gathers]

    @property
    def units(self) -> Units:
        """The modules and segments that can be recomputed or offloaded."""
        return self._program.units

    def modules_together(self, is_meant: Callable[[str], bool]) -> tuple[str, ...]:
        """Returns the paths of modules that may all be checkpointed as a whole. No units are built.

        Args:
            is_meant: True for the path of a module that may be among them.
        """
        graph = self._recording()
        possible = checkpointable(graph, self._kinds, self._excluded)
        return outermost(graph, [path for path in possible if is_meant(path)])

    @property
    def search(self) -> milp.Search:
        """The integer program that selects the units to recompute or offload."""
        return self._program.search

    @property
    def can_recompute(self) -> bool:
        """True if a unit can be recomputed or offloaded."""
        return any(not unit.is_gathered for unit in self.units.units)

    def can_free(self) -> bool:
        """True if units may be selected, which free memory and take time."""
        return bool(self._kinds or self._gathers)

    @property
    def lower_bound_bytes(self) -> int:
        """Peak of the bytes that are alive whatever units are selected: no plan of this candidate has a lower peak."""
        return int(self.units.problem.fixed_bytes.max())

    def cheapest(self, budget_bytes: int, *, below_ns: int | None) -> Selection | None:
        """Returns the cheapest units to recompute or offload for a peak inside the budget.

        None if no selection of units fits at a cost below `below_ns` (at any cost if `below_ns` is None).
        """
        asked = (budget_bytes, below_ns)
        if asked not in self._cheapest:
            tolerance_ns = self.step_ns // RECOMPUTE_TOLERANCE
            self._cheapest[asked] = self.search.solve(
                budget_bytes,
                time_limit_seconds=self._solver_seconds(),
                tolerance_ns=tolerance_ns,
                below_ns=below_ns,
            )
        return self._cheapest[asked]

    def may_fit_with(self, update: UpdateMemoryBound, budget_bytes: int, below_ns: int | None, recompute: bool) -> bool:
        """Returns True if a plan with another optimizer update may fit at a cost below `below_ns`.

        The answer is False only if this is proven to be impossible: by the memory without recompute, or by a relaxation
        of the candidate's integer program. The memory that the other update needs while it runs is ignored.

        Args:
            budget_bytes: maximum peak of the tensors.
            below_ns: limit of the cost of recompute; None for no limit.
            recompute: False if only plans without recompute count.
        """
        asked = (update, budget_bytes, below_ns, recompute)
        if asked not in self._may_fit:
            self._may_fit[asked] = self._is_possible(*asked)
        return self._may_fit[asked]

    def _is_possible(self, update: UpdateMemoryBound, budget_bytes: int, below_ns: int | None, recompute: bool) -> bool:
        if not self.has_update:
            return True
        if update not in self._least_peaks:
            self._least_peaks[update] = int(self._least_bytes(self._live_bytes, update).max())
        fits = self._least_peaks[update] <= budget_bytes
        if fits or not recompute:  # the units of a large model take seconds to build
            return fits
        if update not in self._relaxed:
            fixed_bytes = self._least_bytes(self.units.problem.fixed_bytes, update)
            self._relaxed[update] = self.search.with_fixed_bytes(fixed_bytes)
        seconds = self._solver_seconds()
        return self._relaxed[update].may_fit(budget_bytes, below_ns=below_ns, time_limit_seconds=seconds)

    def _least_bytes(self, live_bytes: np.ndarray, update: UpdateMemoryBound) -> np.ndarray:
        return update.least_bytes(live_bytes, graph=self._recording(), granularity_bytes=self._granularity_bytes)

    def smallest(self, *, most_bytes: float = math.inf) -> Selection | None:
        """Returns the selection of units with the smallest peak; among several, a cheap one.

        Args:
            most_bytes: largest peak that counts; infinite for no limit.

        Returns:
            None if it is proven that every selection has a peak above `most_bytes`.
        """
        if self._smallest is None and most_bytes > self._above_bytes:
            seconds = self._solver_seconds()
            if math.isfinite(most_bytes) and not self.search.may_fit(int(most_bytes), time_limit_seconds=seconds):
                self._above_bytes = most_bytes
                return None
            self._smallest = self.search.smallest_peak(
                time_limit_seconds=self._solver_seconds(), tolerance_ns=self.step_ns // RECOMPUTE_TOLERANCE
            )
        return self._smallest if self._smallest is not None and self._smallest.peak_bytes <= most_bytes else None

    def _solver_seconds(self) -> float:
        """Returns the time limit of an integer program in seconds. Raises `TimeIsUp` if no time is left."""
        self._watch.check()
        return min(_SOLVER_SECONDS, self._watch.left_seconds)

    def cheapest_single(self, budget_bytes: int) -> Selection | None:
        """Returns the cheapest single unit with which the peak is inside the budget; None if there is none.

        The chooser asks for it if recompute is forced but not needed.
        """
        costs = self.units.problem.cost_ns
        possible = [unit for unit in range(len(costs)) if not self.units.units[unit].is_gathered]
        for unit in sorted(possible, key=lambda unit: (costs[unit], unit)):
            peak = self.search.exact.peak((unit,))
            if peak <= budget_bytes:
                return Selection(
                    units=(unit,), peak_bytes=peak, cost_ns=costs[unit], status="optimal", gap=0.0, seconds=0.0
                )
        return None

    def decisions(self, units: tuple[int, ...]) -> tuple[Decision, ...]:
        """Returns the decisions of the plan that recomputes or offloads `units`: configuration, split and units."""
        if not self._gathers:
            chosen = self.units.decisions(units) if units else ()  # to build the units takes long, so only if needed
            return (*self.config, *self.split.decisions(), *chosen)
        again = self.units.gathered(units)
        sharding = tuple(way.gathering_again(again) for way in self._sharding)
        changed = () if sharding == self._sharding else sharding
        return (*changed, *self.config, *self.split.decisions(), *self.units.decisions(units))

    def choice(self, selection: Selection) -> Choice:
        """Returns the plan with the selected units, with the peak and the time that it promises."""
        step_ns, units = self.step_ns + selection.cost_ns, self.units if selection.units else None
        predicted = Prediction(
            functools.partial(_predicted_steps, self._recording, units, selection.units), self._watch
        )
        return Choice(
            decisions=self.decisions(selection.units),
            peak_bytes=selection.peak_bytes,
            step_ns=step_ns,
            status=selection.status,
            gap=selection.gap * selection.cost_ns / step_ns,
            prediction=None if self._gathers else self._predictions.setdefault(selection.units, predicted),
        )

    def without_units(self) -> Selection:
        """Returns the selection that recomputes and offloads nothing."""
        return Selection(units=(), peak_bytes=self.peak_bytes, cost_ns=0, status="optimal", gap=0.0, seconds=0.0)


def _predicted_steps(recording: Callable[[], StepGraph], units: Units | None, selected: tuple[int, ...]) -> StepGraph:
    """Returns the predicted allocations of two steps with the selected units; `units` is None if none are selected."""
    return two_selected_steps(recording(), {}, ()) if units is None else units.two_steps(recording(), selected)


class Candidates:
    """All candidates that may use the same techniques (`recompute`, `excluded`).

    Each candidate is created once, when it is first asked for.

    Args:
        batch_bytes: size of the whole batch.
        watch: is checked before each candidate, and limits the time of the integer programs.
        recompute: kinds of decisions that may free saved tensors (checkpoint, offload ...).
        excluded: modules to which techniques must not be applied.
        sharding: how several cards train together; empty for one card.
    """

    def __init__(
        self,
        recordings: Recordings,
        card: DeviceProfile,
        *,
        batch_bytes: int,
        watch: Watch | None = None,
        recompute: tuple[type[Decision], ...] = (),
        excluded: frozenset[Excluded] = frozenset(),
        sharding: tuple[Decision, ...] = (),
    ) -> None:
        self._watch, self._sharding, self._excluded = watch or Watch(), sharding, excluded
        self._recordings, self._card, self._batch_bytes, self._recompute = recordings, card, batch_bytes, recompute
        self._candidates: dict[tuple[tuple[Decision, ...], MicroBatching], Candidate] = {}
        self._programs = Programs()
        self._has_dropped = recordings.is_dropped

    def prefetch(self, config: Config, splits: Iterable[MicroBatching], *, updates_only: bool = False) -> None:
        """Start the recordings that these candidates need, without waiting for them (`Recordings.prefetch`)."""
        self._recordings.prefetch(config, splits, updates_only=updates_only)

    def of(self, config: tuple[Decision, ...], split: MicroBatching) -> Candidate:
        """Returns the candidate, recorded if necessary. Raises `PlannerError` if its step cannot be rehearsed."""
        self._watch.check()
        self._drop_outdated()
        key = (config, split)
        if key not in self._candidates:
            recorded, size = self._recordings.of(config, split), self._batch_bytes
            self._candidates[key] = Candidate(
                config,
                split,
                lambda: with_whole_batch(recorded(), size),
                self._card,
                recompute=self._recompute,
                programs=self._programs,
                excluded=self._excluded,
                sharding=self._sharding,
                watch=self._watch,
            )
        return self._candidates[key]

    def all(self) -> tuple[Candidate, ...]:
        """Returns all candidates that have been created so far."""
        self._drop_outdated()
        return tuple(self._candidates.values())

    def get(self, config: tuple[Decision, ...], split: MicroBatching) -> Candidate | None:
        """Returns the candidate if it has been created, else None."""
        self._drop_outdated()
        return self._candidates.get((config, split))

    def _drop_outdated(self) -> None:
        """Drop all candidates if lengthened recordings have been dropped since the last call."""
        if self._recordings.is_dropped and not self._has_dropped:
            self._candidates.clear()
            self._programs.clear()
            self._has_dropped = True


class ChunkedCandidates:
    """Looks candidates up by configurations whose number of loss chunks is meant for the whole batch.

    A micro-batch has fewer logits than the batch and needs fewer chunks. So before each lookup this class replaces the
    number of chunks by the number for a micro-batch of the split.
    """

    def __init__(self, candidates: Candidates, chunks: ChunkedLossOption | None) -> None:
        self._candidates, self._chunks = candidates, chunks

    def config(self, config: tuple[Decision, ...], split: MicroBatching) -> tuple[Decision, ...]:
        """Returns `config` with the number of chunks for a micro-batch of `split`; without chunks if it needs none."""
        if self._chunks is None or not has_role(config, Role.LOSS):
            return config
        chunked = self._chunks.for_micro_batches(split.micro_batches)
        replaced = (chunked if decision.role is Role.LOSS else decision for decision in config)
        return tuple(decision for decision in replaced if decision is not None)

    def prefetch(self, config: Config, splits: Iterable[MicroBatching], *, updates_only: bool = False) -> None:
        """Start the recordings that these candidates need. Splits with equal numbers of chunks share recordings."""
        by_config: dict[tuple[Decision, ...], list[MicroBatching]] = {}
        for split in splits:
            by_config.setdefault(self.config(config, split), []).append(split)
        for chunked, members in by_config.items():
            self._candidates.prefetch(chunked, tuple(members), updates_only=updates_only)

    def of(self, config: tuple[Decision, ...], split: MicroBatching) -> Candidate:
        """Returns the candidate, recorded if necessary. Raises `PlannerError` if its step cannot be rehearsed."""
        return self._candidates.of(self.config(config, split), split)

    def get(self, config: tuple[Decision, ...], split: MicroBatching) -> Candidate | None:
        """Returns the candidate if it has been created, else None."""
        return self._candidates.get(self.config(config, split), split)

    def all(self) -> tuple[Candidate, ...]:
        """Returns all candidates that have been created so far."""
        return self._candidates.all()
