"""Rehearses the step of a plan once more, without and with its decisions, because a plan does not hold recordings."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from planner import pipeline
from planner.allocator.out_of_memory import OutOfMemory
from planner.errors import StepError
from planner.estimate.footprint import granularity_bytes, measure
from planner.estimate.memory_history import MemoryHistory, memory_history, tick_times_ns
from planner.plan_types.decision_base import Decision, micro_batches_of
from planner.plan_types.plan import Footprint, Plan
from planner.profiles.device import DeviceProfile
from planner.recording.step_graph import StepGraph
from planner.replan import load_planned, with_planned_links
from planner.workload.cards import resolve_card
from planner.workload.workload import Workload


@dataclasses.dataclass(frozen=True)
class Recorded:
    """The recording of one step, as the plan counts its memory and its time."""

    graph: StepGraph
    card: DeviceProfile
    footprint: Footprint
    decisions: tuple[Decision, ...]

    @functools.cached_property
    def history(self) -> MemoryHistory | None:
        """The events of the allocator during the recording; None for a card without an allocator."""
        if not self.card.allocator:
            return None
        try:
            return memory_history(self.graph, self.card, self.decisions, capacity_bytes=self.footprint.reserved_bytes)
        except OutOfMemory:  # two rehearsals of a step that draws random numbers on the host may differ
            return memory_history(self.graph, self.card, self.decisions, capacity_bytes=None)

    @functools.cached_property
    def times_ns(self) -> np.ndarray:
        """Returns int64[ticks + 1]: predicted time at which each tick begins."""
        return tick_times_ns(self.graph, self.card, micro_batches=micro_batches_of(self.decisions))

    @functools.cached_property
    def live_bytes(self) -> np.ndarray:
        """Returns int64[ticks]: bytes of the storages that are alive in each tick, rounded up to whole blocks."""
        return self.graph.live_bytes(granularity_bytes=granularity_bytes(self.card))

    @functools.cached_property
    def reserved_bytes(self) -> np.ndarray:
        """Returns int64[ticks]: bytes that the allocator holds in each tick."""
        return self.live_bytes if self.history is None else self.history.reserved_bytes(self.graph.ticks)

    @property
    def total_bytes(self) -> int:
        """The largest total of the process in the recorded steps.

        It equals the total of the footprint, unless the allocator reserves more in later steps, or two rehearsals of
        the step differ.
        """
        return int(self.reserved_bytes.max()) + self.card.outside_bytes

    @property
    def is_as_planned(self) -> bool:
        """True if this recording gives the total of the plan when later steps are simulated, too."""
        total_bytes = self.footprint.total_bytes
        measured = measure(self.graph, self.card, vram_bytes=total_bytes, decisions=self.decisions)
        return measured.fits and measured.footprint.total_bytes == total_bytes

    @property
    def peak_tick(self) -> int:
        """The tick of the peak that the plan reports, at which the allocated blocks are largest."""
        if self.history is None:
            return int(self.live_bytes.argmax())
        return self.history.ticks[self.history.simulated.peak_allocated_request]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """The step with the first techniques of the plan."""

    kinds: tuple[str, ...]
    """The techniques that this stage adds to the stage before it."""
    total_bytes: int
    step_ns: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRecordings:
    """The recordings of a plan."""

    workload: Workload
    card: DeviceProfile
    baseline: Recorded
    planned: Recorded | None
    """None if the plan changes nothing."""

    @property
    def named(self) -> dict[str, Recorded]:
        """The recordings by their names on the page: 'baseline' and 'plan'."""
        return {"baseline": self.baseline} | ({"plan": self.planned} if self.planned else {})


def rehearse_plan(plan: Plan, *, gpu: str | None) -> PlanRecordings:
    """Load the workload of a plan, and rehearse its step without and with the decisions.

    Args:
        gpu: the card as the user named it; None for the card that the plan names.

    Raises:
        PlannerError: the model cannot be loaded or rehearsed.
    """
    workload, card = load_planned(plan), resolve_card(gpu or plan.card, plan.vram_bytes)
    card = with_planned_links(card, plan, is_same_card=gpu is None)
    card = dataclasses.replace(card, alloc_conf=plan.alloc_conf, cudnn_benchmark=plan.cudnn_benchmark)
    baseline = Recorded(pipeline.record_step(workload, card), card, plan.baseline, ())
    planned = None
    if plan.decisions:
        graph = pipeline.record_step(workload, card, plan.decisions)
        planned = Recorded(graph, card, plan.peak, plan.decisions)
    return PlanRecordings(workload=workload, card=card, baseline=baseline, planned=planned)


def rehearse_stages(plan: Plan, recordings: PlanRecordings) -> tuple[Stage, ...]:
    """Rehearse the step with the first technique of the plan, with the first two, and so on.

    The difference between two stages is what the technique between them saves and costs. The last stage is
    the whole plan. If a technique cannot be rehearsed without the next one, both are in one stage.
    """
    kinds = tuple(dict.fromkeys(decision.kind for decision in plan.decisions))
    stages, waiting = [], []
    for number, kind in enumerate(kinds[:-1], start=1):
        waiting.append(kind)
        decisions = tuple(decision for decision in plan.decisions if decision.kind in kinds[:number])
        try:
            graph = pipeline.record_step(recordings.workload, recordings.card, decisions)
        except StepError:
            continue
        measured = measure(graph, recordings.card, vram_bytes=plan.usable_bytes, decisions=decisions).footprint
        stages.append(Stage(kinds=tuple(waiting), total_bytes=measured.total_bytes, step_ns=measured.step_ns))
        waiting = []
    if kinds:
        last = Stage(kinds=(*waiting, kinds[-1]), total_bytes=plan.peak.total_bytes, step_ns=plan.peak.step_ns)
        stages.append(last)
    return tuple(stages)
