"""Estimates of workspaces that no library and no table knows.

A convolution of a table with another number of samples is scaled by the bytes of its tensors. For the rest there is a
formula, which follows from what cuDNN's algorithms need memory for:

- Tensor cores read tensors in channels_last. If the tensors have another format, all of them are copied.
- In fp32, the algorithms for TF32 of most cards read rounded copies of the operands, also in channels_last. Those of
  data centers since Hopper round while they read.
- Without tensor cores most algorithms need little or nothing, but tensors in channels_last are copied to the other
  format, for the input's gradient and on Pascal also for the forward.

`python -m benchmarks.cudnn_estimates` compares both with the tables.
"""

from __future__ import annotations

from planner.workspaces.cudnn.convolution import FORWARD, GRAD_INPUT, Convolution, Sizes
from planner.workspaces.cudnn.tables import Table

CLOSE = 0.02
"""At least half of the results of `estimated_bytes` differ from cuDNN's answer by at most this share of the bytes of
image, weight and result. Most of the others differ by at most these bytes, and a few by more."""
_FIRST_WITH_TENSOR_CORES, _FIRST_WITH_TF32 = (7, 0), (8, 0)
_ROUND_WHILE_READING = (9, 10, 11)
"""Major compute capabilities of the cards of data centers since Hopper."""


def scaled_workspaces(convolution: Convolution, table: Table, capability: tuple[int, int]) -> Sizes:
    """Returns the workspaces that follow from the same convolution of the nearest number of samples in a table.

    Args:
        capability: one of the table's.

    Returns:
        Nothing if the table does not have the convolution with any number of samples.
    """
    for other in table.with_other_batches(convolution):
        if sizes := table.workspaces(other, capability):
            return tuple(round(size * _tensor_bytes(convolution) / _tensor_bytes(other)) for size in sizes)
    return ()


def estimated_bytes(convolution: Convolution, capability: tuple[int, int]) -> int:
    """Returns the bytes of a workspace by a formula, on a card of this compute capability."""
    kind, shape = convolution.kind, convolution.shape
    x, y, w = (convolution.nbytes(sizes) for sizes in (shape.x, shape.y, shape.w))
    is_half = kind.dtype in ("float16", "bfloat16")
    first = _FIRST_WITH_TENSOR_CORES if is_half else _FIRST_WITH_TF32
    if capability < first or not (is_half or kind.tf32):
        is_pascal = capability < _FIRST_WITH_TENSOR_CORES
        copies = kind.operation == GRAD_INPUT or (kind.operation == FORWARD and is_pascal)
        return x + y + w if kind.channels_last and copies else 0
    rounds_before = not is_half and capability[0] not in _ROUND_WHILE_READING
    if rounds_before and kind.operation == FORWARD:
        return x + w
    if not kind.channels_last:
        return x + y + w
    if not rounds_before:
        return 0
    return y + w if kind.operation == GRAD_INPUT else x + y


def _tensor_bytes(convolution: Convolution) -> int:
    shape = convolution.shape
    return sum(convolution.nbytes(sizes) for sizes in (shape.x, shape.y, shape.w))
