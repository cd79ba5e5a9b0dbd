"""Options and constants of CUDA's caching allocator, the rounding of requests, and the sizes of segments.

Sources: pytorch's c10/core/AllocatorConfig.h (constants, options), `round_size` and `get_allocation_size` in
c10/cuda/CUDACachingAllocator.cpp. The constants are the same in every release from 2.4 to 2.15;
`large_segment_bytes` can be set since 2.11, and is 20 MiB before.
"""

from __future__ import annotations

import dataclasses

from planner.plan_types.sizes import MIB

SMALLEST_BLOCK_BYTES = 512
"""Minimum size of a block, and the multiple that requests are rounded up to (`kMinBlockSize`)."""
LARGEST_SMALL_BYTES = MIB
"""Maximum size of a rounded request for the small pool (`kSmallSize`)."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""Size of a segment of the small pool (`kSmallBuffer`)."""
OWN_SEGMENT_BYTES = 10 * MIB
"""Minimum size of a request whose segment has its own size (`kMinLargeAlloc`)."""
SEGMENT_STEP_BYTES = 2 * MIB
"""The multiple that such segments are rounded up to (`kRoundLarge`)."""
ROUNDUP_INTERVALS = 16
"""Number of powers of two, from 1 MiB to 64 GiB and above, that have their own number of divisions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """The options of PYTORCH_CUDA_ALLOC_CONF that change what is allocated, with PyTorch's defaults."""

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    """Minimum size of blocks that are neither split nor used for smaller requests. None means no such limit."""
    max_non_split_rounding_bytes: int = 20 * MIB
    """Maximum number of bytes by which such a block may exceed the request."""
    large_segment_bytes: int = 20 * MIB
    """Size of the segments for requests between 1 and 10 MiB, and of a page of expandable segments of the large
    pool."""
    roundup_power2_divisions: tuple[int, ...] = ()
    """Number of steps between powers of two that requests are rounded to, for each power from 1 MiB to 64 GiB.

    An empty tuple means no such rounding.
    """
    garbage_collection_threshold: float = 0.0
    """Fraction of `allowed_bytes` above which old free segments are released. 0 means off."""
    allowed_bytes: int | None = None
    """Limit of `torch.cuda.set_per_process_memory_fraction` in bytes. None means only the memory of the card."""

    def __post_init__(self) -> None:
        """Raises `ValueError` for options that PyTorch would refuse."""
        if self.roundup_power2_divisions and len(self.roundup_power2_divisions) != ROUNDUP_INTERVALS:
            raise ValueError(
                f"roundup_power2_divisions has {len(self.roundup_power2_divisions)} entries: "
                f"give {ROUNDUP_INTERVALS}, one for each power of two from 1 MiB to 64 GiB, or none"
            )
        if any(steps & (steps - 1) for steps in self.roundup_power2_divisions):
            raise ValueError(
                f"roundup_power2_divisions is {self.roundup_power2_divisions}: give powers of two, such as 4"
            )
        if self.max_split_size_bytes is not None and self.max_split_size_bytes <= self.large_segment_bytes:
            raise ValueError(
                f"max_split_size_bytes {self.max_split_size_bytes} is too small: "
                f"give more than large_segment_bytes ({self.large_segment_bytes}), or None"
            )


def round_size(size_bytes: int, settings: AllocatorSettings) -> int:
    """Returns the size of the block that is searched for a request (`round_size` upstream)."""
    if settings.roundup_power2_divisions and size_bytes >= SMALLEST_BLOCK_BYTES:
        power = size_bytes.bit_length() - 1
        interval = min(max(power - MIB.bit_length() + 1, 0), ROUNDUP_INTERVALS - 1)
        divisions = settings.roundup_power2_divisions[interval]
        if divisions > 1 and size_bytes > SMALLEST_BLOCK_BYTES * divisions:
            step_bytes = (1 << power) // divisions
            return -(-size_bytes // step_bytes) * step_bytes
    return max(-(-size_bytes // SMALLEST_BLOCK_BYTES), 1) * SMALLEST_BLOCK_BYTES


def segment_size(size_bytes: int, settings: AllocatorSettings) -> int:
    """Returns the size of the segment that is allocated for a rounded request (`get_allocation_size` upstream)."""
    if size_bytes <= LARGEST_SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < OWN_SEGMENT_BYTES:
        return settings.large_segment_bytes
    return -(-size_bytes // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES
