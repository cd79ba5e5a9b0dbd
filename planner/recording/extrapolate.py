"""From recordings of two small micro-batches to any other: sizes and FLOPs are affine in the number of samples.

From two samples on, a step does the same ops in the same order whatever the size of the batch, and every storage and
every FLOP count is `a + b x samples`. (One sample is special: views appear where copies were.) Where two recordings do
not agree on the ops, or a size is no integer, there is no prediction and the step has to be recorded itself.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from planner.recording.step_graph import StepGraph

BASE_SIZES = (2, 3)
"""Micro-batch sizes to record."""


def extrapolate(two: StepGraph, three: StepGraph, samples: int) -> StepGraph | None:
    """The recording for micro-batches of `samples`, or None if the two recordings are not alike.

    Args:
        two, three: recordings whose micro-batches all have `BASE_SIZES` samples.
        samples: at least 2.
    """
    if samples < BASE_SIZES[0] or not _alike(two, three):
        return None
    storages, ops = [copy.copy(storage) for storage in two.storages], [copy.copy(op) for op in two.ops]
    for storage, other in zip(storages, three.storages, strict=True):
        storage.size_bytes = _affine(storage.size_bytes, other.size_bytes, samples)
    for op, other in zip(ops, three.ops, strict=True):
        op.flops = _affine(op.flops, other.flops, samples)
        op.moved_bytes = _affine(op.moved_bytes, other.moved_bytes, samples)
        op.host_bytes = _affine(op.host_bytes, other.host_bytes, samples)
        op.kernel = _scaled(op.kernel, other.kernel, samples)
    if any(storage.size_bytes <= 0 for storage in storages) or any(op.flops < 0 or op.moved_bytes < 0 for op in ops):
        return None
    return dataclasses.replace(
        two, storages=storages, ops=ops, micro_batch_sizes=(samples,) * len(two.micro_batch_sizes)
    )


def _alike(two: StepGraph, three: StepGraph) -> bool:
    return (
        two.ticks == three.ticks
        and len(two.storages) == len(three.storages)
        and [op.name for op in two.ops] == [op.name for op in three.ops]
        and [storage.lives for storage in two.storages] == [storage.lives for storage in three.storages]
        and two.saves == three.saves
        and two.calls == three.calls
    )


def _scaled(at_two: Any, at_three: Any, samples: int) -> Any:
    """Every number in the call of a kernel; what is no number is the same for all sizes."""
    if at_two == at_three:
        return at_two
    if isinstance(at_two, tuple):
        return tuple(_scaled(one, other, samples) for one, other in zip(at_two, at_three, strict=True))
    if isinstance(at_two, Mapping):
        return {name: _scaled(value, at_three[name], samples) for name, value in at_two.items()}
    if dataclasses.is_dataclass(at_two):
        names = [field.name for field in dataclasses.fields(at_two)]
        return type(at_two)(*(_scaled(getattr(at_two, name), getattr(at_three, name), samples) for name in names))
    return _affine(at_two, at_three, samples)


def _affine(at_two: int, at_three: int, samples: int) -> int:
    return at_two + (samples - BASE_SIZES[0]) * (at_three - at_two)
