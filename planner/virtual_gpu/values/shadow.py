"""Values of a storage that a rehearsal knows: all elements, one row that repeats, or one value everywhere."""

from __future__ import annotations

from typing import Any

import torch

from planner.virtual_gpu.values.shadow_ops import BY_ROWS, is_elementwise


class ShadowValue:
    """The known content of a storage: its bytes (`storage`), or the common value of all elements (`value`).

    If `row_bytes` is not 0, `storage` has only the first row, which repeats to the end. So positions of tokens, which
    are the same for each sample, are known for batches of any size.
    """

    __slots__ = ("assumed", "row_bytes", "storage", "value")

    def __init__(
        self,
        *,
        storage: torch.UntypedStorage | None = None,
        row_bytes: int = 0,
        value: torch.Tensor | None = None,
        assumed: frozenset[str] = frozenset(),
    ) -> None:
        self.storage, self.row_bytes, self.value, self.assumed = storage, row_bytes, value, assumed

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the values of a fake tensor on this storage.

        Returns None if `value` has another dtype than the tensor, or if the tensor cannot be read from the first row
        alone, because one of its dimensions crosses the end of a row.
        """
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if self.value is not None:
            return self.value.expand(tensor.shape) if tensor.dtype == self.value.dtype else None
        assert self.storage is not None  # Only `NOTHING` has neither, and its tensors have no elements.
        offset, strides = tensor.storage_offset(), tensor.stride()
        if self.row_bytes:
            row = self.row_bytes // tensor.itemsize
            offset, strides = offset % row, tuple(0 if stride % row == 0 else stride for stride in strides)
            last = offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
            if last >= row:
                return None
        real = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return real.set_(self.storage, offset, tensor.shape, strides)


NOTHING = ShadowValue()
"""The shadow of every tensor without elements."""


def of_one_row(row: torch.Tensor, assumed: frozenset[str]) -> ShadowValue:
    """Returns the shadow of a storage in which the elements of a real tensor repeat."""
    first = row.as_strided((), (), row.storage_offset())
    if bool((row == first).all()):
        return ShadowValue(value=first.clone(), assumed=assumed)
    storage = row.clone(memory_format=torch.contiguous_format).untyped_storage()
    return ShadowValue(storage=storage, row_bytes=storage.nbytes(), assumed=assumed)


def works_by_rows(op: torch._ops.OpOverload, args: tuple, result: torch.Tensor) -> bool:
    """True if the result has several rows, and the op computes each of them only from the same row of its arguments.

    A row has all elements with the same index in dimension 0.
    """
    if result.dim() == 0 or result.shape[0] == 1 or not result.is_contiguous():
        return False
    if op in BY_ROWS:
        dim = args[1] if len(args) > 1 else 0
        return dim % result.dim() != 0
    return is_elementwise(op)


def one_row(value: Any, result: torch.Tensor) -> Any:
    """Returns nested arguments of an op with the first row of each real tensor; None if their rows are not alike.

    Args:
        result: the result of the op. A tensor with fewer dimensions is the same for all of its rows.
    """
    if isinstance(value, torch.Tensor):
        if value.dim() < result.dim() or value.shape[0] == 1:
            return value
        return value[:1] if value.stride(0) == 0 else None
    if isinstance(value, (list, tuple)):
        items = [None if item is None else one_row(item, result) for item in value]
        is_lost = any(item is None and given is not None for item, given in zip(items, value, strict=True))
        return None if is_lost else type(value)(items)
    return value
