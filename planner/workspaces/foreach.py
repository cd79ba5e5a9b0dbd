"""Norms of many tensors at once."""

from __future__ import annotations

from planner.profiles.device import DeviceProfile
from planner.workspaces.registry import KernelCall, takes_scratch

_CHUNK = 65536


@takes_scratch("aten._foreach_norm.Scalar")
def foreach_norm(call: KernelCall, card: DeviceProfile) -> list[int]:
    """A partial norm for each chunk of each tensor (ForeachReduceOp.cu, `foreach_tensor_norm_cuda`)."""
    tensors = call.arguments["self"]
    most = max((-(-layout.numel // _CHUNK) for layout in tensors), default=0)
    return [4 * len(tensors) * most] if most else []
