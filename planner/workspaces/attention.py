"""Scratch memory of fused attention: the backward allocates more than its gradients."""

from __future__ import annotations

from planner.profiles.device import DeviceProfile
from planner.workspaces.registry import KernelCall, takes_scratch


def _rounded(number: int, multiple: int) -> int:
    """Rounds up to a multiple."""
    return -(-number // multiple) * multiple


@takes_scratch("aten._scaled_dot_product_flash_attention_backward.default")
def flash_backward(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Allocates row sums, the query's gradient in fp32, and expanded gradients of grouped keys and values.

    Source: transformers/cuda/flash_attn/flash_api.cpp, `mha_bwd`, without deterministic algorithms.
    """
    batch, heads, queries, width = call.tensor("query").shape
    groups, keys = call.tensor("key").shape[1:3]
    rows, columns = _rounded(queries, 128), _rounded(width, 32)
    blocks = [4 * batch * heads * rows, 4 * batch * heads * rows * columns]
    if groups != heads:
        blocks += [batch * keys * heads * width * call.tensor("key").itemsize] * 2
    return blocks


@takes_scratch("aten._scaled_dot_product_efficient_attention_backward.default")
def efficient_backward(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Allocates row sums and, for half precision, the query's gradient in fp32.

    Source: transformers/cuda/attention_backward.cu, `_efficient_attention_backward`.
    """
    batch, heads, queries, width = call.tensor("query").shape
    blocks = [4 * batch * heads * queries]
    if call.tensor("query").itemsize == 2:
        blocks.append(4 * batch * heads * _rounded(queries, 64) * width)
    return blocks


@takes_scratch(
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
)
def fused_forward(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Allocates nothing, because scores stay in shared memory.

    Flash attention may split long keys of small batches, which takes memory that is not counted here.
    """
    return []
