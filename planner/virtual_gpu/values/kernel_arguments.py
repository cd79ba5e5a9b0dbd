"""Refuses arguments that the fake kernel of an op takes and its CUDA kernel does not: other dtypes.

Fakes compute shapes. Many of them do not check that the tensors of a product have one dtype, or that an op that is
defined for floating-point numbers gets some. Without this check, a step that PyTorch refuses would get a certificate.

The ops were found by running each with wrong dtypes on fakes and on a CPU (`python -m benchmarks.dtypes`). Sources, in
aten/src/ATen/native of PyTorch: TensorIterator.cpp for results in place; BinaryOps.cpp (`sub_check`); cuda/Blas.cpp and
LinearAlgebra.cpp for products, which CUDA computes for floating-point and complex numbers only; Convolution.cpp
(`check_input_same_type_as_parameters`); TensorAdvancedIndexing.cpp; cuda/NLLLoss2d.cu and Loss.cu.

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
    """These tensors have the dtype int32 or int64. The tensors of a list may also be masks."""
    mask: tuple[int, ...] = ()
    """These tensors have the dtype bool."""
    no_mask: tuple[int, ...] = ()
    """These tensors do not have the dtype bool."""
    of_input: tuple[int, ...] = ()
    """These tensors have the dtype of argument 0, or float32 if that is in half precision."""
    in_place: bool = False
    """True if the result, in the dtype to which all arguments are promoted, is written into argument 0."""


_PRODUCT_OF_2, _PRODUCT_OF_3 = _Rule(same=(0, 1), floating=(0, 1)), _Rule(same=(0, 1, 2), floating=(0, 1, 2))
_INDEXED = _Rule(same=(0, 3), index=(2,))
_FLOATING = _Rule(floating=(0,))
_NORMALIZED = _Rule(floating=(0,), of_input=(1, 2, 3, 4), same=(1, 2, 3, 4))  # parameters and running statistics
_IN_PLACE = _Rule(in_place=True)
_REDUCED_INTO = _Rule(same=(0, 3), index=(2,))

RULES: dict[Any, _Rule] = {
    **dict.fromkeys((_aten.mm.default, _aten.bmm.default, _aten.mv.default), _PRODUCT_OF_2),
    _aten.dot.default: _Rule(same=(0, 1)),
    **dict.fromkeys(
        (_aten.addmm.default, _aten.addbmm.default, _aten.baddbmm.default, _aten.addmv.default, _aten.linear.default),
        _PRODUCT_OF_3,
    ),
    **dict.fromkeys((_aten.addmm_.default, _aten.addbmm_.default, _aten.baddbmm_.default), _PRODUCT_OF_3),
    _aten.convolution.default: _PRODUCT_OF_3,
    **dict.fromkeys((_aten.index_put.default, _aten.index_put_.default), _Rule(same=(0, 2), index=(1,))),
    **dict.fromkeys((_aten.put.default, _aten.put_.default), _Rule(same=(0, 2), index=(1,))),
    **dict.fromkeys((_aten.index_reduce.default, _aten.index_reduce_.default), _REDUCED_INTO),
    **dict.fromkeys((_aten.index_fill.int_Scalar, _aten.index_fill_.int_Scalar), _Rule(index=(2,))),
    **dict.fromkeys((_aten.index_fill.int_Tensor, _aten.index_fill_.int_Tensor), _Rule(index=(2,))),
    **dict.fromkeys((_aten.masked_fill_.Scalar, _aten.masked_fill_.Tensor), _Rule(mask=(1,))),
    **dict.fromkeys((_aten.mul_.Tensor, _aten.addcmul_.default, _aten.addcdiv_.default), _IN_PLACE),
    **dict.fromkeys((_aten.sub.Tensor, _aten.sub_.Tensor, _aten.rsub.Tensor), _Rule(no_mask=(0, 1))),
    **dict.fromkeys((_aten.sub.Scalar, _aten.rsub.Scalar), _Rule(no_mask=(0,))),
    **dict.fromkeys(
        (
            *(_aten.ceil.default, _aten.ceil_.default, _aten.floor.default, _aten.floor_.default),
            *(_aten.trunc.default, _aten.trunc_.default, _aten.threshold.default, _aten.threshold_.default),
            *(_aten.argmax.default, _aten.argmin.default, _aten.topk.default),
            *(_aten.median.default, _aten.median.dim, _aten.nanmedian.default, _aten.nanmedian.dim),
            *(_aten.avg_pool2d.default, _aten.avg_pool3d.default),
            *(_aten.max_pool2d_with_indices.default, _aten.max_pool3d_with_indices.default),
        ),
        _Rule(no_mask=(0,)),
    ),
    **dict.fromkeys((_aten._cdist_forward.default, _aten.linalg_cross.default), _Rule(same=(0, 1), floating=(0,))),
    **dict.fromkeys((_aten.complex.default, _aten.polar.default, _aten.heaviside.default), _Rule(same=(0, 1))),
    **dict.fromkeys((_aten.index_add.default, _aten.index_add_.default), _INDEXED),
    **dict.fromkeys((_aten.index_copy.default, _aten.index_copy_.default), _INDEXED),
    _aten.index_select.default: _Rule(index=(2,)),
    **dict.fromkeys(
        (_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default),
        _Rule(same=(0, 2), floating=(0,), no_mask=(1,)),
    ),
    _aten.binary_cross_entropy.default: _Rule(same=(0, 1), floating=(0,)),
    **dict.fromkeys((_aten.grid_sampler_2d.default, _aten.grid_sampler_3d.default), _Rule(same=(0, 1), floating=(0,))),
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
            _aten.mish_.default,
            _aten.hardsigmoid.default,
            _aten.hardsigmoid_.default,
            _aten.hardshrink.default,
            _aten.logit_.default,
            _aten._adaptive_avg_pool2d.default,
            _aten._adaptive_avg_pool3d.default,
            _aten.adaptive_max_pool2d.default,
            _aten.adaptive_max_pool3d.default,
            _aten.fractional_max_pool2d.default,
            _aten.max_unpool2d.default,
            _aten.upsample_bilinear2d.default,
            _aten.huber_loss.default,
            _aten.soft_margin_loss.default,
            _aten.multi_margin_loss.default,
            _aten.multilabel_margin_loss_forward.default,
            _aten.binary_cross_entropy_with_logits.default,
            _aten.var.correction,
            _aten.std.correction,
            _aten.logcumsumexp.default,
            _aten.bernoulli.default,
            _aten.multinomial.default,
            _aten._safe_softmax.default,
            _aten.uniform_.default,
        ),
        _FLOATING,
    ),
    _aten.native_layer_norm.default: _Rule(floating=(0,), of_input=(2, 3)),
    _aten.native_group_norm.default: _Rule(floating=(0,), of_input=(1, 2)),
    **dict.fromkeys(
        (
            _aten.native_batch_norm.default,
            _aten._native_batch_norm_legit.default,
            _aten._batch_norm_with_update.default,
        ),
        _NORMALIZED,
    ),
}
"""The rules, by op."""


def refuse_arguments(op: Any, args: Sequence[Any]) -> None:
    """Raise `RuntimeError`, as the CUDA kernel does, if it does not take arguments of these dtypes."""
    rule = RULES.get(op)
    if rule is None:
        return
    tensors = {at: argument for at, argument in enumerate(args) if isinstance(argument, torch.Tensor)}
    same = [tensors[at].dtype for at in rule.same if at in tensors]
    if any(dtype is not same[0] for dtype in same):
        given = ", ".join(map(_name, same))
        raise RuntimeError(
            f"{op} needs tensors of one dtype, but got {given}: cast the input with .to(), or use autocast"
        )
    for at in rule.floating:
        if at in tensors and not (tensors[at].dtype.is_floating_point or tensors[at].dtype.is_complex):
            raise RuntimeError(
                f"{op} is not implemented on CUDA for {_name(tensors[at].dtype)}: cast the input with .float()"
            )
    for at in rule.of_input:
        allowed = (tensors[0].dtype, torch.float32 if tensors[0].itemsize == 2 else tensors[0].dtype)
        if at in tensors and tensors[at].dtype not in allowed:
            raise RuntimeError(
                f"{op} got an input of {_name(tensors[0].dtype)} and parameters of {_name(tensors[at].dtype)}: cast "
                "the input with .to(), or use autocast"
            )
    for at in rule.index:
        if any(index.dtype not in _INDEX_DTYPES for index in _indices(args, at)):
            raise RuntimeError(f"{op} needs an index of int32 or int64: use .long()")
    for at in rule.mask:
        if at in tensors and tensors[at].dtype is not torch.bool:
            raise RuntimeError(f"{op} needs a mask of bool, but got {_name(tensors[at].dtype)}: use .bool()")
    for at in rule.no_mask:
        if at in tensors and tensors[at].dtype is torch.bool:
            raise RuntimeError(f"{op} does not take bool: use ~ or logical_xor() for masks, or cast them")
    if rule.in_place:
        _refuse_lossy_result(op, tensors)


_INDEX_DTYPES = (torch.int32, torch.int64)


def _indices(args: Sequence[Any], at: int) -> list[torch.Tensor]:
    """Return the tensor at a position, or the tensors of the list there which are not masks."""
    if at < len(args) and isinstance(args[at], (list, tuple)):
        masks = (torch.bool, torch.uint8)
        return [index for index in args[at] if isinstance(index, torch.Tensor) and index.dtype not in masks]
    return [args[at]] if at < len(args) and isinstance(args[at], torch.Tensor) else []


def _refuse_lossy_result(op: Any, tensors: dict[int, torch.Tensor]) -> None:
    """Refuse a result of real numbers in a tensor of whole numbers, and of numbers in a mask."""
    target, *others = tensors.values()
    result = target.dtype
    for other in others:
        result = torch.promote_types(result, other.dtype) if other.dim() else torch.result_type(target, other)
    if not torch.can_cast(result, target.dtype):
        raise RuntimeError(
            f"{op} would write a result of {_name(result)} into a tensor of {_name(target.dtype)}: cast the tensor "
            "first, or compute out of place"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
