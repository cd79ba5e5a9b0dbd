"""Simulates the allocator on requests, and returns the history that PyTorch would record: events with their addresses.

`planner.snapshot.write` writes such a history to a file, and `replay_history` replays it like that of a real card.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from planner.allocator.blocks import Block, Placement
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.settings import PYTORCH_DEFAULTS, AllocatorSettings
from planner.allocator.trials import WorkspaceTrials
from planner.snapshot.history import Action, Event, History
from planner.workspaces.registry import Trials


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedHistory:
    """The history of a simulated allocator that starts empty and gets a sequence of requests."""

    history: History
    requests: tuple[int, ...]
    """For each event: index of the allocation or the free that caused it."""
    live: dict[int, int]
    """For each block that is allocated at the end: its address, and the index of the request that allocated it."""
    peak_reserved_bytes: int
    """Maximum of the memory that was taken from the driver."""
    peak_allocated_request: int
    """Index of the first request after which the allocated blocks had their largest total size."""


def simulate(
    requests: Iterable[tuple[int, int]],
    capacity_bytes: int | None,
    *,
    settings: AllocatorSettings = PYTORCH_DEFAULTS,
    card_bytes: int | None = None,
    descending: bool = False,
    streams: Mapping[int, int] = MappingProxyType({}),
    trials: Mapping[int, Trials] = MappingProxyType({}),
) -> SimulatedHistory:
    """Runs allocations and frees through an empty simulated allocator.

    Args:
        requests: Pairs (number of a storage, size in bytes). A size above 0 allocates the storage, 0 frees it.
        capacity_bytes: Maximum memory of all segments together. None means no limit.
        settings: Options of the allocator.
        card_bytes: Total memory of the card, as for `planner.allocator.replay.replay`.
        descending: True if each new segment lies below the segment before it, False if above.
        streams: The CUDA stream of each storage that is not allocated in the default stream.
        trials: What is tried for a storage that does not fit, as for `replay`.

    Raises:
        OutOfMemory: a request does not fit in the capacity.
    """
    place = Placement(descending=descending)
    allocator = CachingAllocator(settings, capacity_bytes, place=place, card_bytes=card_bytes)
    exchanges = allocator.record_exchanges()
    taken, released = (
        (Action.SEGMENT_MAP, Action.SEGMENT_UNMAP)
        if settings.expandable_segments
        else (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE)
    )
    events: list[Event] = []

    def note_exchanges(stream: int) -> None:
        """Adds events for the memory that was taken from the driver, or released."""
        events.extend(Event(taken if size > 0 else released, address, abs(size), stream) for address, size in exchanges)
        exchanges.clear()

    def note_search(block: Block) -> None:
        """Adds events for the block in which algorithms of a convolution are tried out."""
        stream, size_bytes = block.pool.stream, block.requested_bytes
        note_exchanges(stream)
        for action in (Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED):
            events.append(Event(action, block.address, size_bytes, stream))

    workspaces = WorkspaceTrials(trials, note_search)
    alive: dict[int, tuple[Block, int]] = {}
    peak_bytes = peak_request = 0
    causes: list[int] = []
    for index, (storage, size_bytes) in enumerate(requests):
        if size_bytes:
            stream = streams.get(storage, 0)
            block = workspaces.malloc(allocator, storage, size_bytes, stream)
            if block is not None:
                alive[storage] = block, index
            if allocator.peak_allocated_bytes > peak_bytes:
                peak_bytes, peak_request = allocator.peak_allocated_bytes, index
            note_exchanges(stream)
            if block is not None:
                events.append(Event(Action.ALLOC, block.address, workspaces.taken.get(storage, size_bytes), stream))
        elif storage in alive:
            block, _ = alive.pop(storage)
            freed, stream = block.requested_bytes, streams.get(storage, 0)
            events.append(Event(Action.FREE_REQUESTED, block.address, freed, stream))
            events.append(Event(Action.FREE_COMPLETED, block.address, freed, stream))
            allocator.free(block)
        causes += [index] * (len(events) - len(causes))
    return SimulatedHistory(
        history=History(events=tuple(events), segments=allocator.segments(), settings=settings),
        requests=tuple(causes),
        live={block.address: index for block, index in alive.values()},
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        peak_allocated_request=peak_request,
    )
