"""Refuses arguments that the fake kernel of an op takes and its CUDA kernel does not: other dtypes.

Fakes compute shapes. Many of them do not check that the tensors of a product have one dtype, or that an op that is
defined for floating-point numbers gets some. Without this check, a step that PyTorch refuses would get a certificate.

The ops were found by running each with wrong dtypes on fakes and on a CPU. Sources, in aten/src/ATen/native of PyTorch:
cuda/Blas.cpp and LinearAlgebra.cpp for products, which CUDA computes for floating-point and complex numbers only;
Convolution.cpp (`check_input_same_type_as_parameters`); TensorAdvancedIndexing.cpp; cuda/NLLLoss2d.cu and Loss.cu.

Autocast casts the arguments of an op before they get here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

_aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class _Rule:
    """Positions of arguments of an op."""

    same: tuple[int, ...] = ()
    """These tensors have one dtype."""
    floating: tuple[int, ...] = ()
    """These tensors have a floating-point or complex dtype."""
    index: tuple[int, ...] = ()
    """These tensors have the dtype int32 or int64."""


_PRODUCT_OF_2, _PRODUCT_OF_3 = _Rule(same=(0, 1), floating=(0, 1)), _Rule(same=(0, 1, 2), floating=(0, 1, 2))
_INDEXED = _Rule(same=(0, 3), index=(2,))
_FLOATING = _Rule(floating=(0,))

RULES: dict[Any, _Rule] = {
    **dict.fromkeys((_aten.mm.default, _aten.bmm.default, _aten.mv.default), _PRODUCT_OF_2),
    _aten.dot.default: _Rule(same=(0, 1)),
    **dict.fromkeys(
        (_aten.addmm.default, _aten.addbmm.default, _aten.baddbmm.default, _aten.addmv.default, _aten.linear.default),
        _PRODUCT_OF_3,
    ),
    _aten.convolution.default: _PRODUCT_OF_3,
    **dict.fromkeys((_aten.index_put.default, _aten.index_put_.default), _Rule(same=(0, 2))),
    **dict.fromkeys((_aten.index_add.default, _aten.index_add_.default), _INDEXED),
    **dict.fromkeys((_aten.index_copy.default, _aten.index_copy_.default), _INDEXED),
    _aten.index_select.default: _Rule(index=(2,)),
    **dict.fromkeys(
        (_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default), _Rule(same=(0, 2), floating=(0,))
    ),
    _aten.binary_cross_entropy.default: _Rule(same=(0, 1), floating=(0,)),
    _aten.grid_sampler_2d.default: _Rule(same=(0, 1), floating=(0,)),
    _aten._prelu_kernel.default: _Rule(same=(0, 1), floating=(0,)),
    **dict.fromkeys(
        (
            _aten._softmax.default,
            _aten._log_softmax.default,
            _aten.gelu.default,
            _aten.glu.default,
            _aten.softplus.default,
            _aten.mish.default,
            _aten.hardswish.default,
            _aten.log_sigmoid_forward.default,
            _aten._adaptive_avg_pool2d.default,
            _aten.upsample_bilinear2d.default,
            _aten.native_layer_norm.default,
            _aten.native_group_norm.default,
            _aten.native_batch_norm.default,
        ),
        _FLOATING,
    ),
}
"""The rules, by op."""


def refuse_arguments(op: Any, args: Sequence[Any]) -> None:
    """Raise `RuntimeError`, as the CUDA kernel does, if it does not take arguments of these dtypes."""
    rule = RULES.get(op)
    if rule is None:
        return
    same = [args[at].dtype for at in rule.same if _has_tensor(args, at)]
    if any(dtype is not same[0] for dtype in same):
        given = ", ".join(str(dtype).removeprefix("torch.") for dtype in same)
        raise RuntimeError(
            f"{op} needs tensors of one dtype, but got {given}: cast the input with .to(), or use autocast"
        )
    for at in rule.floating:
        if _has_tensor(args, at) and not (args[at].dtype.is_floating_point or args[at].dtype.is_complex):
            raise RuntimeError(
                f"{op} is not implemented on CUDA for {str(args[at].dtype).removeprefix('torch.')}: cast the input "
                "with .float()"
            )
    for at in rule.index:
        if _has_tensor(args, at) and args[at].dtype not in (torch.int32, torch.int64):
            raise RuntimeError(f"{op} needs an index of int32 or int64, but got {args[at].dtype}: use .long()")


def _has_tensor(args: Sequence[Any], at: int) -> bool:
    return at < len(args) and isinstance(args[at], torch.Tensor)
