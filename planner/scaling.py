"""From recordings of two small micro-batches to any other: sizes and FLOPs are affine in the number of samples.

From two samples on, a step does the same ops in the same order whatever the size of the batch, and every storage and
every FLOP count is `a + b x samples`. (One sample is special: views appear where copies were.) Where two recordings do
not agree on the ops, or a size is no integer, there is no prediction and the step has to be recorded itself.
"""

from __future__ import annotations

import copy
import dataclasses

from planner.step_graph import StepGraph

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


def _affine(at_two: int, at_three: int, samples: int) -> int:
    return at_two + (samples - BASE_SIZES[0]) * (at_three - at_two)
