"""Options and sizes of CUDA's caching allocator: how a request is rounded, and how large its segment is.

Sources: pytorch's c10/core/AllocatorConfig.h (constants, options), `round_size` and `get_allocation_size` in
c10/cuda/CUDACachingAllocator.cpp. The constants are the same in every release from 2.4 to 2.15;
`large_segment_bytes` can be set since 2.11, and is 20 MiB before.
"""

from __future__ import annotations

import dataclasses

from planner.plan_types.sizes import MIB

SMALLEST_BLOCK_BYTES = 512
LARGEST_SMALL_BYTES = MIB
"""Rounded requests up to here go to the small pool."""
SMALL_SEGMENT_BYTES = 2 * MIB
OWN_SEGMENT_BYTES = 10 * MIB
"""Requests from here on get a segment of their own size."""
SEGMENT_STEP_BYTES = 2 * MIB
ROUNDUP_INTERVALS = 16
"""Powers of two from 1 MiB to 64 GiB and above, each with its own number of divisions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """The options of PYTORCH_CUDA_ALLOC_CONF that change which memory is taken; defaults as in pytorch."""

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    """Blocks of this size and more are neither split nor used for smaller requests; None: no such limit."""
    max_non_split_rounding_bytes: int = 20 * MIB
    """How much larger than the request such a block may be."""
    large_segment_bytes: int = 20 * MIB
    """Segment for requests between 1 and 10 MiB, and page of the large pool of expandable segments."""
    roundup_power2_divisions: tuple[int, ...] = ()
    """Steps between powers of two that requests are rounded to, for each power from 1 MiB to 64 GiB; empty: off."""
    garbage_collection_threshold: float = 0.0
    """Share of `allowed_bytes` above which old free segments are given back; 0: off."""
    allowed_bytes: int | None = None
    """Limit of `torch.cuda.set_per_process_memory_fraction` in bytes; None: only the card itself is a limit."""

    def __post_init__(self) -> None:
        if self.roundup_power2_divisions and len(self.roundup_power2_divisions) != ROUNDUP_INTERVALS:
            raise ValueError(
                f"roundup_power2_divisions has {len(self.roundup_power2_divisions)} entries: "
                f"give {ROUNDUP_INTERVALS}, one for each power of two from 1 MiB to 64 GiB, or none"
            )
        if any(steps & (steps - 1) for steps in self.roundup_power2_divisions):
            raise ValueError(f"roundup_power2_divisions {self.roundup_power2_divisions}: every entry is a power of two")
        if self.max_split_size_bytes is not None and self.max_split_size_bytes <= self.large_segment_bytes:
            raise ValueError(
                f"max_split_size_bytes {self.max_split_size_bytes} is too small: "
                f"give more than large_segment_bytes ({self.large_segment_bytes}), or None"
            )


def round_size(size_bytes: int, settings: AllocatorSettings) -> int:
    """Bytes of the block that a request is searched with (`round_size` upstream)."""
    if settings.roundup_power2_divisions and size_bytes >= SMALLEST_BLOCK_BYTES:
        power = size_bytes.bit_length() - 1
        interval = min(max(power - MIB.bit_length() + 1, 0), ROUNDUP_INTERVALS - 1)
        divisions = settings.roundup_power2_divisions[interval]
        if divisions > 1 and size_bytes > SMALLEST_BLOCK_BYTES * divisions:
            step_bytes = (1 << power) // divisions
            return -(-size_bytes // step_bytes) * step_bytes
    return max(-(-size_bytes // SMALLEST_BLOCK_BYTES), 1) * SMALLEST_BLOCK_BYTES


def segment_size(size_bytes: int, settings: AllocatorSettings) -> int:
    """Bytes of the segment that is made for a rounded request (`get_allocation_size` upstream)."""
    if size_bytes <= LARGEST_SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < OWN_SEGMENT_BYTES:
        return settings.large_segment_bytes
    return -(-size_bytes // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES
