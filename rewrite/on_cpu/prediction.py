"""Predict the peak of each step that a plan trains on the CPU, by a rehearsal of that step as the CPU runs it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from planner.estimate.footprint import with_whole_batch
from planner.plan_types.decision_base import Decision
from planner.recording.step_graph import Category, StepGraph
from planner.rewrite.on_cpu.allocations import BEFORE, Peak, event_name
from planner.rewrite.rehearse import rehearsed_sizes, start_rehearsal, with_gradient_names
from planner.workload.workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """The rehearsal of two steps on the CPU. All steps after the second are like the second."""

    first: Peak
    later: Peak
    ops: frozenset[str]
    """Names of the ops that the rehearsal recorded."""
    state_bytes: int
    """Bytes of the optimizer state."""
    assumptions: tuple[str, ...]
    """As in `StepGraph.assumptions`."""


def predicted(workload: Workload, decisions: Sequence[Decision]) -> Prediction:
    """Rehearse two steps of the workload, rewritten by `decisions`, as they run on the CPU.

    Raises:
        PlannerError: if the step cannot be rehearsed.
    """
    workload = with_gradient_names(workload, None)
    sizes = rehearsed_sizes(workload, decisions)
    child = start_rehearsal(workload, decisions, None, sizes=sizes, steps=2, primed=False, what_if=False)
    return prediction_of(with_whole_batch(child.result(), workload.batch_bytes))


def prediction_of(graph: StepGraph) -> Prediction:
    """Return the peaks of a rehearsal of two steps on the CPU."""
    return Prediction(
        first=_peak(graph, 0),
        later=_peak(graph, 1),
        ops=frozenset(op.name for op in graph.ops),
        state_bytes=graph.bytes_of(Category.OPTIMIZER_STATE),
        assumptions=graph.assumptions,
    )


def _peak(graph: StepGraph, step: int) -> Peak:
    live, spans = graph.live_bytes(), graph.spans()
    starts = [next(op.tick for op in graph.ops if op.step == number) for number in range(graph.steps)]
    began, ended = starts[step], [*starts, graph.ticks][step + 1]
    tick = began + int(live[began:ended].argmax())
    alive: Counter[str] = Counter()
    for storage, lives in zip(graph.storages, spans, strict=True):
        if any(start <= tick < stop for start, stop in lives):
            alive[BEFORE if storage.op is None else event_name(graph.ops[storage.op].name)] += storage.size_bytes
    return Peak(tensor_bytes=int(live[tick]), alive_by_op=dict(alive))
