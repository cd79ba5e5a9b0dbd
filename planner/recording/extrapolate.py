"""Predicts the recording of any micro-batch size from recordings of two small ones.

With two or more samples, a step usually runs the same ops in the same order whatever the size of the batch, and every
storage size and FLOP count is affine in it: `a + b x samples`. (With one sample, PyTorch returns views where it would
make copies.) If the two recordings differ in their ops there is no prediction, and the step has to be recorded. A model
that behaves differently above some size is not detected here, but every plan is certified by a rehearsal at its own
size.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from planner.recording.step_graph import StepGraph

BASE_SIZES = (2, 3)
"""Micro-batch sizes that are recorded."""


def extrapolate(two: StepGraph, three: StepGraph, samples: int) -> StepGraph | None:
    """Returns the recording for micro-batches of `samples`; None if the ops of the two recordings differ.

    Args:
        two, three: recordings whose micro-batches all have `BASE_SIZES` samples.
        samples: size of the predicted micro-batches, at least 2.
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
    """True if the recordings have the same ops, calls and saves, and storages with the same lives."""
    return (
        two.ticks == three.ticks
        and len(two.storages) == len(three.storages)
        and [op.name for op in two.ops] == [op.name for op in three.ops]
        and [storage.lives for storage in two.storages] == [storage.lives for storage in three.storages]
        and two.saves == three.saves
        and two.calls == three.calls
    )


def _scaled(at_two: Any, at_three: Any, samples: int) -> Any:
    """Returns the arguments of a kernel call with every number extrapolated; other values do not depend on the size."""
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
