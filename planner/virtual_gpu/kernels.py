"""Substitutes for CUDA kernels that allocate other memory than the fake kernels of the same ops.

Each function takes the arguments of an op, allocates the results on the virtual GPU as the CUDA kernel does, and
returns them with the scratch tensors: tensors that the CUDA kernel allocates and frees while it runs. The source files
named in this module are in aten/src/ATen/native of PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from planner.virtual_gpu import backend
from planner.virtual_gpu.values.data_dependence import DataDependence
from planner.virtual_gpu.values.kernel_calls import kernel_call
from planner.workspaces.cudnn.dispatch import results_in_channels_last
from planner.workspaces.registry import KernelCall

Made = tuple[Any, list[torch.Tensor]]
"""(result of an op, its scratch tensors)."""

KERNELS: dict[torch._ops.OpOverload, Callable[..., Made]] = {}
"""The registered functions, by op."""
_ONLY_ON_CUDA: set[torch._ops.OpOverload] = set()
"""The ops whose functions are not used on the CPU."""

_aten = torch.ops.aten

ASSUMED_LENGTHS = "all inputs and targets of ctc_loss have full length"


def kernels_of(device: str) -> dict[torch._ops.OpOverload, Callable[..., Made]]:
    """Returns the functions for ops on a device: 'cpu', or the virtual GPU.

    The CPU's kernels return tensors of the same sizes as CUDA's, except those in `_ON_CPU`. Some take other scratch
    memory; the caller has to ignore the scratch tensors.
    """
    if device != "cpu":
        return KERNELS
    return {**{op: function for op, function in KERNELS.items() if op not in _ONLY_ON_CUDA}, **_ON_CPU}


def cuda_kernel(
    *ops: torch._ops.OpOverload, only_on_cuda: bool = False
) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """Returns a decorator that registers a function which allocates what these ops allocate on CUDA.

    The recorder calls it as `function(dependence, op, *args, **kwargs)`; `dependence` knows tensor values.

    Args:
        only_on_cuda: True if the fake kernels allocate what the CPU's kernels do, so that they need no function there.

    Raises:
        ValueError: an op already has a function.
    """

    def register(function: Callable[..., Made]) -> Callable[..., Made]:
        for op in ops:
            if op in KERNELS:
                raise ValueError(f"{op} already has a function: register only one function for each op")
            KERNELS[op] = function
        _ONLY_ON_CUDA.update(ops if only_on_cuda else ())
        return function

    return register


@cuda_kernel(
    _aten.mse_loss.default,
    _aten.smooth_l1_loss.default,
    _aten.soft_margin_loss.default,
    _aten.binary_cross_entropy.default,
)
def _reduced_in_full_storage(
    dependence: DataDependence, op: Any, input: torch.Tensor, *args: Any, **kwargs: Any
) -> Made:
    """Allocates a loss. Its mean or sum is a view of the storage of the unreduced loss (Loss.cpp, cuda/Loss.cu)."""
    out = op(input, *args, **kwargs)
    full = out if out.dim() else torch.empty_like(input)
    return full.as_strided(out.shape, out.stride(), 0), []


@cuda_kernel(_aten.convolution.default, only_on_cuda=True)
def _convolution(dependence: DataDependence, op: Any, *args: Any, **kwargs: Any) -> Made:
    """Allocates the output of a convolution (Convolution.cpp). The output of the fake kernel is always contiguous."""
    out = op(*args, **kwargs)
    return _in_format_of_convolution(out, kernel_call(op, args, kwargs, out)), []


@cuda_kernel(_aten.convolution_backward.default, only_on_cuda=True)
def _convolution_backward(dependence: DataDependence, op: Any, *args: Any, **kwargs: Any) -> Made:
    """Allocates the gradients of a convolution. Those of the input and weight have the convolution's memory format."""
    *grads, of_bias = op(*args, **kwargs)
    call = kernel_call(op, args, kwargs, grads)
    return (*(None if each is None else _in_format_of_convolution(each, call) for each in grads), of_bias), []


def _in_format_of_convolution(tensor: torch.Tensor, call: KernelCall) -> torch.Tensor:
    """Returns a tensor like `tensor`, a contiguous result of a convolution, in the memory format that CUDA gives it."""
    if not results_in_channels_last(call, torch.cuda.get_device_capability()):  # that of the simulated card
        return tensor
    if tensor.dim() == 3:  # computed as an image with a height of 1
        return _in_format_of_convolution(tensor.unsqueeze(2), call).squeeze(2)
    memory_format = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return torch.empty_like(tensor, memory_format=memory_format)


@cuda_kernel(*(getattr(_aten, f"reflection_pad{dims}d").default for dims in (1, 2, 3)), only_on_cuda=True)
def _reflection_pad(dependence: DataDependence, op: Any, input: torch.Tensor, padding: Any) -> Made:
    """Allocates a padded image (cuda/ReflectionPad.cu). It is contiguous, and so is the image that the kernel reads.

    The kernel makes a contiguous copy of an image in another memory format.
    """
    return _contiguous(op(input, padding)), _contiguous_copies(input)


@cuda_kernel(_aten.reflection_pad1d_backward.default, _aten.reflection_pad2d_backward.default, only_on_cuda=True)
def _reflection_pad_backward(dependence: DataDependence, op: Any, grad: Any, input: torch.Tensor, padding: Any) -> Made:
    """Allocates the gradient of a padded image (cuda/ReflectionPad.cu), as `_reflection_pad` does for the forward."""
    return _contiguous(op(grad, input, padding)), _contiguous_copies(grad)


@cuda_kernel(
    *(getattr(_aten, f"replication_pad{dims}d{part}").default for dims in (1, 2, 3) for part in ("", "_backward")),
    _aten.reflection_pad3d_backward.default,
    only_on_cuda=True,
)
def _pad(dependence: DataDependence, op: Any, *args: Any) -> Made:
    """Allocates a padded image, or its gradient: contiguous, without copies (cuda/ReplicationPadding.cu)."""
    return _contiguous(op(*args)), []


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor like `tensor`, or `tensor` itself if it is contiguous."""
    return tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _contiguous_copies(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Returns the copies that `Tensor.contiguous` makes of tensors."""
    return [_contiguous(tensor) for tensor in tensors if not tensor.is_contiguous()]


@cuda_kernel(_aten.native_layer_norm_backward.default)
def _layer_norm_backward(dependence: DataDependence, op: Any, grad: Any, input: torch.Tensor, *args: Any) -> Made:
    """Allocates the gradients of a layer normalization.

    The gradient of the input is contiguous (cuda/layer_norm_kernel.cu, layer_norm.cpp). The fake kernel gives it the
    strides of `grad`, so that a later `reshape` would copy it.
    """
    input_grad, *others = op(grad, input, *args)
    return (None if input_grad is None else _contiguous(input_grad), *others), []


@cuda_kernel(_aten.native_group_norm_backward.default)
def _group_norm_backward(dependence: DataDependence, op: Any, grad: Any, input: torch.Tensor, *args: Any) -> Made:
    """Allocates the gradients of a group normalization (group_norm.cpp).

    The gradient of the input has the dtype of the input. The fake kernel gives it that of the weight.
    """
    input_grad, *others = op(grad, input, *args)
    if input_grad is not None and input_grad.dtype != input.dtype:
        input_grad = torch.empty_like(input_grad, dtype=input.dtype)
    return (input_grad, *others), []


@cuda_kernel(_aten._grouped_mm.default)
def _grouped_mm(
    dependence: DataDependence, op: Any, a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
):
    """Allocates the result of a grouped matrix product (cuda/GroupedBlas.cpp; other dtypes than bf16 use a fallback).

    Rows of the result are padded to 16 bytes (`create_grouped_gemm_output_tensor` in GroupedMMUtils.h).
    """
    shape: tuple[int, ...]
    if a.dim() == 2 and b.dim() == 2:
        shape = (offs.shape[0], a.shape[0], b.shape[1])
    elif a.dim() == 2:
        shape = (a.shape[0], b.shape[-1])
    elif b.dim() == 2:
        shape = (a.shape[1], b.shape[1])
    else:
        shape = (a.shape[0], a.shape[1], b.shape[-1])
    dtype = out_dtype or a.dtype
    elements = 16 // dtype.itemsize
    row = -(-shape[-1] // elements) * elements
    stride = (row, 1) if len(shape) == 2 else (shape[1] * row, row, 1)
    return torch.empty_strided(shape, stride, dtype=dtype, device=a.device), []


@cuda_kernel(_aten._ctc_loss.default)
def _ctc_loss(
    dependence: DataDependence, op: Any, log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *_: Any
) -> Made:
    """Allocates what `ctc_loss_gpu_template` in cuda/LossCTC.cu does.

    The table of alphas has two columns for each label of the longest target, and one more.
    """
    steps, batch = log_probs.shape[0], log_probs.shape[1]
    table = log_probs.new_empty(batch, steps, 2 * max(target_lengths, default=0) + 1)
    offsets_and_lengths = [torch.empty(batch, dtype=torch.long, device=log_probs.device) for _ in range(3)]
    return (log_probs.new_empty(batch), table), offsets_and_lengths


@cuda_kernel(_aten._ctc_loss_backward.default)
def _ctc_loss_backward(
    dependence: DataDependence,
    op: Any,
    grad: Any,
    log_probs: Any,
    targets: Any,
    il: Any,
    tl: Any,
    nll: Any,
    log_alpha: Any,
    *_: Any,
) -> Made:
    """Allocates what `ctc_loss_backward_gpu_template` in cuda/LossCTC.cu does.

    The table of betas is a scratch tensor as large as the alphas.
    """
    return torch.empty_like(log_probs), [torch.empty_like(log_alpha)]


@cuda_kernel(_aten._thnn_fused_gru_cell.default)
def _gru_cell(dependence: DataDependence, op: Any, input_gates: Any, hidden_gates: Any, hx: Any, *_: Any) -> Made:
    """Allocates what `_thnn_fused_gru_cell_cuda` in cuda/RNN.cu does.

    For backward it saves five times the hidden state (`GRU_WORKSPACE_MULTIPLIER`).
    """
    return (torch.empty_like(hx), hx.new_empty(hx.shape[0], 5 * hx.shape[1])), []


@cuda_kernel(_aten._thnn_fused_gru_cell_backward.default)
def _gru_cell_backward(dependence: DataDependence, op: Any, grad_hy: Any, workspace: Any, has_bias: bool) -> Made:
    """Allocates what `_thnn_fused_gru_cell_backward_cuda` in cuda/RNN.cu does.

    These are the gradients of the input gates, the hidden gates, the hidden state and both biases.
    """
    gates = 3 * workspace.shape[1] // 5
    grads = [workspace.new_empty(workspace.shape[0], gates) for _ in range(2)]
    biases = [workspace.new_empty(gates) if has_bias else None for _ in range(2)]
    return (grads[0], grads[1], torch.empty_like(grad_hy), *biases), []


def _norm_on_cpu(dependence: DataDependence, op: Any, input: torch.Tensor, *args: Any) -> Made:
    """Allocates what the CPU's kernels of normalizations do (layer_norm.cpp, group_norm.cpp, Normalization.cpp).

    Statistics are fp32 if the parameters or running statistics are, and the input is not (`is_mixed_type`).
    """
    out, *statistics = op(input, *args)
    if any(isinstance(value, torch.Tensor) and value.dtype is torch.float32 for value in args):
        statistics = [torch.empty_like(value, dtype=torch.float32) for value in statistics]
    return (out, *statistics), []


def _batch_norm_on_cpu(dependence: DataDependence, op: Any, input: torch.Tensor, *args: Any) -> Made:
    """Allocates what `batch_norm_cpu` in Normalization.cpp does. The output of a strided input is contiguous."""
    (out, *statistics), _ = _norm_on_cpu(dependence, op, input, *args)
    return (_contiguous_unless_channels_last(out, input), *statistics), []


def _batch_norm_backward_on_cpu(
    dependence: DataDependence, op: Any, grad: torch.Tensor, input: torch.Tensor, *args: Any
) -> Made:
    """Allocates what `batch_norm_backward_cpu` in Normalization.cpp does. A strided input has a contiguous gradient."""
    input_grad, *others = op(grad, input, *args)
    if input_grad is not None:
        input_grad = _contiguous_unless_channels_last(input_grad, input)
    return (input_grad, *others), []


def _contiguous_unless_channels_last(tensor: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor like `tensor`, or `tensor` itself if the input is contiguous in any memory format."""
    formats = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}.get(input.dim(), ())
    if any(input.is_contiguous(memory_format=kind) for kind in (torch.contiguous_format, *formats)):
        return tensor
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


_ON_CPU: dict[torch._ops.OpOverload, Callable[..., Made]] = {
    _aten.native_layer_norm.default: _norm_on_cpu,
    _aten.native_group_norm.default: _norm_on_cpu,
    _aten.native_batch_norm.default: _batch_norm_on_cpu,
    _aten.native_batch_norm_backward.default: _batch_norm_backward_on_cpu,
}
"""Functions for ops whose kernels on the CPU allocate other results than their fake kernels."""


def register_routes(dependence: DataDependence, autograd_key: str) -> None:
    """Registers composite ops that run other ops on CUDA than on the device of the rehearsal.

    These are `ctc_loss` with lengths in tensors, which reads numbers from tensors, and on the virtual GPU `group_norm`.
    The registration lasts until the process ends.

    Args:
        autograd_key: dispatch key of composite ops on the device of the rehearsal (`Target.autograd_key`).
    """

    def ctc_loss(
        log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: int = 1,
        zero_infinity: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Runs the ops of `ctc_loss` in LossCTC.cpp. Lengths that are not known are assumed to be the largest possible.

        Concatenated targets have no largest possible length, and are assumed to be equally long.
        """
        longest = targets.shape[1] if targets.dim() > 1 else targets.numel() // target_lengths.numel()
        steps = dependence.list_or_assume(input_lengths, log_probs.shape[0], ASSUMED_LENGTHS)
        lengths = dependence.list_or_assume(target_lengths, longest, ASSUMED_LENGTHS)
        losses = _aten._ctc_loss.default(log_probs, targets, steps, lengths, blank, zero_infinity)[0]
        if zero_infinity:
            losses = torch.where(losses == float("inf"), losses.new_zeros(()), losses)
        if reduction == 1:
            counts = torch.tensor(lengths, dtype=losses.dtype, device=losses.device).clamp_min(1)
            return (losses / counts).mean()
        return losses.sum() if reduction == 2 else losses

    backend.route("aten::ctc_loss.Tensor", ctc_loss, autograd_key)

    def group_norm(
        input: torch.Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5,
        cudnn_enabled: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        """Runs the ops of `group_norm` in group_norm.cpp for CUDA: its input and output are contiguous.

        On the CPU and on devices that other libraries add to PyTorch, the input keeps its memory format.
        """
        samples, channels, *image = input.shape
        weight, bias = (None if each is None else each.contiguous() for each in (weight, bias))
        input = input.contiguous()
        return torch.native_group_norm(input, weight, bias, samples, channels, math.prod(image), num_groups, eps)[0]

    if autograd_key != "AutogradCPU":
        backend.route("aten::group_norm", group_norm, autograd_key)
