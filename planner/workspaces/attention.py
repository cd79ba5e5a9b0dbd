"""Formulas for the scratch memory of fused attention (flash and memory-efficient), forward and backward."""

from __future__ import annotations

from planner.profiles.device import DeviceProfile
from planner.workspaces.registry import KernelCall, takes_scratch


def _rounded(number: int, multiple: int) -> int:
    """Returns `number`, rounded up to a multiple of `multiple`."""
    return -(-number // multiple) * multiple


@takes_scratch("aten._scaled_dot_product_flash_attention_backward.default")
def flash_backward(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Returns the sizes in bytes of the scratch blocks of flash attention's backward.

    The blocks are one number for each query (the sum over its output times the gradient of the output) and the query's
    gradient, both in fp32. With grouped-query attention there are also the gradients of keys and values for each query
    head, before they are summed over each group. Deterministic algorithms would need more, which is not counted.

    Source: transformers/cuda/flash_attn/flash_api.cpp, `mha_bwd`.
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
    """Returns the sizes in bytes of the scratch blocks of memory-efficient attention's backward.

    The blocks are one number for each query (the sum over its output times the gradient of the output) and, for fp16
    and bf16, the query's gradient, both in fp32.

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
    """Returns an empty list: the attention scores stay in the GPU's shared memory.

    If the batch is small and the keys are long, flash attention may process the keys in several parts. The memory that
    this takes is not counted.
    """
    return []
