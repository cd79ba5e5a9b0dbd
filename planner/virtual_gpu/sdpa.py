"""Chooses the kernel that `scaled_dot_product_attention` uses on a CUDA card, and runs the op of this kernel.

PyTorch takes the first kernel that can run the call (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, torch 2.11
to 2.13): cuDNN (on Hopper and data center Blackwell; on other cards it comes last), flash, memory-efficient, math.
The choice is made for the card that the plan is for, not for the machine on which the planner runs.
"""

from __future__ import annotations

import dataclasses
import enum

import torch


class AttentionBackend(enum.Enum):
    """The attention kernels among which PyTorch chooses."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


_PREFER_CUDNN = ((9, 0), (9, 3), (10, 0), (10, 3))
"""Compute capabilities on which PyTorch prefers cuDNN to the other kernels (`check_prefer_cudnn_attention`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The arguments of one call of `scaled_dot_product_attention`.

    Shapes: query [B, H, M, K], key [B, Hkv, N, K], value [B, Hkv, N, Kv].
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    grouped: bool

    @property
    def trains(self) -> bool:
        """True if there will be a backward, so that the kernel has to save tensors for it."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))


def choose_backend(call: AttentionCall, capability: tuple[int, int]) -> AttentionBackend:
    """Returns the kernel that PyTorch chooses on a card of this compute capability, among those that are enabled.

    `torch.nn.attention.sdpa_kernel` and the functions of `torch.backends.cuda` enable and disable kernels.
    """
    enabled = torch.backends.cuda
    by_cudnn = enabled.cudnn_sdp_enabled() and _cudnn_takes(call, capability)
    if by_cudnn and capability in _PREFER_CUDNN:
        return AttentionBackend.CUDNN
    if enabled.flash_sdp_enabled() and _flash_takes(call, capability):
        return AttentionBackend.FLASH
    if enabled.mem_efficient_sdp_enabled() and _efficient_takes(call, capability):
        return AttentionBackend.EFFICIENT
    return AttentionBackend.CUDNN if by_cudnn and not enabled.math_sdp_enabled() else AttentionBackend.MATH


def _plain_shapes(call: AttentionCall) -> bool:
    """True if the tensors are floating point and have four dimensions, as all kernels except math require."""
    return call.query.dim() == 4 and call.key.dim() == 4 and call.value.dim() == 4 and call.query.is_floating_point()


def _cudnn_takes(call: AttentionCall, capability: tuple[int, int]) -> bool:
    """True if cuDNN's kernel can run the call (`can_use_cudnn_attention`)."""
    if not (8, 0) <= capability <= (12, 1) or not _plain_shapes(call) or _must_be_deterministic():
        return False
    head_dim, queries, keys = call.query.size(-1), call.query.size(-2), call.key.size(-2)
    return (
        keys != 1
        and (not call.dropout or queries != 1)
        and call.query.dtype in (torch.float16, torch.bfloat16)
        and head_dim % 8 == 0
        and call.value.size(-1) % 8 == 0
        and max(head_dim, call.value.size(-1)) <= 128
        and (call.mask is None or not call.mask.requires_grad)
        and (not call.grouped or call.query.size(1) % call.key.size(1) == 0)
    )


def _must_be_deterministic() -> bool:
    """True if `torch.use_deterministic_algorithms` forbids kernels that are not deterministic, such as cuDNN's."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _flash_takes(call: AttentionCall, capability: tuple[int, int]) -> bool:
    """True if the flash kernel can run the call (`can_use_flash_attention`)."""
    if not (8, 0) <= capability <= (12, 1) or not _plain_shapes(call) or call.mask is not None:
        return False
    head_dim = call.query.size(-1)
    if call.query.dtype not in (torch.float16, torch.bfloat16) or head_dim > 256 or call.value.size(-1) != head_dim:
        return False
    if call.causal and call.query.size(-2) != call.key.size(-2):
        return False
    # GPUs with less shared memory than the A100 cannot run the backward of large heads
    # (`check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`).
    consumer = capability in ((8, 6), (8, 7), (8, 9)) or capability[0] == 12
    if call.trains and consumer and (192 < head_dim <= 224 or (head_dim > 224 and call.dropout > 0)):
        return False
    return True


def _efficient_takes(call: AttentionCall, capability: tuple[int, int]) -> bool:
    """True if the memory-efficient kernel can run the call (`can_use_mem_efficient_attention`)."""
    if (
        not (5, 0) <= capability <= (12, 1)
        or not _plain_shapes(call)
        or (call.grouped and call.query.size(1) != call.key.size(1))
    ):
        return False
    halves = (torch.float16, torch.bfloat16) if capability >= (8, 0) else (torch.float16,)
    if call.query.dtype not in (*halves, torch.float32):
        return False
    alignment = 8 if call.query.dtype in halves else 4
    if capability < (8, 0):
        alignment = 8 if call.query.dtype == torch.float16 and capability >= (7, 0) else 1
    return call.query.size(-1) % alignment == 0 and call.value.size(-1) % alignment == 0


def run_backend(backend: AttentionBackend, call: AttentionCall) -> torch.Tensor:
    """Runs the op of a kernel, with the copies that PyTorch makes before and after it, and returns its output."""
    aten = torch.ops.aten
    mask = _additive(call)
    match backend:
        case AttentionBackend.CUDNN:
            return aten._scaled_dot_product_cudnn_attention(
                call.query, call.key, call.value, mask, call.trains, call.dropout, call.causal, False, scale=call.scale
            )[0]
        case AttentionBackend.FLASH:
            head_dim = call.query.size(-1)
            padded = [_pad_last(tensor, 8) for tensor in (call.query, call.key, call.value)]
            scale = call.scale if call.scale is not None else head_dim**-0.5
            out = aten._scaled_dot_product_flash_attention(*padded, call.dropout, call.causal, False, scale=scale)[0]
            return out if out.size(-1) == head_dim else out[..., :head_dim]
        case AttentionBackend.EFFICIENT:
            if mask is not None:
                mask = _aligned_bias(mask, call)
            return aten._scaled_dot_product_efficient_attention(
                call.query, call.key, call.value, mask, call.trains, call.dropout, call.causal, scale=call.scale
            )[0]
        case AttentionBackend.MATH:
            return aten._scaled_dot_product_attention_math(
                call.query,
                call.key,
                call.value,
                mask,
                call.dropout,
                call.causal,
                None,
                scale=call.scale,
                enable_gqa=call.grouped,
            )[0]


def _additive(call: AttentionCall) -> torch.Tensor | None:
    """Returns the mask; a boolean mask becomes an additive one in the query's dtype (`convert_boolean_attn_mask`)."""
    if call.mask is None or call.mask.dtype != torch.bool:
        return call.mask
    zeros = torch.zeros_like(call.mask, dtype=call.query.dtype)
    return zeros.masked_fill_(call.mask.logical_not(), float("-inf"))


def _pad_last(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """Returns the tensor with its last dimension padded to a multiple of `multiple`."""
    missing = -tensor.size(-1) % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _aligned_bias(mask: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Returns the mask with rows that begin at multiples of 16 elements, as the memory-efficient kernel requires.

    PyTorch does the same in `pad_bias`: it pads the rows in a copy, and slices the copy to the original size.
    """
    columns = mask.size(-1)
    if columns % 16:
        mask = _pad_last(mask, 16)[..., :columns]
    batch, heads, rows = call.query.size(0), call.query.size(1), call.query.size(-2)
    return mask.expand(batch, heads, rows, columns)
