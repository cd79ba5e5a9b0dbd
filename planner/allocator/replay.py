"""Runs a sequence of allocations and frees through an empty simulated allocator, and reports the peaks of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from planner.allocator.blocks import Block, Placement
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.out_of_memory import OutOfMemory, OutOfMemoryReport
from planner.allocator.settings import AllocatorSettings
from planner.allocator.state import capture
from planner.allocator.trials import WorkspaceTrials
from planner.workspaces.registry import Trials

if TYPE_CHECKING:
    import numpy


_MOST_ROUNDS = 16
"""Maximum number of times that the last events are repeated."""


@dataclasses.dataclass(frozen=True)
class Round:
    """The last events of a sequence, which repeat after its end, such as those of a training step."""

    start: int
    """Index of the first event of the round."""
    succeeds: Mapping[int, int]
    """Maps each storage that is alive after a round to the number under which the next round may free it. The events of
    a round free what earlier rounds kept, so a kept storage takes the number of its predecessor."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllocatorOutcome:
    """The result of `replay`: peaks of memory, the request that did not fit, if any, and the state at the end."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_requested_bytes: int
    peak_allocated_event: int | None
    """Index of the first event at which `peak_allocated_bytes` was reached; None if no allocation succeeded."""
    out_of_memory_event: int | None
    """Index of the allocation that did not fit, at which the replay stopped; None if everything fit."""
    out_of_memory: OutOfMemoryReport | None
    """Report on the allocation that did not fit; None if everything fit."""
    final_allocated_bytes: int
    final_reserved_bytes: int
    final_fragments: int
    """Number of fragments at the end: free blocks in segments that also hold an allocated block.

    `empty_cache` does not release them, except for entirely free pages of expandable segments.
    """
    final_fragment_bytes: int
    """Total size of the fragments at the end."""
    retries: int
    """Number of requests for which all free segments were released (`num_alloc_retries` in PyTorch)."""
    taken: Mapping[int, int]
    """Bytes of each storage that got another size than the first one that was tried."""
    searched: Mapping[int, int]
    """Bytes of the block in which algorithms were tried out, for each storage for which PyTorch did so."""


def replay(
    events: Sequence[tuple[int, int]] | numpy.ndarray | tuple[numpy.ndarray, numpy.ndarray],
    settings: AllocatorSettings,
    capacity_bytes: int | None,
    *,
    card_bytes: int | None = None,
    descending: bool = False,
    streams: Mapping[int, int] = MappingProxyType({}),
    trials: Mapping[int, Trials] = MappingProxyType({}),
    last_round: Round | None = None,
) -> AllocatorOutcome:
    """Runs allocations and frees of storages through an empty simulated allocator.

    Args:
        events: Pairs (number of a storage, size in bytes), as a sequence, an int64 array of shape (n, 2), or a tuple of
            two int64 arrays of length n. A size above 0 allocates the storage. A size of 0 or less frees the storage.
            If the storage is not alive, a size of 0 has no effect, because it stands for an empty storage. The number
            of a storage may be reused after it is freed.
        settings: Options of the allocator.
        capacity_bytes: Maximum memory of all segments together. None means no limit.
        card_bytes: Total memory of the card, which determines the length of expandable segments' address ranges. None
            means `capacity_bytes`.
        descending: True if each new segment lies below the segment before it, False if above. Among free blocks of
            equal size the one at the lowest address is taken, so the order decides which segments are split.
        streams: The CUDA stream of each storage that is not allocated in the default stream.
        trials: What is tried for a storage that does not fit, for those storages for which something else is tried.
        last_round: The events at the end that are repeated, until the allocator is in a state that it had at the end of
            an earlier round, but at most 16 times. Each round may find free memory divided into other blocks, so that a
            later round may need more segments. None to run each event once.

    Returns:
        The peaks and the final state, with the repeated rounds. The index of an event in a repeated round is that of
        the event in `events`. A request that does not fit ends the replay, and is reported in the result.

    Raises:
        ValueError: a storage is allocated while it is alive, or freed with a negative size while it is not alive.
    """
    place = Placement(descending=descending)
    allocator = CachingAllocator(settings, capacity_bytes, place=place, card_bytes=card_bytes)
    workspaces = WorkspaceTrials(trials)
    alive: dict[int, Block] = {}
    peak_event = failure = failed_event = None
    peak_bytes = 0
    for index, (storage, size_bytes) in _in_rounds(list(_pairs(events)), last_round, allocator, alive):
        if size_bytes > 0:
            if storage in alive:
                raise ValueError(
                    f"event {index} allocates storage {storage}, which is already allocated: free it in an earlier "
                    "event, or use another number"
                )
            try:
                block = workspaces.malloc(allocator, storage, size_bytes, streams.get(storage, 0))
            except OutOfMemory as error:
                failure, failed_event = error.report, index
                break
            if block is not None:
                alive[storage] = block
            if allocator.peak_allocated_bytes > peak_bytes:
                peak_bytes, peak_event = allocator.peak_allocated_bytes, index
        elif storage in alive:
            allocator.free(alive.pop(storage))
        elif size_bytes < 0:
            raise ValueError(
                f"event {index} frees storage {storage}, which is not allocated: allocate it in an earlier event"
            )
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
        taken=workspaces.taken,
        searched=workspaces.searched,
    )


def _in_rounds(
    events: list[tuple[int, int]], last_round: Round | None, allocator: CachingAllocator, alive: dict[int, Block]
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yields the events with their indices, and then those of the last round again, as `replay` says.

    Args:
        alive: the blocks of the allocated storages. At the end of each round, the storages that it keeps are renumbered
            by `last_round.succeeds`.
    """
    if last_round is None:
        yield from enumerate(events)
        return
    start, succeeds = last_round.start, last_round.succeeds
    followed = {storage for storage, size_bytes in events[start:] if size_bytes <= 0} | set(succeeds.values())
    seen: set[tuple[object, ...]] = set()
    yield from enumerate(events[:start])
    for _ in range(1 + _MOST_ROUNDS):
        seen.add(_state(allocator, alive, followed))
        yield from enumerate(events[start:], start)
        alive.update([(number, alive.pop(kept)) for kept, number in succeeds.items() if kept in alive])
        if _state(allocator, alive, followed) in seen:
            return


def _state(allocator: CachingAllocator, alive: dict[int, Block], followed: Collection[int]) -> tuple[object, ...]:
    """Returns the segments in the order of their addresses, with the blocks of the storages `followed` marked.

    Addresses are left out, because only their order has an effect: a segment that is released and allocated again in
    each round has another address each time.
    """
    state = capture(allocator, {block.address: number for number, block in alive.items() if number in followed})
    return tuple(segment[1:] for segment in state.segments)


def _pairs(events: Any) -> Iterable[tuple[int, int]]:
    """Returns the events as pairs of Python ints, because arithmetic on numpy scalars is many times slower."""
    pairs: Iterable[tuple[int, int]] = events
    if hasattr(events, "tolist"):
        pairs = events.tolist()
    elif isinstance(events, tuple) and len(events) == 2 and all(hasattr(part, "tolist") for part in events):
        pairs = zip(events[0].tolist(), events[1].tolist(), strict=True)
    return pairs
