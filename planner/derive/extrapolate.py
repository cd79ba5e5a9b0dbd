"""Predicts the recording for any micro-batch size from two recordings with small micro-batches.

A step with two or more samples usually runs the same ops in the same order for every number of samples, and every
storage size and FLOP count is affine in this number: `a + b x samples`. (With one sample, PyTorch returns views where
it makes copies otherwise.) If the two recordings differ in their ops, there is no prediction, and the step has to be
recorded at the wanted size. A model that behaves differently above some size is not detected here. But every plan is
certified by a rehearsal at its own micro-batch size.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from planner.recording.step_graph import StepGraph

BASE_SIZES = (2, 3)
"""Numbers of samples per micro-batch in the two recordings."""

Predict = Callable[[tuple[int, ...]], int | None]
"""Returns the predicted number of bytes, FLOPs or elements, given this number in each recording; None if unknown."""


class _UnknownError(Exception):
    """A number cannot be predicted."""


def extrapolate(two: StepGraph, three: StepGraph, samples: int) -> StepGraph | None:
    """Returns the predicted recording for micro-batches of `samples`.

    Args:
        two, three: recordings of the same step. All micro-batches have 2 samples in `two` and 3 in `three`.
        samples: number of samples in each micro-batch of the prediction.

    Returns:
        None if there is no prediction: `samples` is below 2, the recordings are not alike, or a predicted number of
        bytes or FLOPs is negative.
    """
    if samples < BASE_SIZES[0]:
        return None
    graph = predicted((two, three), lambda pair: pair[0] + (samples - BASE_SIZES[0]) * (pair[1] - pair[0]))
    return graph and dataclasses.replace(graph, micro_batch_sizes=(samples,) * len(two.micro_batch_sizes))


def predicted(recordings: Sequence[StepGraph], predict: Predict) -> StepGraph | None:
    """Returns a recording with predicted sizes, given recordings of the same step with other sizes of its batch.

    Returns:
        None if there is no prediction: the recordings are not alike, or a number is unknown or negative.
    """
    first, *others = recordings
    if not all(_alike(first, other) for other in others):
        return None
    storages, ops = [copy.copy(storage) for storage in first.storages], [copy.copy(op) for op in first.ops]

    def scaled(*values: int) -> int:
        number = values[0] if values.count(values[0]) == len(values) else predict(values)
        if number is None:
            raise _UnknownError
        return number

    try:
        for storage, *same in zip(storages, *(graph.storages for graph in recordings), strict=True):
            storage.size_bytes = scaled(*(other.size_bytes for other in same))
        for op, *same_op in zip(ops, *(graph.ops for graph in recordings), strict=True):
            op.flops = scaled(*(other.flops for other in same_op))
            op.moved_bytes = scaled(*(other.moved_bytes for other in same_op))
            op.host_bytes = scaled(*(other.host_bytes for other in same_op))
            op.kernel = _scaled([other.kernel for other in same_op], scaled)
    except _UnknownError:
        return None
    if any(storage.size_bytes <= 0 for storage in storages) or any(op.flops < 0 or op.moved_bytes < 0 for op in ops):
        return None
    return dataclasses.replace(first, storages=storages, ops=ops)


def _alike(graph: StepGraph, other: StepGraph) -> bool:
    """True if the recordings have the same kernels, calls and saves, and storages that live at the same ticks.

    The views between the kernels may differ: a slice of a whole tensor, for example, is an alias.
    """
    return (
        graph.ticks == other.ticks
        and graph.cache_releases == other.cache_releases
        and len(graph.storages) == len(other.storages)
        and _kernels(graph) == _kernels(other)
        and [storage.lives for storage in graph.storages] == [storage.lives for storage in other.storages]
        and graph.saves == other.saves
        and graph.calls == other.calls
    )


def _kernels(graph: StepGraph) -> list[str]:
    """Returns the names of all ops, with an empty text for each view."""
    return ["" if op.is_view else op.name for op in graph.ops]


def _scaled(values: Sequence[Any], scaled: Callable[..., int]) -> Any:
    """Returns nested data in which every number that differs between the recordings is predicted."""
    first, *others = values
    if all(value == first for value in others):
        return first
    if any(type(value) is not type(first) for value in others):
        raise _UnknownError
    if isinstance(first, tuple):
        if any(len(value) != len(first) for value in others):
            raise _UnknownError
        return tuple(_scaled(parts, scaled) for parts in zip(*values, strict=True))
    if isinstance(first, Mapping):
        return {name: _scaled([value[name] for value in values], scaled) for name in first}
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return type(first)(*(_scaled([getattr(value, name) for value in values], scaled) for name in names))
    if type(first) is not int:
        raise _UnknownError
    return scaled(*values)
