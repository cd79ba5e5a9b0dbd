"""Formulas for the scratch memory of normalization layers, and of `torch._foreach_norm` (gradient clipping)."""

from __future__ import annotations

from planner.profiles.device import DeviceProfile
from planner.workspaces.registry import KernelCall, takes_scratch

_ROWS_PER_BLOCK = 32
_MOST_BLOCKS = 64 * 1024 // 2
"""Maximum number of thread blocks of layer norm's backward kernel."""
_FOREACH_CHUNK = 65536
"""Number of elements of a tensor that one thread block of a foreach kernel processes (`kChunkSize` in PyTorch)."""


@takes_scratch("aten.native_layer_norm_backward.default", "aten._fused_rms_norm_backward.default")
def layer_norm_backward(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Returns the sizes in bytes of the scratch blocks of layer norm's and RMS norm's backward.

    The blocks are partial sums of the gradients of weight and bias. They exist only for many rows and few columns.

    Source: layer_norm_kernel.cu, `LaunchGammaBetaBackwardCUDAKernel`.
    """
    layout = call.tensor("input")
    columns = 1
    for size in call.arguments["normalized_shape"]:
        columns *= size
    rows = layout.numel // max(columns, 1)
    if rows <= 64 * 1024 or columns // 32 >= card.sm_count // 2:
        return []
    blocks = min(_MOST_BLOCKS // -(-columns // 32), -(-rows // _ROWS_PER_BLOCK))
    needs_gradient = list(call.arguments.get("output_mask", ()))[1:]  # Of the weight, and of the bias if there is one.
    return [blocks * columns * layout.itemsize for needed in needs_gradient if needed]


@takes_scratch("aten.native_group_norm.default")
def group_norm(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Returns the sizes in bytes of group norm's scratch blocks: a scale and a shift for each sample and channel.

    Source: group_norm_kernel.cu, `GroupNormKernelImplInternal`.
    """
    return [4 * call.arguments["N"] * call.arguments["C"]] * 2


@takes_scratch("aten.native_group_norm_backward.default")
def group_norm_backward(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Returns the sizes in bytes of the scratch blocks of group norm's backward.

    The blocks are two sums and a scale for each sample and channel, and two values for each sample and group.

    Source: group_norm_kernel.cu, `GroupNormBackwardKernelImplInternal`.
    """
    samples, channels, groups = (call.arguments[name] for name in ("N", "C", "group"))
    return [4 * samples * channels] * 3 + [4 * samples * groups] * 2


@takes_scratch("aten._foreach_norm.Scalar")
def foreach_norm(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Returns the size in bytes of the scratch block of `torch._foreach_norm`, which holds partial norms.

    Each tensor has a partial norm for each chunk that the largest tensor has.

    Source: ForeachReduceOp.cu, `foreach_tensor_norm_cuda`.
    """
    tensors = call.arguments["self"]
    most_chunks = max((-(-layout.numel // _FOREACH_CHUNK) for layout in tensors), default=0)
    return [4 * len(tensors) * most_chunks] if most_chunks else []
