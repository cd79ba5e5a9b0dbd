"""Options and constants of PyTorch's CUDA caching allocator, the rounding of requests, and the sizes of segments.

Sources: pytorch's c10/core/AllocatorConfig.h (constants, options), `round_size` and `get_allocation_size` in
c10/cuda/CUDACachingAllocator.cpp. The constants are the same in every release from 2.4 to 2.15;
`large_segment_bytes` can be set since 2.11. In earlier releases it is always 20 MiB.
"""

from __future__ import annotations

import dataclasses

from planner.plan_types.sizes import MIB

SMALLEST_BLOCK_BYTES = 512
"""Minimum size of a block. Requests are rounded up to a multiple of it (`kMinBlockSize` in PyTorch)."""
LARGEST_SMALL_BYTES = MIB
"""Maximum size of a request, after rounding, that is served from the small pool (`kSmallSize` in PyTorch)."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""Size of a segment of the small pool (`kSmallBuffer` in PyTorch)."""
OWN_SEGMENT_BYTES = 10 * MIB
"""Minimum size of a request for which a segment of its own size is taken (`kMinLargeAlloc` in PyTorch).

For a smaller request of the large pool, a segment of `large_segment_bytes` is taken.
"""
SEGMENT_STEP_BYTES = 2 * MIB
"""For a request of at least `OWN_SEGMENT_BYTES`, the size of the segment is the size of the request rounded up to a
multiple of this (`kRoundLarge` in PyTorch)."""
ROUNDUP_INTERVALS = 16
"""Number of entries of `AllocatorSettings.roundup_power2_divisions`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """The options of PYTORCH_ALLOC_CONF that the simulator knows, with PyTorch's defaults, and the memory limit.

    Raises:
        ValueError: PyTorch would refuse one of the options.
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    """Blocks of at least this size are never split, and never serve requests below it. None means no such limit."""
    max_non_split_rounding_bytes: int = 20 * MIB
    """A block of at least `max_split_size_bytes` serves a request only if it exceeds the request by less than this."""
    large_segment_bytes: int = 20 * MIB
    """Size of the segments for requests between 1 and 10 MiB. Expandable segments of the large pool have pages of this
    size."""
    roundup_power2_divisions: tuple[int, ...] = ()
    """Numbers of steps into which the range from a power of two to the next one is divided, to round requests up.

    The first entry is for requests below 2 MiB, the second one for those from 2 to 4 MiB, and so on; the last one is
    for requests from 32 GiB. If the second entry is 4, requests from 2 to 4 MiB are rounded up to 2.5, 3, 3.5 or 4 MiB.
    0 and 1 mean rounding up to a multiple of 512 bytes, and an empty tuple means this for all requests.
    """
    garbage_collection_threshold: float = 0.0
    """If reserved memory exceeds this fraction of `allowed_bytes`, old free segments are released before new memory is
    taken. 0 turns this off, as does `allowed_bytes=None`."""
    allowed_bytes: int | None = None
    """Limit that `torch.cuda.set_per_process_memory_fraction` sets, in bytes. None means that it was not called."""

    def __post_init__(self) -> None:
        if self.roundup_power2_divisions and len(self.roundup_power2_divisions) != ROUNDUP_INTERVALS:
            raise ValueError(
                f"roundup_power2_divisions has {len(self.roundup_power2_divisions)} entries: "
                f"give {ROUNDUP_INTERVALS}, one for each power of two from 1 MiB to 32 GiB, or an empty tuple"
            )
        if any(steps & (steps - 1) for steps in self.roundup_power2_divisions):
            raise ValueError(
                f"roundup_power2_divisions is {self.roundup_power2_divisions}, but PyTorch accepts only powers of two: "
                "give numbers such as 4"
            )
        if self.max_split_size_bytes is not None and self.max_split_size_bytes < self.large_segment_bytes:
            raise ValueError(
                f"max_split_size_bytes is {self.max_split_size_bytes}, but must be at least large_segment_bytes "
                f"({self.large_segment_bytes}): give a larger value, or None for no limit"
            )


PYTORCH_DEFAULTS = AllocatorSettings()
"""The settings of a process in which PYTORCH_ALLOC_CONF is not set."""


def round_size(size_bytes: int, settings: AllocatorSettings) -> int:
    """Returns the size of a request after rounding, in bytes (`round_size` in PyTorch)."""
    if settings.roundup_power2_divisions and size_bytes >= SMALLEST_BLOCK_BYTES:
        power = size_bytes.bit_length() - 1
        interval = min(max(power - MIB.bit_length() + 1, 0), ROUNDUP_INTERVALS - 1)
        divisions = settings.roundup_power2_divisions[interval]
        if divisions > 1 and size_bytes > SMALLEST_BLOCK_BYTES * divisions:
            step_bytes = (1 << power) // divisions
            return -(-size_bytes // step_bytes) * step_bytes
    return -(-(size_bytes or 1) // SMALLEST_BLOCK_BYTES) * SMALLEST_BLOCK_BYTES


def segment_size(size_bytes: int, settings: AllocatorSettings) -> int:
    """Returns the size in bytes of the new segment for a request (`get_allocation_size` in PyTorch).

    Args:
        size_bytes: Size of the request after rounding.
        settings: Options of the allocator.
    """
    if size_bytes <= LARGEST_SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < OWN_SEGMENT_BYTES:
        return settings.large_segment_bytes
    return -(-size_bytes // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES
