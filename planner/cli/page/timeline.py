"""Converts a recording to the data of the page: the life of every tensor, from which the page draws all its charts.

The page itself adds up the bytes that are alive in a moment, so that charts and lists cannot disagree. A *moment* is a
tick in which the memory changes, or a new phase begins; between two moments the memory stays the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from planner.cli.page.recorded import Recorded
from planner.estimate.footprint import granularity_bytes
from planner.estimate.largest_tensors import shape_text, source_text
from planner.plan_types.decision_base import micro_batches_of
from planner.recording.step_graph import Category, Phase, StepGraph

MOST_MOMENTS = 20_000
"""Maximum number of moments on the page. If there are more, each group of moments keeps the one with most memory."""
STACK = (
    *(Category.CONTEXT, Category.NCCL, Category.PARAMETER, Category.OPTIMIZER_STATE, Category.GRADIENT, Category.INPUT),
    *(Category.WORKSPACE, Category.AUTOCAST, Category.UNSHARDED, Category.COMMUNICATION, Category.ACTIVATION),
    *(Category.LOGITS, Category.TEMPORARY, Category.SLACK),
)
"""Categories from the bottom of the chart to its top. Those that live longest come first."""


def recording_data(recorded: Recorded, *, most_moments: int = MOST_MOMENTS) -> dict[str, Any]:
    """Returns a recording as JSON data.

    Keys of the result (a *column* is a list with one item for each row; a column of *differences* has for each row the
    difference from the row before, and for the first row its value):

    - `unit_bytes`: the unit of all sizes; `outside_bytes`: by category, the bytes outside of the allocator
    - `moments`: columns of differences `tick`, `time_ns`, `reserved` (the allocator's memory, in units) and `op` (row
      of `ops`, -1 before the first op); `end`: tick and time_ns of the end; `peak`: the moment of the reported peak
    - `steps`: for each recorded training step [first moment, moment after the last]
    - `storages`: columns `size` (in units), `category` (index in `STACK`), `birth` (differences), `life` (the number of
      moments in which it is alive), `op` (row of `ops`, -1 if it existed before), and indices into `strings`: `name`,
      `shape`, `dtype`
    - `ops`: columns of indices into `strings`: `name`, `phase`, `module`, `source`; and `micro_batch`
    - `micro_batches`: for each recorded micro-batch [first, last]: numbers of the real ones that it stands for, from 1

    Args:
        most_moments: maximum number of moments, to which the peaks of allocated and reserved memory may be added.
    """
    graph, unit = recorded.graph, granularity_bytes(recorded.card)
    ticks = _moments(recorded, most_moments)
    strings, ops = _Numbered(), _Numbered()
    op_of_tick = _ops_of_ticks(graph, ticks)
    storages = _storages(graph, ticks, unit, strings, ops)
    moment_ops = [-1 if index < 0 else ops.number(index) for index in op_of_tick]
    return {
        "unit_bytes": unit,
        "outside_bytes": {
            str(Category.CONTEXT): recorded.card.context_bytes,
            str(Category.NCCL): recorded.card.nccl_bytes,
        },
        "moments": {
            "tick": _differences(ticks),
            "time_ns": _differences(recorded.times_ns[ticks]),
            "op": _differences(np.array(moment_ops)),
            "reserved": _differences(recorded.reserved_bytes[ticks] // unit),
            "end": [graph.ticks, int(recorded.times_ns[-1])],
            "peak": int(np.searchsorted(ticks, recorded.peak_tick)),
        },
        "steps": _steps(graph, ticks),
        "storages": storages,
        "ops": _op_columns(graph, ops.values, strings),
        "micro_batches": _stands_for(len(graph.micro_batch_sizes), micro_batches_of(recorded.decisions)),
        "strings": strings.values,
    }


def _differences(column: np.ndarray) -> list[int]:
    """Returns the first value of a column, and the difference of each other value from the one before."""
    return np.diff(column, prepend=0).tolist()


class _Numbered:
    """Numbers distinct values in the order in which they first appear."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    @property
    def values(self) -> list[Any]:
        return list(self._numbers)


def _moments(recorded: Recorded, most: int) -> np.ndarray:
    """Returns the ticks of the moments, ascending."""
    graph = recorded.graph
    changes = {tick for spans in graph.spans() for span in spans for tick in span if tick < graph.ticks}
    ticks = np.array(sorted(changes | _phase_starts(graph)), dtype=np.int64)
    if len(ticks) <= most:
        return ticks
    live, reserved = recorded.live_bytes, recorded.reserved_bytes
    kept = {recorded.peak_tick, int(ticks[live[ticks].argmax()]), int(ticks[reserved[ticks].argmax()])}
    for group in np.array_split(ticks, most):
        kept.add(int(group[live[group].argmax()]))
    return np.array(sorted(kept | _step_starts(graph)), dtype=np.int64)


def _phase_starts(graph: StepGraph) -> set[int]:
    """Returns the ticks of the ops that begin a phase, a micro-batch or a step."""
    parts = [(op.step, op.micro_batch, op.phase) for op in graph.ops]
    return {op.tick for op, part, before in zip(graph.ops, parts, [None, *parts], strict=False) if part != before}


def _step_starts(graph: StepGraph) -> set[int]:
    starts: dict[int, int] = {}
    for op in graph.ops:
        if op.phase is not Phase.SETUP:
            starts.setdefault(op.step, op.tick)
    return set(starts.values())


def _steps(graph: StepGraph, ticks: np.ndarray) -> list[list[int]]:
    """Returns for each step the range of its moments."""
    starts = [int(np.searchsorted(ticks, tick)) for tick in sorted(_step_starts(graph))]
    return [[start, stop] for start, stop in zip(starts, [*starts[1:], len(ticks)], strict=True)]


def _ops_of_ticks(graph: StepGraph, ticks: np.ndarray) -> list[int]:
    """Returns for each tick the index of the op that runs in it or was the last to start; -1 before the first op."""
    starts = np.fromiter((op.tick for op in graph.ops), np.int64, len(graph.ops))
    return (np.searchsorted(starts, ticks, side="right") - 1).tolist()


def _storages(
    graph: StepGraph, ticks: np.ndarray, unit: int, strings: _Numbered, ops: _Numbered
) -> dict[str, list[int]]:
    """Returns the columns of the storages that are alive in some moment, in the order of their births."""
    rows = []
    for storage, spans in zip(graph.storages, graph.spans(), strict=True):
        for start, stop in spans:
            birth, death = (int(np.searchsorted(ticks, tick)) for tick in (start, stop))
            if birth < death:
                rows.append((birth, death, storage))
    rows.sort(key=lambda row: row[:2])
    return {
        "size": [-(-storage.size_bytes // unit) for _, _, storage in rows],
        "category": [STACK.index(storage.category) for _, _, storage in rows],
        "birth": _differences(np.array([birth for birth, _, _ in rows])),
        "life": [death - birth for birth, death, _ in rows],
        "op": [-1 if storage.op is None else ops.number(storage.op) for _, _, storage in rows],
        "name": [strings.number(storage.name) for _, _, storage in rows],
        "shape": [strings.number(shape_text(storage.shape, storage.dtype)) for _, _, storage in rows],
        "dtype": [strings.number(storage.dtype) for _, _, storage in rows],
    }


def _op_columns(graph: StepGraph, indices: Iterable[int], strings: _Numbered) -> dict[str, list[int]]:
    ops = [graph.ops[index] for index in indices]
    return {
        "name": [strings.number(op.name) for op in ops],
        "phase": [strings.number(str(op.phase)) for op in ops],
        "module": [strings.number(op.module) for op in ops],
        "source": [strings.number(source_text(graph, op)) for op in ops],
        "micro_batch": [op.micro_batch for op in ops],
    }


def _stands_for(recorded: int, real: int) -> list[list[int]]:
    """Returns for each recorded micro-batch the first and the last number of the micro-batches that it stands for."""
    if recorded == 1 or recorded == real:
        return [[number, number] for number in range(1, recorded + 1)]
    last = real - (recorded - 2)
    return [[1, 1], [2, last], *([number, number] for number in range(last + 1, real + 1))]
