"""Rehearses the steps of a run for a few shapes of batches, predicts the others, and records what happens between."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch

from planner import pipeline
from planner.estimate import roofline, tape_time
from planner.estimate.add_workspaces import with_workspaces
from planner.estimate.footprint import granularity_bytes, with_whole_batch
from planner.plan_types.decision_base import Decision, micro_batches_of
from planner.plan_types.plan_parts import TRAINING_STEP
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.recording.step_graph import Schedule, StepGraph
from planner.run_memory.batches import BatchShape
from planner.run_memory.interpolation import Interpolation, shapes_to_record
from planner.run_memory.moments import Events, Moment, Slots, in_rounds, moments_of
from planner.virtual_gpu.forked_process import Child, end_all
from planner.whole_run.activities import Activity
from planner.workload.workload import Workload

_ALIGNMENT = 16
"""Multiple of lengths at which memory-efficient attention takes a mask without a padded copy of it."""
_AT_ONCE = 2
"""Maximum number of rehearsals that run at the same time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """The training step for batches of one shape."""

    setup: tuple[Events, ...]
    moment: Moment
    step_ns: int
    """Predicted time of the step."""
    is_predicted: bool
    """True if the step was not rehearsed with this shape."""


class RunRecordings:
    """The training steps of a run by the shape of their batches, and its activities, all with the same decisions.

    Args:
        at: function that takes the shape of a batch and returns the workload of its step.
        decisions: the decisions with which the steps are rewritten.
        watch: limits the time, and receives progress.
    """

    def __init__(
        self,
        at: Callable[[BatchShape], Workload],
        decisions: Sequence[Decision],
        card: DeviceProfile,
        watch: Watch,
    ) -> None:
        self._at, self._decisions, self._card, self._watch = at, tuple(decisions), card, watch
        self._parts = micro_batches_of(self._decisions)
        self._slots = Slots()
        self._recorded: dict[BatchShape, StepGraph] = {}
        """Recordings without workspaces."""
        self._batch_bytes: dict[BatchShape, int] = {}
        self.steps: dict[BatchShape, RecordedStep] = {}
        self.assumptions: tuple[str, ...] = ()
        """Assumptions about values that the activities read, such as the end of a generated text."""

    def add(self, shapes: Iterable[BatchShape]) -> bool:
        """Adds the steps for these shapes to `steps`, and returns True; False if they cannot be predicted.

        If the shapes are many, only some are rehearsed, and the others are predicted. If the steps of all shapes are
        not alike, those of aligned lengths are predicted from each other, and so are the others.
        """
        missing = sorted(set(shapes) - set(self.steps))
        found = self._found(missing, lambda _: True)
        if found is None:
            aligned = self._found([shape for shape in missing if _is_aligned(shape)], _is_aligned)
            others = self._found([shape for shape in missing if not _is_aligned(shape)], _is_not_aligned)
            if aligned is None or others is None:
                return False
            found = aligned | others
        self.steps |= found
        return True

    def _found(
        self, missing: Sequence[BatchShape], is_like: Callable[[BatchShape], bool]
    ) -> dict[BatchShape, RecordedStep] | None:
        """Returns the steps for these shapes; None if they cannot be predicted.

        Args:
            is_like: True for the shapes from whose recordings they are predicted.
        """
        if not missing:
            return {}
        self._record(shapes_to_record(missing, [shape for shape in self._recorded if is_like(shape)], self._parts))
        alike = {shape: graph for shape, graph in self._recorded.items() if is_like(shape)}
        interpolation = Interpolation(alike, self._batch_bytes, self._parts)
        steps: dict[BatchShape, RecordedStep] = {}
        for shape in missing:
            known = alike.get(shape)
            if known is None:
                self._watch.check()
            found = interpolation.at(shape) if known is None else (known, self._batch_bytes[shape])
            if found is None:
                return None
            steps[shape] = self._step(*found, is_predicted=known is None)
        return steps

    def rehearse(self, shapes: Iterable[BatchShape]) -> None:
        """Adds the steps for these shapes to `steps`. All of them are rehearsed."""
        chosen = sorted(set(shapes))
        self._record(chosen)
        for shape in chosen:
            self.steps[shape] = self._step(self._recorded[shape], self._batch_bytes[shape], is_predicted=False)

    def activities(self, activities: Sequence[Activity], shape: BatchShape) -> list[Moment]:
        """Returns the moments of activities, which are recorded after steps with batches of this shape."""
        if not activities:
            return []
        workload = self._at(shape)
        self._watch.stage(f"rehearsing {activities[0].name}" if len(activities) == 1 else "rehearsing the activities")
        child = pipeline.start_steps(workload, self._card, self._decisions, activities, self._schedule)
        graph = in_rounds(self._with_workspaces(child.timed_by(self._watch).result(), workload.batch_bytes))
        self.assumptions = graph.assumptions
        # Two activities of the same name are two moments.
        labels = [f"{number} {activity.name}" for number, activity in enumerate(activities)]
        names = [TRAINING_STEP, TRAINING_STEP, *(label for label in labels for _ in range(2))]
        moments = moments_of(graph, names, self._slots, granularity_bytes=granularity_bytes(self._card))[1]
        return [
            dataclasses.replace(moments[label], name=activity.name)
            for label, activity in zip(labels, activities, strict=True)
        ]

    def _record(self, shapes: Sequence[BatchShape]) -> None:
        """Rehearses the steps for these shapes that were not rehearsed before, some of them at the same time."""
        running: list[tuple[BatchShape, Child]] = []
        waiting = [shape for shape in shapes if shape not in self._recorded]
        many = f"rehearsing the step with {len(waiting)} shapes of batches"
        stage = many if len(waiting) > 1 else "rehearsing the step"
        try:
            while waiting or running:
                while waiting and len(running) < _AT_ONCE:
                    self._watch.stage(stage)
                    shape = waiting.pop(0)
                    workload = self._at(shape)
                    self._batch_bytes[shape] = workload.batch_bytes
                    child = pipeline.start_steps(
                        workload, self._card, self._decisions, schedule=self._schedule
                    ).timed_by(self._watch)
                    running.append((shape, child))
                shape, child = running.pop(0)
                self._recorded[shape] = child.result()
        finally:
            end_all(child for _, child in running)

    @property
    def _schedule(self) -> Schedule | None:
        """The calls of the training step that every recording has; None before the first one."""
        return next((graph.schedule for graph in self._recorded.values()), None)

    def _with_workspaces(self, graph: StepGraph, batch_bytes: int) -> StepGraph:
        return with_workspaces(with_whole_batch(graph, batch_bytes), self._card, torch.__version__)

    def _step(self, graph: StepGraph, batch_bytes: int, *, is_predicted: bool) -> RecordedStep:
        graph = in_rounds(self._with_workspaces(graph, batch_bytes))
        setup, moments = moments_of(
            graph, (TRAINING_STEP, TRAINING_STEP), self._slots, granularity_bytes=granularity_bytes(self._card)
        )
        step_ns = roofline.step_ns(graph, self._card, self._parts)
        step_ns += tape_time.host_ns(graph, self._card, self._decisions)
        return RecordedStep(setup=setup, moment=moments[TRAINING_STEP], step_ns=step_ns, is_predicted=is_predicted)


def _is_aligned(shape: BatchShape) -> bool:
    return shape.length % _ALIGNMENT == 0


def _is_not_aligned(shape: BatchShape) -> bool:
    return not _is_aligned(shape)
