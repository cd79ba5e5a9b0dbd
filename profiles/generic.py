"""Profiles of cards that do not exist: a generic Ampere GPU with a given memory, and a card that only counts bytes."""

from __future__ import annotations

import dataclasses
import itertools

from planner.profiles.device import GIB, MIB, DeviceProfile, ProfileError


def modelled_context_bytes(sm_count: int) -> int:
    """Estimates the size in bytes of the CUDA context with lazily loaded kernels, to within about 25 %.

    The estimate is 13 MiB, plus 3.41 MiB for each multiprocessor.

    Source: least squares over public out-of-memory messages of torch 2.1 and later (memory of the process minus what
    PyTorch had reserved), from a T4 with 40 multiprocessors to an RTX 5090 with 170; residuals -120 to +71 MiB.
    """
    return 13 * MIB + sm_count * 341 * MIB // 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Anchor:
    """Numbers of a real Ampere card. The generic card is interpolated between two such cards."""

    vram_bytes: int
    sm_count: int
    memory_bandwidth_bytes_per_s: int
    fp32_flops_per_s: int


_ANCHORS = (
    # RTX 3050 Laptop, RTX 3060 Laptop, RTX 3060 Ti, RTX 3090: NVIDIA's datasheets.
    _Anchor(vram_bytes=4 * GIB, sm_count=16, memory_bandwidth_bytes_per_s=192 * 10**9, fp32_flops_per_s=7_100 * 10**9),
    _Anchor(vram_bytes=6 * GIB, sm_count=30, memory_bandwidth_bytes_per_s=336 * 10**9, fp32_flops_per_s=10_900 * 10**9),
    _Anchor(vram_bytes=8 * GIB, sm_count=38, memory_bandwidth_bytes_per_s=448 * 10**9, fp32_flops_per_s=16_200 * 10**9),
    _Anchor(
        vram_bytes=24 * GIB, sm_count=82, memory_bandwidth_bytes_per_s=936 * 10**9, fp32_flops_per_s=35_600 * 10**9
    ),
)


def generic(vram_bytes: int) -> DeviceProfile:
    """Returns the profile of a generic Ampere GPU (compute capability 8.6) with `vram_bytes` of memory.

    Plans use it if the user names no card and this machine has none. Its number of multiprocessors, bandwidth and rates
    are interpolated between real GeForce cards of 4 to 24 GiB. With less memory they are those of the smallest of these
    cards; with more memory those of the largest, because no chip of this compute capability has more than 84
    multiprocessors. The size of the CUDA context is estimated (`modelled_context_bytes`).

    Raises:
        ProfileError: `vram_bytes` is not positive.
    """
    if vram_bytes <= 0:
        raise ProfileError(f"a card cannot have {vram_bytes} bytes of memory: give a positive number of bytes")
    sm_count, bandwidth, fp32 = (
        _interpolated(vram_bytes, field) for field in ("sm_count", "memory_bandwidth_bytes_per_s", "fp32_flops_per_s")
    )
    return DeviceProfile(
        name="generic",
        title=f"generic Ampere-class card of {vram_bytes / GIB:.3g} GiB",
        source="datasheet, interpolated between GeForce RTX 30 cards",
        compute_capability=(8, 6),
        sm_count=sm_count,
        max_threads_per_sm=1536,
        vram_bytes=vram_bytes,
        context_bytes=modelled_context_bytes(sm_count),
        context_source="modelled: 13 MiB + 3.41 MiB x multiprocessors",
        memory_bandwidth_bytes_per_s=bandwidth,
        # On GeForce Ampere, tensor cores that accumulate in fp32 have twice the fp32 rate in half precision, and the
        # fp32 rate in TF32.
        flops_per_s={"fp32": fp32, "tf32": fp32, "fp16": 2 * fp32, "bf16": 2 * fp32, "fp64": fp32 // 64},
        native_dtypes=("bf16", "fp16"),
        launch_ns=6_000,
        host_link_bytes_per_s=25_200_000_000,
    )


def _interpolated(vram_bytes: int, field: str) -> int:
    """Interpolates a field linearly between two anchors, rounded down. Outside all anchors it is constant."""
    size = min(max(vram_bytes, _ANCHORS[0].vram_bytes), _ANCHORS[-1].vram_bytes)
    low, high = next(pair for pair in itertools.pairwise(_ANCHORS) if size <= pair[1].vram_bytes)
    start: int = getattr(low, field)
    end: int = getattr(high, field)
    return start + (end - start) * (size - low.vram_bytes) // (high.vram_bytes - low.vram_bytes)


def bare() -> DeviceProfile:
    """Returns the profile 'bare', which counts only the bytes of tensors.

    It has no CUDA context, no workspaces and no caching allocator: total, reserved and allocated memory are equal. The
    rates are those of the generic card of 24 GiB. The memory is 1 TiB, so that only the user's budget limits a plan.
    """
    return dataclasses.replace(
        generic(24 * GIB),
        name="bare",
        title="bare card, counted bytes only",
        vram_bytes=1 << 40,
        context_bytes=0,
        context_source="none by definition",
        allocator=False,
    )
