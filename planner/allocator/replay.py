"""Replays a stream of allocations and frees through an empty allocator, and reports the peaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from planner.allocator.blocks import Block, falling_addresses
from planner.allocator.caching_allocator import CachingAllocator, OutOfMemory, OutOfMemoryReport
from planner.allocator.settings import AllocatorSettings

if TYPE_CHECKING:
    import numpy


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllocatorOutcome:
    """The state of the allocator during and after a replay."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_requested_bytes: int
    peak_allocated_event: int | None
    """Index of the first event at which `peak_allocated_bytes` was reached; None for a stream without allocations."""
    out_of_memory_event: int | None
    """Index of the allocation that did not fit, with which the replay ended; None if everything fit."""
    out_of_memory: OutOfMemoryReport | None
    """State of the allocator at that event; None if everything fit."""
    final_allocated_bytes: int
    final_reserved_bytes: int
    final_fragments: int
    """Number of free blocks at the end that share a segment with an allocated one, so `empty_cache` keeps them."""
    final_fragment_bytes: int
    """Size of these blocks together."""
    retries: int
    """Number of times that free segments were released to make room."""


def replay(
    events: Sequence[tuple[int, int]] | numpy.ndarray | tuple[numpy.ndarray, numpy.ndarray],
    settings: AllocatorSettings,
    capacity_bytes: int | None,
    *,
    card_bytes: int | None = None,
    descending: bool = False,
) -> AllocatorOutcome:
    """Replays allocations and frees of storages, all on one stream, through an empty allocator.

    Args:
        events: Pairs (storage, size in bytes), as a sequence, an int64 array of shape (n, 2), or two int64 arrays of
            length n. A size above 0 allocates that storage, and a size of 0 or less frees it. A size of 0 for a
            storage that is not alive stands for an empty storage, and has no effect. The number of a storage may be
            reused after it is freed.
        settings: Options of the allocator.
        capacity_bytes: Maximum memory of all segments together. None means no limit.
        card_bytes: Total memory of the card, for expandable segments. None means the capacity.
        descending: True if the driver places each new segment below the one before, False if above. Among free blocks
            of equal size the one at the lowest address is taken, so this decides which segments are split.

    Raises:
        ValueError: a storage is allocated while it is alive, or freed with a negative size while it is not.
    """
    place = falling_addresses() if descending else None
    allocator = CachingAllocator(settings, capacity_bytes, place=place, card_bytes=card_bytes)
    alive: dict[int, Block] = {}
    peak_event = failure = failed_event = None
    peak_bytes = 0
    for index, (storage, size_bytes) in enumerate(_pairs(events)):
        if size_bytes > 0:
            if storage in alive:
                raise ValueError(f"event {index}: storage {storage} is allocated twice: record its free first")
            try:
                alive[storage] = allocator.malloc(size_bytes)
            except OutOfMemory as error:
                failure, failed_event = error.report, index
                break
            if allocator.allocated_bytes > peak_bytes:
                peak_bytes, peak_event = allocator.allocated_bytes, index
        elif storage in alive:
            allocator.free(alive.pop(storage))
        elif size_bytes < 0:
            raise ValueError(f"event {index}: storage {storage} is freed but not alive: record its allocation first")
    fragments = [
        block.size_bytes
        for segment in allocator.segments()
        if len(segment.blocks) > 1
        for block in segment.blocks
        if not block.is_allocated
    ]
    return AllocatorOutcome(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        peak_requested_bytes=allocator.peak_requested_bytes,
        peak_allocated_event=peak_event,
        out_of_memory_event=failed_event,
        out_of_memory=failure,
        final_allocated_bytes=allocator.allocated_bytes,
        final_reserved_bytes=allocator.reserved_bytes,
        final_fragments=len(fragments),
        final_fragment_bytes=sum(fragments),
        retries=allocator.retries,
    )


def _pairs(events: Any) -> Iterable[tuple[int, int]]:
    """Returns the events as pairs of plain ints, because arithmetic on numpy scalars is many times slower."""
    pairs: Iterable[tuple[int, int]] = events
    if hasattr(events, "tolist"):
        pairs = events.tolist()
    elif isinstance(events, tuple) and len(events) == 2 and all(hasattr(part, "tolist") for part in events):
        pairs = zip(events[0].tolist(), events[1].tolist(), strict=True)
    return pairs
