"""The requests of a recorded program, and what would have happened to them under other settings.

`read_program` takes requests, frees and calls of `empty_cache` out of a record. `what_if` runs them through the
simulated allocator, perhaps with other settings, another limit, or some requests left out.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from planner.allocator.blocks import Block, Placement, Segment
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.expandable_segments import UNKNOWN_CARD_BYTES
from planner.allocator.out_of_memory import OutOfMemory
from planner.allocator.settings import AllocatorSettings
from planner.snapshot.history import Action, Frame, History
from planner.snapshot.initial_state import StartState


class Kind(enum.Enum):
    """The kinds of actions of a program."""

    REQUEST = "request"
    FREE = "free"
    FAILED = "failed"
    """A request that failed in the record."""
    EMPTY_CACHE = "empty_cache"


class Operation(NamedTuple):
    """One action of the recorded program."""

    kind: Kind
    block: int
    """Number of the block in `Program.blocks`; -1 if there is none."""
    size_bytes: int
    stream: int
    event: int
    """Index of the event; -1 for a block that was alive before the first event."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedBlock:
    """A block that was alive at some moment of the record."""

    address: int
    requested_bytes: int
    born: int
    """Index of the event that allocated it; -1 if it was alive before the first event."""
    freed: int | None
    """Index of the event that freed it; None if it is alive at the end."""
    frames: tuple[Frame, ...] = ()
    """Stack trace of the allocation, innermost frame first; empty if it was not recorded."""
    remark: str = ""
    """The user's metadata."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """All requests and frees of a record, in order."""

    operations: tuple[Operation, ...]
    blocks: tuple[RecordedBlock, ...]
    taken: tuple[int, ...]
    """Addresses of the segments that the allocator took from the driver, in order."""

    def alive_at(self, event: int) -> list[RecordedBlock]:
        """Returns the blocks that are alive right after an event."""
        return [block for block in self.blocks if block.born <= event and (block.freed is None or block.freed > event)]

    def levels(self) -> list[tuple[int, int]]:
        """Returns the requested bytes that are alive after each request and free, as (event, bytes).

        For a request that failed, its size counts at this event.
        """
        found, level = [], 0
        for operation in self.operations:
            if operation.kind is Kind.REQUEST:
                level += operation.size_bytes
            elif operation.kind is Kind.FREE:
                level -= operation.size_bytes
            asked = operation.size_bytes if operation.kind is Kind.FAILED else 0
            found.append((operation.event, level + asked))
        return found


def read_program(history: History, emptied: Collection[int] = ()) -> Program:
    """Returns what the recorded program did.

    Args:
        history: The record.
        emptied: Indices of the events with which the program called `empty_cache`, from `ReplayResult.emptied`.

    Raises:
        SnapshotError: the events contradict each other, because some were not recorded.
    """
    streams = [(segment.address, segment.stream) for segment in history.segments]
    operations: list[Operation] = []
    born: list[tuple[int, int, int]] = []  # address, size and event of each block
    freed: dict[int, int] = {}
    numbers: dict[int, int] = {}
    for address, size_bytes in StartState(history).live.items():
        before = bisect.bisect_right(streams, (address, sys.maxsize)) - 1
        numbers[address] = len(born)
        operations.append(Operation(Kind.REQUEST, len(born), size_bytes, streams[before][1] if before >= 0 else 0, -1))
        born.append((address, size_bytes, -1))
    emptied = set(emptied)
    for index, event in enumerate(history.events):
        number = -1
        match event.action:
            case Action.ALLOC:
                numbers[event.address] = number = len(born)
                born.append((event.address, event.size_bytes, index))
            case Action.FREE_COMPLETED:
                number = numbers.pop(event.address)
                freed[number] = index
        if event.action in _KINDS:
            operations.append(Operation(_KINDS[event.action], number, event.size_bytes, event.stream, index))
        if index in emptied:
            operations.append(Operation(Kind.EMPTY_CACHE, -1, 0, 0, index))
    traces, remarks, at_end = history.sources.traces, history.sources.remarks, history.sources.block_traces
    blocks = [
        RecordedBlock(
            address=address,
            requested_bytes=size_bytes,
            born=event,
            freed=freed.get(number),
            frames=traces[event]
            if 0 <= event < len(traces)
            else at_end.get(address, ())
            if number not in freed
            else (),
            remark=remarks[event] if 0 <= event < len(remarks) else "",
        )
        for number, (address, size_bytes, event) in enumerate(born)
    ]
    taken = tuple(event.address for event in history.events if event.action is Action.SEGMENT_ALLOC)
    return Program(operations=tuple(operations), blocks=tuple(blocks), taken=taken)


_KINDS = {Action.ALLOC: Kind.REQUEST, Action.FREE_COMPLETED: Kind.FREE, Action.OOM: Kind.FAILED}


class Order(enum.Enum):
    """The order of the addresses of new segments. Among free blocks of equal size, the lowest address is taken."""

    RECORDED = "recorded"
    """The addresses of the record, one after the other. If one is in use, the next rising address."""
    RISING = "rising"
    FALLING = "falling"


class _Places:
    """Chooses the addresses of new segments.

    Args:
        taken: Addresses that the recorded program got from the driver, in order.
        order: Order of the addresses after `taken`.
        start: Segments that exist from the beginning.
    """

    def __init__(self, taken: Sequence[int], order: Order, start: Sequence[Segment]) -> None:
        self.exchanges: list[tuple[int, int]] = []
        """Changes of the simulated allocator's memory since the last segment, as (address, bytes)."""
        self._taken = iter(taken)
        self._invent = Placement(descending=order is Order.FALLING)
        self._sizes = {segment.address: segment.size_bytes for segment in start}
        self._addresses = sorted(self._sizes)

    def place(self, size_bytes: int) -> int:
        """Returns the address of a new segment."""
        for address, change_bytes in self.exchanges:
            if change_bytes > 0:
                self._sizes[address] = change_bytes
                bisect.insort(self._addresses, address)
            else:
                del self._sizes[address], self._addresses[bisect.bisect_left(self._addresses, address)]
        self.exchanges.clear()
        recorded = next(self._taken, None)
        if recorded is None or not self._is_free(recorded, size_bytes):
            return _INVENTED + self._invent(size_bytes)
        return recorded

    def _is_free(self, address: int, size_bytes: int) -> bool:
        """True if no segment overlaps the addresses."""
        after = bisect.bisect_left(self._addresses, address)
        if after < len(self._addresses) and self._addresses[after] < address + size_bytes:
            return False
        before = self._addresses[after - 1] if after else None
        return before is None or before + self._sizes[before] <= address


_INVENTED = 1 << 60
"""Number added to invented addresses, so that they are above all addresses in a record."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a replay under other circumstances."""

    failed_event: int | None
    """Index of the event whose request did not fit; None if all fit."""
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    retries: int
    """Number of requests for which the card was full, so that all free segments were released."""


def what_if(
    program: Program,
    settings: AllocatorSettings,
    limit_bytes: int | None,
    *,
    until: int,
    start: Sequence[Segment] = (),
    order: Order = Order.RECORDED,
    empty_at: Collection[int] = (),
    sizes: Mapping[int, int] | None = None,
    asked_bytes: int | None = None,
) -> Outcome:
    """Runs the program up to and including the event `until` through the simulated allocator.

    Args:
        program: What the program did.
        settings: Options of the allocator.
        limit_bytes: Maximum reserved memory; None for no limit.
        until: Index of the last event.
        start: Segments before the first event. If empty, or with expandable segments, blocks that were alive before
            the first event are requested anew, by ascending address.
        order: Order of the addresses of new segments.
        empty_at: Indices of events after which `empty_cache` is called in addition.
        sizes: Other sizes in bytes for some blocks, by their numbers; 0 leaves a block out.
        asked_bytes: Another size for the request that failed at `until`; 0 leaves it out.
    """
    places = _Places(
        program.taken if order is Order.RECORDED and not settings.expandable_segments else (), order, start
    )
    allocator = CachingAllocator(settings, limit_bytes, place=places.place, card_bytes=UNKNOWN_CARD_BYTES)
    if not settings.expandable_segments:  # The address ranges of expandable segments are never in each other's way.
        places.exchanges = allocator.record_exchanges()
    sizes = sizes or {}
    empty_at = set(empty_at)
    live: dict[int, Block] = {}
    adopted: dict[int, Block] = {}
    if start and not settings.expandable_segments:
        if limit_bytes is not None and sum(segment.size_bytes for segment in start) > limit_bytes:
            return _outcome(allocator, -1)
        adopted = allocator.adopt(start)
    for kind, number, size_bytes, stream, event in program.operations:
        if event > until:
            break
        try:
            if kind is Kind.REQUEST:
                if event < 0 and (block := adopted.get(program.blocks[number].address)) is not None:
                    live[number] = block
                elif size_bytes := sizes.get(number, size_bytes):
                    live[number] = allocator.malloc(size_bytes, stream)
                if event < 0 and sizes.get(number) == 0 and number in live:
                    allocator.free(live.pop(number))
            elif kind is Kind.FREE:
                if (freed := live.pop(number, None)) is not None:
                    allocator.free(freed)
            elif kind is Kind.EMPTY_CACHE:
                allocator.empty_cache()
            elif event == until:
                size_bytes = size_bytes if asked_bytes is None else asked_bytes
                if size_bytes:
                    allocator.malloc(size_bytes, stream)
            else:
                _try(allocator, size_bytes, stream)
        except OutOfMemory:
            return _outcome(allocator, event)
        if event in empty_at:
            allocator.empty_cache()
    return _outcome(allocator, None)


def _try(allocator: CachingAllocator, size_bytes: int, stream: int) -> None:
    """Makes a request whose failure the recorded program survived."""
    try:
        allocator.free(allocator.malloc(size_bytes, stream))
    except OutOfMemory:
        return


def _outcome(allocator: CachingAllocator, failed_event: int | None) -> Outcome:
    return Outcome(
        failed_event=failed_event,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        retries=allocator.retries,
    )
