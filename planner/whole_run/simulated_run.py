"""Simulates the run of a plan in the allocator: with its options or others, and with changes of the batches."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from planner.allocator.options import without_limit
from planner.assemble import changed_notes
from planner.errors import PlannerError
from planner.estimate.footprint import settings_on
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import (
    Decision,
    Role,
    allocator_options_of,
    changed_options,
    micro_batches_of,
    with_roles,
    without_roles,
)
from planner.plan_types.plan import Plan, RunChange, RunFacts, RunMoment, RunSource
from planner.plan_types.plan_parts import LOADING, TRAINING_STEP
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.run_memory.batches import BatchShape
from planner.run_memory.moments import Events, Moment
from planner.run_memory.simulation import RunOutcome, simulate
from planner.space.search_space import allocator_alternatives
from planner.virtual_gpu.forked_process import Child, Refuse, end_all
from planner.whole_run.activities import Activity
from planner.whole_run.orders import Batches, Orders
from planner.whole_run.recordings import RunRecordings
from planner.workload.adapters import adapted_workload
from planner.workload.workload import Workload

_ACTIVITIES_EACH = 4
"""How often each activity happens in a run."""
MOST_REHEARSED = 8
"""Maximum number of shapes of batches that are rehearsed if the others cannot be predicted from them."""
_ALIGNMENT = 8
"""Multiple to which batches are padded if the steps for other lengths are not alike."""
_AT_ONCE = 2
"""Maximum number of simulations that run at the same time."""
_LEAST_SAVED = 0.005
"""Minimum part of the memory or the time that a change must save to be offered."""
_Setting = tuple[Decision, ...]
"""The decision about the options of the allocator, in a tuple; empty for PyTorch's defaults."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A training run to plan."""

    at: Callable[[BatchShape], Workload]
    """Returns the workload of the step for a batch of a shape."""
    batches: Batches
    activities: tuple[Activity, ...] = ()
    source: RunSource | None = None
    """The description that a plan file holds; None if the run cannot be made from a description."""

    @property
    def largest(self) -> BatchShape:
        return self.batches.shapes[-1]


class SimulatedRun:
    """The run with the decisions of a plan."""

    def __init__(self, run: Run, plan: Plan, card: DeviceProfile, constraints: Constraints, watch: Watch) -> None:
        self._plan, self._card, self._watch, self._source = plan, card, watch, run.source
        at = run.at if plan.model.adapter == run.at(run.largest).adapter else _with_adapter(run.at, plan)
        decisions = without_roles(plan.decisions, Role.ALLOCATOR)
        self._parts = micro_batches_of(decisions)
        batches = run.batches.with_samples(self._parts)
        self._recordings, self._batches = _recorded(lambda: RunRecordings(at, decisions, card, watch), batches)
        self._activities = self._recordings.activities(run.activities, run.largest)
        # Limits on the size of split blocks hardly ever help where segments can be expanded.
        possible = allocator_alternatives(card, constraints)
        expandable = [setting for setting in possible if self._expands(setting) and not self._limits_splits(setting)]
        self._alternatives = tuple(expandable) if expandable else possible

    def with_best_allocator(
        self, usable_bytes: int | None, preferred: _Setting | None, *, keeps_options: bool = False
    ) -> Plan:
        """Returns the plan with the options of the allocator that suit the run, and with `Plan.run`.

        The first options are taken with which the run stays inside the budget without releasing cached memory: those of
        the plan, or else others. If there are none, those are taken that release it least often.

        Args:
            preferred: options that are tried first; None for those of the plan.
            keeps_options: True to try no others.
        """
        own = with_roles(self._plan.decisions, Role.ALLOCATOR) if preferred is None else preferred
        capacity = None if usable_bytes is None else usable_bytes - self._card.context_bytes
        settings = tuple(dict.fromkeys((own, *(() if keeps_options else self._alternatives))))
        # What the user has set is changed only if the run does not fit otherwise.
        kept = [each for each in settings if each == own or not changed_options(each, self._card.alloc_conf)]
        needed_bytes, (outcome, order), setting = self._best(kept, own, capacity)
        if outcome.out_of_memory is not None and len(kept) < len(settings):
            changing = [each for each in settings if each not in kept]
            needed_bytes, (outcome, order), setting = self._best(changing, changing[0], capacity)
        facts = self._facts(outcome, order, needed_bytes + self._card.context_bytes)
        decisions = (*without_roles(self._plan.decisions, Role.ALLOCATOR), *setting)
        before, after = (changed_notes(each, self._card.alloc_conf) for each in (self._plan.decisions, decisions))
        notes = (*(note for note in self._plan.notes if note not in before), *after)
        return dataclasses.replace(
            self._plan,
            decisions=decisions,
            run=facts,
            notes=tuple(dict.fromkeys((*notes, *self._batches.notes, *self._recordings.assumptions))),
        )

    def _best(
        self, settings: Sequence[_Setting], own: _Setting, capacity: int | None
    ) -> tuple[int, tuple[RunOutcome, Sequence[BatchShape]], _Setting]:
        """Returns the bytes that the allocator needs, the worst outcome with its order, and the options that suit.

        Args:
            own: options that are preferred among those that release cached memory equally often.
        """
        possible: list[tuple[int, _Setting]] = []
        for setting in settings:
            outcome, order = self._worst([(order, setting) for order in self._batches.orders], None)
            possible.append((outcome.peak_bytes, setting))
            if capacity is None or (outcome.peak_bytes <= capacity and outcome.out_of_memory is None):
                return outcome.peak_bytes, (outcome, order), setting
        needed_bytes, best = min(possible, key=lambda pair: pair[0])
        limited = [
            (self._worst([(order, setting) for order in self._batches.orders], capacity), setting)
            for setting in dict.fromkeys((best, own))
        ]
        found, setting = min(limited, key=lambda pair: (pair[0][0].out_of_memory is not None, sum(pair[0][0].retries)))
        return (needed_bytes if found[0].out_of_memory is not None else found[0].peak_bytes), found, setting

    def with_changes(self, plan: Plan) -> Plan:
        """Returns the plan with the changes of its run that save memory or time."""
        assert plan.run is not None
        setting, usual = with_roles(plan.decisions, Role.ALLOCATOR), self._batches.orders[0]
        options: list[tuple[str, Orders, _Setting]] = [
            (name, orders, setting) for name, orders in self._batches.changes
        ]
        by_tokens = self._batches.by_tokens(self._parts)
        if by_tokens is not None and self._recordings.add(shape for order in by_tokens[1] for shape in order):
            options.append((*by_tokens, setting))
        expandable = [option for option in self._alternatives if option and self._expands(option) and option != setting]
        options += [(option[0].describe(), self._batches.orders, option) for option in expandable]
        outcomes = self._simulate([(orders[0], setting) for _, orders, setting in options], None)
        changes = tuple(
            RunChange(
                change=name,
                total_bytes=outcome.peak_bytes + self._card.context_bytes,
                relative_time=self._sample_ns(orders[0]) / self._sample_ns(usual),
            )
            for (name, orders, _), outcome in zip(options, outcomes, strict=True)
        )
        helpful = tuple(change for change in changes if _helps(change, plan.run))
        return dataclasses.replace(plan, run=dataclasses.replace(plan.run, changes=helpful))

    def _expands(self, setting: _Setting) -> bool:
        return settings_on(self._card, setting).expandable_segments

    def _limits_splits(self, setting: _Setting) -> bool:
        return "max_split_size_mb" in allocator_options_of(setting)

    def _facts(self, outcome: RunOutcome, order: Sequence[BatchShape], total_bytes: int) -> RunFacts:
        """Returns what a plan says about the outcome of an order."""
        names, fits = self._sequence(order)[0], outcome.out_of_memory is None
        shapes = self._batches.shapes
        lengths, samples = [shape.length for shape in shapes], [shape.samples for shape in shapes]
        largest, setup = self._recordings.steps[shapes[-1]].moment, self._recordings.steps[shapes[-1]].setup
        loaded_bytes = max(events.peak_bytes for events in setup)
        taken = _taken(outcome, names)
        sizes = {LOADING: loaded_bytes, TRAINING_STEP: largest.peak_bytes}
        sizes |= {moment.name: moment.peak_bytes for moment in self._activities}
        moments = tuple(
            RunMoment(name=name, tensor_bytes=size_bytes, new_bytes=taken[name]) for name, size_bytes in sizes.items()
        )
        last = outcome.settled if outcome.out_of_memory is None else outcome.out_of_memory
        return RunFacts(
            steps=len(order),
            shapes=len(shapes),
            lengths=(min(lengths), max(lengths)),
            samples=(min(samples), max(samples)),
            order=self._batches.name,
            predicted_shapes=sum(self._recordings.steps[shape].is_predicted for shape in shapes),
            total_bytes=total_bytes,
            settled=names[: last + 1].count(TRAINING_STEP),
            retries=sum(outcome.retries),
            fits=fits,
            binding=names[last],
            moments=moments,
            changes=(),
            source=self._source,
        )

    def _worst(
        self, runs: Sequence[tuple[Sequence[BatchShape], _Setting]], capacity: int | None
    ) -> tuple[RunOutcome, Sequence[BatchShape]]:
        """Returns the outcome of the run that needs most, and its order."""
        outcomes = self._simulate(runs, capacity)
        pairs = [(outcome, order) for outcome, (order, _) in zip(outcomes, runs, strict=True)]
        return max(pairs, key=lambda pair: (pair[0].out_of_memory is not None, pair[0].peak_bytes))

    def _sample_ns(self, order: Sequence[BatchShape]) -> float:
        """Returns the mean time of a sample."""
        total_ns = sum(self._recordings.steps[shape].step_ns for shape in order)
        return max(total_ns, 1) / sum(shape.samples for shape in order)

    def _simulate(
        self, runs: Sequence[tuple[Sequence[BatchShape], _Setting]], capacity: int | None
    ) -> list[RunOutcome]:
        """Returns the outcome of each run, which is given as an order of batches and options of the allocator."""
        steps = sum(len(order) for order, _ in runs)
        self._watch.stage(f"simulating {steps:,} steps in the allocator")

        def simulated(order: Sequence[BatchShape], allocator: _Setting) -> RunOutcome:
            settings = settings_on(self._card, allocator)
            settings = without_limit(settings) if capacity is None else settings
            return simulate(self._sequence(order)[1], settings, self._card, capacity)

        waiting = [functools.partial(simulated, order, allocator) for order, allocator in runs]
        outcomes: list[RunOutcome] = []
        running: list[Child] = []
        try:
            while waiting or running:
                while waiting and len(running) < _AT_ONCE:
                    function = waiting.pop(0)
                    running.append(Child(functools.partial(_answered, function)).timed_by(self._watch))
                outcomes.append(running.pop(0).result())
        finally:
            end_all(running)
        return outcomes

    def _sequence(self, order: Sequence[BatchShape]) -> tuple[list[str], list[tuple[Events, ...]]]:
        """Returns names and events of all moments of a run: the setup, the steps, and the activities between them."""
        steps = [self._recordings.steps[shape] for shape in order]
        names, events = [LOADING, TRAINING_STEP], [steps[0].setup, steps[0].moment.first]
        every = max(len(steps) // (_ACTIVITIES_EACH + 1), 1)
        happened: set[str] = set()

        def happen(moments: Iterable[Moment]) -> None:
            for moment in moments:
                names.append(moment.name)
                events.append(moment.again if moment.name in happened else moment.first)
                happened.add(moment.name)

        for number, step in enumerate(itertools.islice(steps, 1, None), start=1):
            if number % every == 0:
                happen(self._activities)
            names.append(TRAINING_STEP)
            events.append(step.moment.again)
        happen(self._activities)
        return names, events


def _answered(function: Callable[[], RunOutcome], refuse: Refuse) -> RunOutcome:
    return function()


def _taken(outcome: RunOutcome, names: Sequence[str]) -> Counter[str]:
    """Returns the bytes by which the maximum of reserved memory grows in the moments of each name."""
    taken: Counter[str] = Counter()
    highest = 0
    for name, peak_bytes in zip(names, outcome.peaks, strict=False):
        taken[name] += max(peak_bytes - highest, 0)
        highest = max(highest, peak_bytes)
    return taken


def _helps(change: RunChange, run: RunFacts) -> bool:
    """True if a change saves memory or time."""
    saves_memory = change.total_bytes < run.total_bytes * (1 - _LEAST_SAVED)
    return saves_memory or change.relative_time < 1 - _LEAST_SAVED


def _with_adapter(at: Callable[[BatchShape], Workload], plan: Plan) -> Callable[[BatchShape], Workload]:
    """Returns the workloads with the adapters that the plan trains instead of the weights."""
    adapter = plan.model.adapter
    if adapter is None:
        raise PlannerError("the plan has no adapters, but the workload has")
    return lambda shape: adapted_workload(at(shape), adapter)


def _recorded(make: Callable[[], RunRecordings], batches: Batches) -> tuple[RunRecordings, Batches]:
    """Returns the recordings of the steps of all batches, and the batches, padded where this makes steps alike.

    Kernels such as those of attention may need other ops for lengths that are not a multiple of 8.
    """
    for multiple in (1, _ALIGNMENT):
        recordings, rounded = make(), batches.padded(multiple)
        if recordings.add(rounded.all_shapes):
            return recordings, rounded
    recordings, rounded = make(), batches.reduced(MOST_REHEARSED)
    recordings.rehearse(rounded.all_shapes)
    return recordings, rounded
