"""Rehearses the steps of a run at a few lengths, predicts those of the others, and records what happens in between."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch

from planner import pipeline
from planner.estimate import roofline
from planner.estimate.add_workspaces import with_workspaces
from planner.estimate.footprint import granularity_bytes, with_whole_batch
from planner.plan_types.decision_base import Decision, micro_batches_of
from planner.plan_types.plan_parts import TRAINING_STEP
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.recording.step_graph import StepGraph
from planner.run_memory.interpolation import interpolate, lengths_to_record, value_at
from planner.run_memory.moments import Events, Moment, Slots, moments_of
from planner.virtual_gpu.forked_process import Child
from planner.whole_run.activities import Activity
from planner.workload.workload import Workload

_AT_ONCE = 2
"""Maximum number of rehearsals that run at the same time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """The training step of one length."""

    setup: tuple[Events, ...]
    moment: Moment
    step_ns: int
    """Predicted time of the step."""
    is_predicted: bool
    """True if the step was not rehearsed at this length."""


class RunRecordings:
    """The training steps of a run by length, and its activities, all with the same decisions.

    Args:
        at: function that takes a length and returns the workload of a step of this length.
        decisions: the decisions with which the steps are rewritten.
        watch: limits the time, and receives progress.
    """

    def __init__(
        self,
        at: Callable[[int], Workload],
        decisions: Sequence[Decision],
        card: DeviceProfile,
        watch: Watch,
    ) -> None:
        self._at, self._decisions, self._card, self._watch = at, tuple(decisions), card, watch
        self._slots = Slots()
        self._recorded: dict[int, StepGraph] = {}
        """Recordings without workspaces, by length."""
        self._batch_bytes: dict[int, int] = {}
        self.steps: dict[int, RecordedStep] = {}
        self.assumptions: tuple[str, ...] = ()
        """Assumptions about values that the activities read, such as the end of a generated text."""

    def add(self, lengths: Iterable[int]) -> bool:
        """Adds the steps of these lengths to `steps`, and returns True; False if they cannot be predicted.

        If the lengths are many, only some are rehearsed, and the others are predicted.
        """
        missing = sorted(set(lengths) - set(self.steps))
        self._record([length for length in lengths_to_record(missing) if length not in self._recorded])
        for length in missing:
            graph, batch_bytes = self._recorded.get(length), self._batch_bytes.get(length)
            is_predicted = graph is None
            if graph is None:
                self._watch.check()
                graph = interpolate(self._recorded, length)
                batch_bytes = value_at(tuple(self._batch_bytes), tuple(self._batch_bytes.values()), length)
            if graph is None or batch_bytes is None:
                return False
            self.steps[length] = self._step(graph, batch_bytes, is_predicted=is_predicted)
        return True

    def rehearse(self, lengths: Iterable[int]) -> None:
        """Adds the steps of these lengths to `steps`. All of them are rehearsed."""
        missing = sorted(set(lengths) - set(self._recorded))
        self._record(missing)
        for length in missing:
            self.steps[length] = self._step(self._recorded[length], self._batch_bytes[length], is_predicted=False)

    def activities(self, activities: Sequence[Activity], length: int) -> list[Moment]:
        """Returns the moments of activities, which are recorded after steps of this length."""
        if not activities:
            return []
        workload = self._at(length)
        self._watch.stage(f"rehearsing {activities[0].name}" if len(activities) == 1 else "rehearsing the activities")
        child = pipeline.start_steps(workload, self._card, self._decisions, activities)
        graph = self._with_workspaces(child.timed_by(self._watch).result(), workload.batch_bytes)
        self.assumptions = graph.assumptions
        # Two activities of the same name are two moments.
        labels = [f"{number} {activity.name}" for number, activity in enumerate(activities)]
        names = [TRAINING_STEP, TRAINING_STEP, *(label for label in labels for _ in range(2))]
        moments = moments_of(graph, names, self._slots, granularity_bytes=granularity_bytes(self._card))[1]
        return [
            dataclasses.replace(moments[label], name=activity.name)
            for label, activity in zip(labels, activities, strict=True)
        ]

    def _record(self, lengths: Sequence[int]) -> None:
        """Rehearses the steps of these lengths, some of them at the same time."""
        running: list[tuple[int, Child]] = []
        waiting = list(lengths)
        try:
            while waiting or running:
                while waiting and len(running) < _AT_ONCE:
                    many = f"rehearsing the step at {len(lengths)} lengths"
                    self._watch.stage(many if len(lengths) > 1 else "rehearsing the step")
                    length = waiting.pop(0)
                    workload = self._at(length)
                    self._batch_bytes[length] = workload.batch_bytes
                    child = pipeline.start_steps(workload, self._card, self._decisions).timed_by(self._watch)
                    running.append((length, child))
                length, child = running.pop(0)
                self._recorded[length] = child.result()
        finally:
            for _, child in running:
                child.end()

    def _with_workspaces(self, graph: StepGraph, batch_bytes: int) -> StepGraph:
        return with_workspaces(with_whole_batch(graph, batch_bytes), self._card, torch.__version__)

    def _step(self, graph: StepGraph, batch_bytes: int, *, is_predicted: bool) -> RecordedStep:
        graph = self._with_workspaces(graph, batch_bytes)
        setup, moments = moments_of(
            graph, (TRAINING_STEP, TRAINING_STEP), self._slots, granularity_bytes=granularity_bytes(self._card)
        )
        times = roofline.op_times_ns(graph, self._card, micro_batches_of(self._decisions))
        return RecordedStep(setup=setup, moment=moments[TRAINING_STEP], step_ns=sum(times), is_predicted=is_predicted)
