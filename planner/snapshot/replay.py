"""Runs a record of the caching allocator through the simulator, and compares both after each event.

The simulator is given the decisions of the program and the driver: requests, streams, frees, and the addresses of new
segments. It computes everything else, which is compared with the record: the block that each request gets, the memory
that is taken from the driver and released, the requests that fail, and all segments with their blocks at the end.

A record does not hold the memory that the driver could give. If the record releases segments or runs out of memory, the
maximum of the reserved bytes stands in for it. When segments are released, there are two cases: if the next request
would exceed that maximum, it found the card full, and the simulator must release the same segments when it gets that
request; otherwise the program called `empty_cache`, and so does the replay.

Where it stops being exact: private pools, garbage collection and the memory fraction are not simulated, which
`History.notes` says. If a request creates the address range of an expandable segment and then fails, the address of
that range is not in the record, so later segments in it differ.
"""

from __future__ import annotations

import itertools

import numpy as np

from planner.allocator.blocks import Block
from planner.allocator.caching_allocator import CachingAllocator, OutOfMemory
from planner.allocator.expandable_segments import UNKNOWN_CARD_BYTES
from planner.allocator.settings import LARGEST_SMALL_BYTES, round_size
from planner.errors import SnapshotError
from planner.plan_types.sizes import format_size
from planner.snapshot.file import Action, Event, History
from planner.snapshot.initial_state import StartState
from planner.snapshot.result import AddressMismatch, Counts, DriverMismatch, Levels, ReplayResult, pair_segments

_TAKES = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
_GIVES_BACK = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
_FIRST_SYNTHETIC_ADDRESS = 1 << 60
"""First address of segments that only the simulator allocates. No device has such addresses."""


def replay_history(history: History, *, capacity_bytes: int | None = None) -> ReplayResult:
    """Runs a record through the simulator and compares both.

    Args:
        history: The record.
        capacity_bytes: Memory that segments could take on the card. If None, it is inferred as described at the top of
        this module.

    Raises:
        SnapshotError: the state before the record cannot be found, as after a gap in the record.
    """
    start = StartState(history)
    return _Replay(history, start, capacity_bytes).run()


def recorded_stream(history: History) -> tuple[np.ndarray, np.ndarray]:
    """Returns the allocations and frees of a record in the form that `planner.allocator.replay.replay` takes.

    These are int64 arrays of block ids, which count up from 0, and of sizes in bytes (0 for a free). Blocks that were
    live before the first event are allocated first, by ascending address. A request that failed is allocated and freed
    at once. Blocks that are live at the end are not freed.
    """
    pairs: list[tuple[int, int]] = []
    ids: dict[int, int] = {}
    lives = 0
    for address, size_bytes in StartState(history).live.items():
        ids[address] = lives
        pairs.append((lives, size_bytes))
        lives += 1
    for event in history.events:
        if event.action is Action.ALLOC:
            ids[event.address] = lives
            pairs.append((lives, event.size_bytes))
            lives += 1
        elif event.action is Action.FREE_COMPLETED:
            pairs.append((ids.pop(event.address), 0))
        elif event.action is Action.OOM:
            pairs += [(lives, event.size_bytes), (lives, 0)]
            lives += 1
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _recorded_levels(history: History, start: StartState) -> Levels:
    """Returns the peaks and the final levels of a record."""
    requested_bytes, reserved_bytes = sum(start.live.values()), start.reserved_bytes
    peak_requested_bytes, peak_reserved_bytes = requested_bytes, reserved_bytes
    for event in history.events:
        match event.action:
            case Action.ALLOC:
                requested_bytes += event.size_bytes
            case Action.FREE_COMPLETED:
                requested_bytes -= event.size_bytes
            case Action.SEGMENT_ALLOC | Action.SEGMENT_MAP:
                reserved_bytes += event.size_bytes
            case Action.SEGMENT_FREE | Action.SEGMENT_UNMAP:
                reserved_bytes -= event.size_bytes
        peak_requested_bytes = max(peak_requested_bytes, requested_bytes)
        peak_reserved_bytes = max(peak_reserved_bytes, reserved_bytes)
    blocks = [block for segment in history.segments for block in segment.blocks]
    return Levels(
        peak_requested_bytes=peak_requested_bytes,
        peak_allocated_bytes=None,
        peak_reserved_bytes=peak_reserved_bytes,
        final_allocated_bytes=sum(block.size_bytes for block in blocks if block.is_allocated),
        final_reserved_bytes=sum(block.size_bytes for block in blocks),
    )


def _counts(history: History) -> Counts:
    """Counts the events of a record."""
    actions = [event.action for event in history.events]
    return Counts(
        allocations=actions.count(Action.ALLOC),
        failed_requests=actions.count(Action.OOM),
        taken=sum(actions.count(action) for action in _TAKES),
        given_back=sum(actions.count(action) for action in _GIVES_BACK),
    )


class _Replay:
    """The state of one comparison: the position in the record, the simulator, and the differences so far."""

    def __init__(self, history: History, start: StartState, capacity_bytes: int | None) -> None:
        self._events = history.events
        self._history = history
        self._index = 0
        self._recorded = _recorded_levels(history, start)
        is_full = any(event.action in (*_GIVES_BACK, Action.OOM) for event in history.events)
        is_given = capacity_bytes is not None
        if not is_given and is_full:
            capacity_bytes = self._recorded.peak_reserved_bytes
        self._capacity_bytes = capacity_bytes
        self._reserved_bytes = start.reserved_bytes
        """Recorded reserved memory at the current event."""
        self._change_bytes = 0
        """Recorded change of reserved memory since the last comparison."""
        self._released: dict[int, int] = {}
        """Sizes by address of the segments that the record has released since the last comparison."""
        self._places: list[int] = []
        """Addresses at which the record has new memory since the last request."""
        self._placed: set[int] = set()
        """Addresses at which the simulator has placed segments since the last comparison."""
        self._extents: list[tuple[int, int, tuple[bool, int]]] = []
        """Start, end and pool of the simulator's segments or ranges, perhaps with some that were released."""
        self._synthetic_address = _FIRST_SYNTHETIC_ADDRESS
        self._addresses: list[AddressMismatch] = []
        self._driver: list[DriverMismatch] = []
        self._start = start.segments()
        if capacity_bytes is not None and start.reserved_bytes > capacity_bytes:
            raise SnapshotError(
                f"the record starts with {format_size(start.reserved_bytes)} of segments, "
                f"which is more than the capacity of {format_size(capacity_bytes)}: give the memory of the card"
            )
        self._allocator = CachingAllocator(
            history.settings,
            capacity_bytes,
            place=self._place,
            card_bytes=capacity_bytes if is_given else UNKNOWN_CARD_BYTES,
        )
        for segment in self._start:
            end = segment.address + segment.size_bytes
            self._extents.append((segment.address, end, (segment.is_small, segment.stream)))
        self._live: dict[int, Block] = self._allocator.adopt(self._start)
        """Allocated blocks of the simulator, by the recorded address."""

    def run(self) -> ReplayResult:
        """Runs all events and returns the comparison."""
        while self._index < len(self._events):
            event = self._events[self._index]
            match event.action:
                case Action.ALLOC | Action.OOM:
                    self._request(event)
                case Action.FREE_COMPLETED:
                    block = self._live.pop(event.address, None)  # None if only the simulator ran out of memory.
                    if block is not None:
                        self._allocator.free(block)
                case Action.SEGMENT_ALLOC | Action.SEGMENT_MAP:
                    self._places.append(event.address)
                    self._exchange(event.size_bytes)
                case Action.SEGMENT_FREE | Action.SEGMENT_UNMAP:
                    self._give_back()
            self._index += 1
        if self._change_bytes or self._released:
            self._compare(self._allocator.reserved_bytes, self._fixed_segments())
        return self._result()

    def _result(self) -> ReplayResult:
        """Returns the comparison after the last event."""
        allocator = self._allocator
        return ReplayResult(
            counts=_counts(self._history),
            addresses=tuple(self._addresses),
            driver=tuple(self._driver),
            recorded=self._recorded,
            simulated=Levels(
                peak_requested_bytes=allocator.peak_requested_bytes,
                peak_allocated_bytes=allocator.peak_allocated_bytes,
                peak_reserved_bytes=allocator.peak_reserved_bytes,
                final_allocated_bytes=allocator.allocated_bytes,
                final_reserved_bytes=allocator.reserved_bytes,
            ),
            segments=pair_segments(self._history.segments, allocator.segments()),
            retries=allocator.retries,
            starts_empty=not self._start,
            capacity_bytes=self._capacity_bytes,
        )

    def _place(self, size_bytes: int) -> int:
        """Returns the address of a new segment.

        It is the recorded one, or a synthetic one if the record has no new segment, or if the simulator still has
        another segment at that address.
        """
        address = self._places.pop(0) if self._places else None
        if address is None or self._is_taken(address):
            address = self._synthetic_address
            self._synthetic_address += size_bytes
        self._placed.add(address)
        self._extents.append((address, address + size_bytes, self._pool()))
        return address

    def _is_taken(self, address: int) -> bool:
        """True if the simulator has a segment at the address."""
        if not self._is_inside(address):
            return False
        # The extents may contain segments that were released. Only now is it worth the time to remove them.
        existing = [(segment.address, (segment.is_small, segment.stream)) for segment in self._allocator.segments()]
        self._extents = [
            (start, end, pool)
            for start, end, pool in self._extents
            if any(start <= at < end and pool == of_pool for at, of_pool in existing)
        ]
        return self._is_inside(address)

    def _is_inside(self, address: int) -> bool:
        """True if the address is inside a known segment, or inside a known range of the same pool.

        Ranges of other pools may overlap it, because the record does not show their true length.
        """
        pool = self._pool() if self._history.settings.expandable_segments else None
        return any(start <= address < end and pool in (None, of_pool) for start, end, of_pool in self._extents)

    def _pool(self) -> tuple[bool, int]:
        """Returns the pool (whether it is small, and the stream) of the current request."""
        request = self._events[self._index]
        return round_size(request.size_bytes, self._history.settings) <= LARGEST_SMALL_BYTES, request.stream

    def _exchange(self, change_bytes: int) -> None:
        """Notes that the record took memory from the driver (positive) or released it (negative)."""
        self._change_bytes += change_bytes
        self._reserved_bytes += change_bytes

    def _give_back(self) -> None:
        """Handles a group of consecutive releases, and leaves the index at the last of them."""
        recorded_bytes = self._reserved_bytes
        while True:
            event = self._events[self._index]
            if event.action is Action.SEGMENT_FREE:
                self._released[event.address] = event.size_bytes
            self._exchange(-event.size_bytes)
            following = self._index + 1
            if following == len(self._events) or self._events[following].action not in _GIVES_BACK:
                break
            self._index = following
        if not self._is_for_a_request(following, recorded_bytes):
            before, reserved_bytes = self._fixed_segments(), self._allocator.reserved_bytes
            self._allocator.empty_cache()
            self._compare(reserved_bytes, before)

    def _is_for_a_request(self, following: int, reserved_bytes: int) -> bool:
        """True if memory was released because a request found the card full, and not by the program itself.

        Args:
            following: Index of the event after the releases.
            reserved_bytes: Recorded reserved memory before the releases.
        """
        if self._places:  # A part of the memory for the request was mapped before the rest was refused.
            return True
        follow = itertools.islice(self._events, following, None)
        request = next((event for event in follow if event.action in (Action.ALLOC, Action.OOM)), None)
        if request is None or self._allocator.is_cached(request.size_bytes, request.stream):
            return False
        if self._history.settings.max_split_size_bytes is not None and self._released == self._free_segments():
            return False  # `empty_cache` releases all free segments; with a split limit a request may release fewer.
        event = self._events[following]
        if event.action is Action.OOM:
            return True
        assert self._capacity_bytes is not None  # A record with releases has a capacity, given or inferred.
        return event.action in _TAKES and reserved_bytes + event.size_bytes > self._capacity_bytes

    def _request(self, event: Event) -> None:
        """Makes the request in the simulator, and compares the outcome."""
        before = self._fixed_segments() if self._released else {}
        reserved_bytes = self._allocator.reserved_bytes
        try:
            block = self._allocator.malloc(event.size_bytes, event.stream)
        except OutOfMemory:
            block = None
        self._compare(reserved_bytes, before)
        self._places = []
        recorded_address = event.address if event.action is Action.ALLOC else None
        simulated_address = None if block is None else block.address
        if recorded_address != simulated_address:
            self._addresses.append(
                AddressMismatch(
                    at_event=self._index,
                    size_bytes=event.size_bytes,
                    stream=event.stream,
                    recorded_address=recorded_address,
                    simulated_address=simulated_address,
                )
            )
        if block is None:
            return
        if event.action is Action.ALLOC:
            self._live[event.address] = block
        else:  # In the record the request failed after everything was released, so the simulator does the same.
            self._allocator.free(block)
            self._allocator.empty_cache()

    def _compare(self, reserved_bytes: int, before: dict[int, int]) -> None:
        """Compares what the simulator took and released with the record, since the last comparison.

        Args:
            reserved_bytes: Reserved memory of the simulator at the last comparison.
            before: Segments of the simulator at the last comparison; empty if none can have been released.
        """
        kept = self._fixed_segments().keys() - self._placed if before else set()
        released = {address: size for address, size in before.items() if address not in kept}
        change_bytes = self._allocator.reserved_bytes - reserved_bytes
        if change_bytes != self._change_bytes or released != self._released:
            self._driver.append(
                DriverMismatch(
                    at_event=min(self._index, len(self._events) - 1),
                    recorded_change_bytes=self._change_bytes,
                    simulated_change_bytes=change_bytes,
                    only_recorded=tuple(sorted(self._released.keys() - released.keys())),
                    only_simulated=tuple(sorted(released.keys() - self._released.keys())),
                )
            )
        self._change_bytes, self._released, self._placed = 0, {}, set()

    def _fixed_segments(self) -> dict[int, int]:
        """Returns the sizes of all segments by address; empty if segments are expandable, and so released in parts."""
        if self._history.settings.expandable_segments:
            return {}
        return {segment.address: segment.size_bytes for segment in self._allocator.segments()}

    def _free_segments(self) -> dict[int, int]:
        """Returns the sizes of the segments without an allocated block, by address."""
        return {
            segment.address: segment.size_bytes
            for segment in self._allocator.segments()
            if len(segment.blocks) == 1 and not segment.blocks[0].is_allocated
        }
