"""Runs data-dependent ops: ops that return a tensor value, or whose output shape depends on tensor values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map

from planner.virtual_gpu.values.data_dependence import DataDependence
from planner.virtual_gpu.values.shadow_values import is_tracked

_aten = torch.ops.aten

ASSUMED_SELECTED = "all elements are selected, which is an upper bound"
ASSUMED_OUTLIERS = "all columns have outliers (LLM.int8), which is an upper bound"
ASSUMED_DISTINCT = "all values are distinct, which is an upper bound"


def run_data_dependent_op(
    dependence: DataDependence, run: Callable[..., Any], op: Any, args: tuple, kwargs: dict
) -> tuple[bool, Any, Any]:
    """Runs a data-dependent op if the values that it depends on are known, or if its result has a bounded size.

    A result of unknown or assumed size gets the size that the user stated for the line. If there is none, a result of
    unknown size gets the largest size that is possible.

    Indexing with a boolean mask is converted as on CUDA: to `nonzero`, and then indexing with the positions
    (`expandTensors` in ATen/native/IndexingUtils.h).

    Args:
        dependence: knows the values.
        run: `run(op, *args)` runs and records another op.
        op, args, kwargs: the data-dependent op and its arguments.

    Returns:
        (True, result, None) if the op was run. Otherwise (False, None, arguments): the caller has to run the op with
        these positional arguments.
    """
    known = dependence.known
    if op is _aten.masked_select.default:
        table, mask = torch.broadcast_tensors(*args)
        return True, run(_aten.index.Tensor, table, [mask]), None
    if op is _aten.index.Tensor:
        indices = []
        for index in args[1]:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                indices.append(index)
                continue
            positions = run(_aten.nonzero.default, index)
            indices += [run(_aten.select.int, positions, 1, dim) for dim in range(index.dim())]
        return False, None, (args[0], indices)
    real_result = known.compute(op, args, kwargs)
    if real_result is None and op is _aten.equal.default:
        answer = dependence.check_outcome()
        return answer is not None, answer, args
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    assumed = known.assumptions(inputs)
    if real_result is None or (assumed and str(op) in BOUNDED and dependence.is_stated()):
        bounded = _of_largest_size(dependence, op, args, kwargs)
        return bounded is not None, bounded, args
    dependence.assume(assumed)

    def fake(value: Any) -> Any:
        """Returns a fake copy of a real tensor, and makes its values known to the rehearsal."""
        if not isinstance(value, torch.Tensor):
            return value
        tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=inputs[0].device)
        known.learn(tensor, value, assumed)
        return tensor

    return True, tree_map(fake, real_result), None


def _of_largest_size(dependence: DataDependence, op: Any, args: tuple, kwargs: dict) -> Any:
    """Returns the result of a data-dependent op in the stated size or else the largest size that is possible.

    The values of the result are unknown. Returns None if its size has no bound and the user stated none.
    """
    make = BOUNDED.get(str(op))
    given = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)}
    return None if make is None else make(dependence, **given, **kwargs)


def _nonzero(dependence: DataDependence, self: torch.Tensor) -> torch.Tensor:
    count = _count(dependence, self.numel(), ASSUMED_SELECTED)
    positions = self.new_empty((count, self.dim()), dtype=torch.int64)
    if count == self.numel() and is_tracked(positions):
        with unset_fake_temporarily():
            real = torch.ones(self.shape, device="cpu").nonzero()
        dependence.known.learn(positions, real, frozenset((ASSUMED_SELECTED,)))
    return positions


def _nms(dependence: DataDependence, dets: torch.Tensor, **_: Any) -> torch.Tensor:
    return dets.new_empty(_count(dependence, len(dets), ASSUMED_SELECTED), dtype=torch.int64)


def _unique(
    dependence: DataDependence, self: torch.Tensor, dim: int | None = None, return_inverse: bool = False,
    return_counts: bool = False, **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns the values, the inverse and the counts; the last two are empty if they are not wanted."""
    if dim is None:
        count = _count(dependence, self.numel(), ASSUMED_DISTINCT)
        shape, inverse_shape = [count], self.shape
    else:
        count = _count(dependence, self.shape[dim], ASSUMED_DISTINCT)
        shape, inverse_shape = list(self.shape), self.shape[dim : dim + 1] if dim >= 0 else self.shape[dim:][:1]
        shape[dim] = count
    inverse = self.new_empty(inverse_shape if return_inverse else 0, dtype=torch.int64)
    return self.new_empty(shape), inverse, self.new_empty(count if return_counts else 0, dtype=torch.int64)


def _repeat_interleave(dependence: DataDependence, repeats: torch.Tensor, **_: Any) -> torch.Tensor | None:
    count = dependence.stated_count()
    return None if count is None else repeats.new_empty(count, dtype=torch.int64)


def _bincount(
    dependence: DataDependence, self: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor | None:
    count = dependence.stated_count()
    dtype = torch.int64 if weights is None else torch.float64 if weights.dtype != torch.float32 else torch.float32
    return None if count is None else self.new_empty(max(count, minlength), dtype=dtype)


def _int8_vectorwise_quant(
    dependence: DataDependence, A: torch.Tensor, threshold: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns the int8 values, the scale of each row, and the columns with outliers (bitsandbytes/_ops.py)."""
    rows = A.new_empty(A.numel() // A.shape[-1], dtype=torch.float32)
    if not threshold:
        return A.new_empty(A.shape, dtype=torch.int8), rows, None
    columns = _count(dependence, A.shape[-1], ASSUMED_OUTLIERS)
    return A.new_empty(A.shape, dtype=torch.int8), rows, A.new_empty(columns, dtype=torch.int64)


def _count(dependence: DataDependence, most: int, assumption: str) -> int:
    """Returns the number of elements that the user stated for the running line, but at most `most`.

    If the user stated none, returns `most`, and notes the assumption under which there are `most` elements.
    """
    stated = dependence.stated_count()
    if stated is None:
        dependence.assume((assumption,))
    return most if stated is None else min(stated, most)


BOUNDED: dict[str, Callable[..., Any]] = {
    "aten.nonzero.default": _nonzero,
    "torchvision.nms.default": _nms,
    "aten._unique2.default": _unique,
    "aten.unique_dim.default": _unique,
    "aten.unique_consecutive.default": _unique,
    "aten.unique_dim_consecutive.default": _unique,
    "aten.repeat_interleave.Tensor": _repeat_interleave,
    "aten.bincount.default": _bincount,
    "bitsandbytes.int8_vectorwise_quant.default": _int8_vectorwise_quant,
}
"""Functions that make the results of data-dependent ops of unknown size. They get the arguments by name."""
