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
from collections.abc import Mapping
from typing import Any

from planner.recording.step_graph import StepGraph

BASE_SIZES = (2, 3)
"""Numbers of samples per micro-batch in the two recordings."""


def extrapolate(two: StepGraph, three: StepGraph, samples: int) -> StepGraph | None:
    """Returns the predicted recording for micro-batches of `samples`.

    Args:
        two, three: recordings of the same step. All micro-batches have 2 samples in `two` and 3 in `three`.
        samples: number of samples in each micro-batch of the prediction.

    Returns:
        None if there is no prediction: `samples` is below 2, the recordings are not alike, or a predicted number of
        bytes or FLOPs is negative.
    """
    if samples < BASE_SIZES[0] or not _alike(two, three):
        return None
    storages, ops = [copy.copy(storage) for storage in two.storages], [copy.copy(op) for op in two.ops]
    for storage, larger_storage in zip(storages, three.storages, strict=True):
        storage.size_bytes = _affine(storage.size_bytes, larger_storage.size_bytes, samples)
    for op, larger in zip(ops, three.ops, strict=True):
        op.flops = _affine(op.flops, larger.flops, samples)
        op.moved_bytes = _affine(op.moved_bytes, larger.moved_bytes, samples)
        op.host_bytes = _affine(op.host_bytes, larger.host_bytes, samples)
        op.kernel = _scaled(op.kernel, larger.kernel, samples)
    if any(storage.size_bytes <= 0 for storage in storages) or any(op.flops < 0 or op.moved_bytes < 0 for op in ops):
        return None
    return dataclasses.replace(
        two, storages=storages, ops=ops, micro_batch_sizes=(samples,) * len(two.micro_batch_sizes)
    )


def _alike(two: StepGraph, three: StepGraph) -> bool:
    """True if the recordings have the same ops, calls and saves, and storages that live at the same ticks."""
    return (
        two.ticks == three.ticks
        and len(two.storages) == len(three.storages)
        and [op.name for op in two.ops] == [op.name for op in three.ops]
        and [storage.lives for storage in two.storages] == [storage.lives for storage in three.storages]
        and two.saves == three.saves
        and two.calls == three.calls
    )


def _scaled(at_two: Any, at_three: Any, samples: int) -> Any:
    """Returns nested data in which every number that differs between two and three samples is extrapolated."""
    if at_two == at_three:
        return at_two
    if isinstance(at_two, tuple):
        return tuple(_scaled(smaller, larger, samples) for smaller, larger in zip(at_two, at_three, strict=True))
    if isinstance(at_two, Mapping):
        return {name: _scaled(value, at_three[name], samples) for name, value in at_two.items()}
    if dataclasses.is_dataclass(at_two) and not isinstance(at_two, type):
        names = [field.name for field in dataclasses.fields(at_two)]
        return type(at_two)(*(_scaled(getattr(at_two, name), getattr(at_three, name), samples) for name in names))
    return _affine(at_two, at_three, samples)


def _affine(at_two: int, at_three: int, samples: int) -> int:
    return at_two + (samples - BASE_SIZES[0]) * (at_three - at_two)
