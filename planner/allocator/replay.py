"""A stream of births and deaths of storages through an empty allocator, and what that does to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from planner.allocator.blocks import Block, falling_addresses
from planner.allocator.caching_allocator import CachingAllocator, OutOfMemory, OutOfMemoryReport
from planner.allocator.settings import AllocatorSettings

if TYPE_CHECKING:
    import numpy


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllocatorOutcome:
    """What a stream of births and deaths does to the allocator."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_requested_bytes: int
    peak_allocated_event: int | None
    """Index of the first event at which `peak_allocated_bytes` was reached; None for a stream that takes nothing."""
    out_of_memory_event: int | None
    """Index of the birth that did not fit, where the replay ended; None when everything fitted."""
    out_of_memory: OutOfMemoryReport | None
    final_allocated_bytes: int
    final_reserved_bytes: int
    final_fragments: int
    """Free blocks at the end that share their segment with a live one, so that no `empty_cache` frees them."""
    final_fragment_bytes: int
    retries: int


def replay(
    events: Sequence[tuple[int, int]] | numpy.ndarray | tuple[numpy.ndarray, numpy.ndarray],
    settings: AllocatorSettings,
    capacity_bytes: int | None,
    *,
    card_bytes: int | None = None,
    descending: bool = False,
) -> AllocatorOutcome:
    """Run births and deaths of storages, all on one stream, through an empty allocator.

    Args:
        events: pairs (storage, size in bytes), as a sequence, an int64 array of shape (n, 2), or two int64 arrays of
            length n. A size above 0 is the birth of that storage, 0 or less its death. A size of 0 for a storage
            that is not alive is a storage without bytes: it takes nothing. Numbers may be reused after a death.
        settings: options of the allocator.
        capacity_bytes: memory for segments; None: no limit.
        card_bytes: total memory of the card, for expandable segments; None: the capacity.
        descending: whether the driver places each new segment below the one before, else above. Among free blocks of
            one size the lowest wins, so that this decides which segments are split.

    Raises:
        ValueError: for a birth of a storage that is alive, or a death with a size of one that is not.
    """
    place = falling_addresses() if descending else None
    allocator = CachingAllocator(settings, capacity_bytes, place=place, card_bytes=card_bytes)
    alive: dict[int, Block] = {}
    peak_event = failure = failed_event = None
    peak_bytes = 0
    for index, (storage, size_bytes) in enumerate(_pairs(events)):
        if size_bytes > 0:
            if storage in alive:
                raise ValueError(f"event {index}: storage {storage} is born twice: record its death first")
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
            raise ValueError(f"event {index}: storage {storage} dies but is not alive: record its birth first")
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


def _pairs(events: object) -> Iterable[tuple[int, int]]:
    """Pairs of plain ints: arithmetic on numpy scalars is many times slower."""
    if hasattr(events, "tolist"):
        return events.tolist()
    if isinstance(events, tuple) and len(events) == 2 and all(hasattr(part, "tolist") for part in events):
        return zip(events[0].tolist(), events[1].tolist(), strict=True)
    return events
