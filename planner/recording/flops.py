"""Computes the floating point operations (FLOPs) of an op from the shapes of its arguments.

The formulas are those of torch (torch/utils/flop_counter.py), and our own where torch's are missing or wrong. torch's
formula for the backward of a convolution ignores groups (`conv_backward_flop`, up to torch 2.13): for a depthwise
convolution its result is too large by a factor of the number of channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import conv_flop_count, flop_registry

from planner.virtual_gpu.sparse_tensors import has_elements, parts_of

_aten = torch.ops.aten


def flops_of(op: torch._ops.OpOverload, args: tuple | None, kwargs: dict[str, Any], out: Any) -> int:
    """Returns the FLOPs of an op; 0 if it is not a matrix product, convolution, attention or recurrent layer.

    The formulas of recurrent layers are registered with torch by `planner.virtual_gpu.rnn`.
    """
    packet = op.overloadpacket
    if (elements := _elements_of_sparse(args)) is not None:
        return 2 * elements * out.shape[-1] if packet in _PRODUCTS and isinstance(out, torch.Tensor) else 0
    name = packet.__name__
    if name.endswith(("mm_", "mv_")):  # in place
        packet = getattr(_aten, name[:-1])
    args = args or ()
    if (formula := _FORMULAS.get(packet)) is not None:
        return formula(*args, **kwargs)
    counter = flop_registry.get(packet)
    return counter(*args, **kwargs, out_val=out) if counter else 0


def _elements_of_sparse(args: tuple | None) -> int | None:
    """Returns the number of elements of a sparse matrix among the arguments; None if there is none."""
    for tensor in args or ():
        if isinstance(tensor, torch.Tensor) and tensor.is_sparse:
            return parts_of(tensor)[1].numel() if has_elements(tensor) else None
    return None


def _convolution_backward(
    gradient, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask
) -> int:
    """Returns the FLOPs of a convolution's backward.

    The gradients of the input and of the weight each take as many FLOPs as the forward, if they are computed.
    """
    return sum(output_mask[:2]) * conv_flop_count(x.shape, weight.shape, gradient.shape, transposed=transposed)


def _grouped_product(a, b, *rest: Any, **options: Any) -> int:
    """Returns the FLOPs of `torch._grouped_mm`, which splits rows, columns or the summed dimension into groups."""
    if a.dim() == 3 and b.dim() == 2:
        return 2 * a.shape[1] * b.numel()
    return 2 * a.numel() * b.shape[-1]


def _matrix_times_vector(matrix, vector) -> int:
    return 2 * matrix.numel()


def _added_matrix_times_vector(x, matrix, vector, **options: Any) -> int:
    return 2 * matrix.numel()


def _sum_of_products(x, batch1, batch2, **options: Any) -> int:
    return 2 * batch1.numel() * batch2.shape[-1]


_PRODUCTS = (_aten.mm, _aten.addmm, _aten._sparse_addmm)
"""Products that may have one sparse matrix among their arguments."""

_FORMULAS: dict[Any, Callable[..., int]] = {
    _aten.convolution_backward: _convolution_backward,
    _aten._grouped_mm: _grouped_product,
    _aten.mv: _matrix_times_vector,
    _aten.addmv: _added_matrix_times_vector,
    _aten.addbmm: _sum_of_products,
}
"""Formulas of FLOPs for ops that `torch.utils.flop_counter` lacks or counts differently, by op without overload.

In-place variants of matrix products use the formula of the out-of-place op.
"""
