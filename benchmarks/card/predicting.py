"""Predicts the memory of a case by rehearsal, and the stream of its allocations with the op of each."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

from benchmarks.card.cases import Case
from planner.estimate.add_workspaces import unknown_ops
from planner.estimate.allocation_stream import allocation_stream, signed_sizes
from planner.estimate.footprint import ALLOCATOR_GRANULARITY_BYTES, measure
from planner.plan_types.decisions import Decision
from planner.profiles.device import DeviceProfile
from planner.recording.step_graph import StepGraph
from planner.rewrite.rehearse import certifying_graph, rehearsed_sizes
from planner.workload.workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The op, module and phase of a training step in which an allocation or a free happened."""

    op: str
    """Name such as 'aten.addmm.default'; '' for allocations before the first step."""
    module: str
    phase: str
    step: int

    def __str__(self) -> str:
        where = f" of '{self.module}'" if self.module else ""
        return f"{self.op or 'before the first step'}{where} ({self.phase}, step {self.step})"


BEFORE = Place(op="", module="", phase="setup", step=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Two rehearsed steps on a card, from an empty allocator."""

    allocated_bytes: int
    reserved_bytes: int
    total_bytes: int
    """Reserved memory plus the card's context."""
    step_ns: int
    sizes: list[int]
    """The stream: bytes taken (positive) and freed (negative), rounded up to the allocator's granularity."""
    places: list[Place]
    """The op that ran at each event of `sizes`."""
    second_step_event: int
    """Index of the first event of the second step."""
    whole_batch: bool
    """True if all micro-batches were rehearsed. Only then does the stream equal that of a real step."""
    taken_by_op: dict[str, int]
    """Requested bytes by op in the second step, scratch memory included."""
    unknown_ops: dict[str, int]
    """Ops whose scratch memory is not known, with the number of their calls in the two steps."""


def predict(case: Case, card: DeviceProfile) -> Prediction:
    """Rehearse the case. The calling process must not have used CUDA.

    Raises:
        PlannerError: the case cannot be rehearsed.
    """
    work = case.workload("meta")
    decisions = case.decisions(work)
    graph = certifying_graph(work, decisions, card)
    footprint = measure(graph, card, vram_bytes=None, decisions=decisions).footprint
    ids, sizes, ticks = allocation_stream(graph)
    places, starts = _places(graph, ticks.tolist())
    return Prediction(
        allocated_bytes=footprint.allocated_bytes,
        reserved_bytes=footprint.reserved_bytes,
        total_bytes=footprint.total_bytes,
        step_ns=footprint.step_ns,
        sizes=signed_sizes(ids.tolist(), sizes.tolist(), granularity_bytes=ALLOCATOR_GRANULARITY_BYTES),
        places=places,
        second_step_event=starts,
        whole_batch=_whole_batch(work, decisions),
        taken_by_op=_taken_by_op(graph),
        unknown_ops=unknown_ops(graph),
    )


def _whole_batch(work: Workload, decisions: Sequence[Decision]) -> bool:
    """True if the rehearsal runs every micro-batch."""
    return sum(rehearsed_sizes(work, decisions)) == work.batch_size


def _places(graph: StepGraph, ticks: list[int]) -> tuple[list[Place], int]:
    """Returns the place of each event, and the index of the first event of the second step."""
    starts = [op.tick for op in graph.ops]
    known = [Place(op=op.name, module=op.module, phase=str(op.phase), step=op.step) for op in graph.ops]
    places = [BEFORE if not (at := bisect.bisect_right(starts, tick)) else known[at - 1] for tick in ticks]
    second_tick = next((op.tick for op in graph.ops if op.step == 1), graph.ticks)
    return places, bisect.bisect_left(ticks, second_tick)


def _taken_by_op(graph: StepGraph) -> dict[str, int]:
    totals: dict[str, int] = {}
    for storage in graph.storages:
        if storage.op is None or graph.ops[storage.op].step != graph.steps - 1:
            continue
        name = graph.ops[storage.op].name
        totals[name] = totals.get(name, 0) + storage.size_bytes
    return totals
