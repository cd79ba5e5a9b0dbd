"""Runs a record of the caching allocator through the simulator, and compares the simulation with the record.

The simulator receives the decisions of the program and the driver from the record: requests, streams, frees, and the
addresses of new segments. It computes everything else, and this is compared with the record: the address that each
request gets, the memory that is taken from the driver and released, the requests that fail, and all segments with their
blocks at the end.

The capacity is the memory that segments could take on the card. A record does not hold it. If segments are released or
a request fails in the record, the capacity is assumed to be the largest amount of memory that was ever reserved;
otherwise no limit is assumed.

The record may release segments for two reasons. If the next request would exceed the capacity, the allocator found the
card full, and the simulator must release the same segments when it receives that request. Otherwise the program called
`empty_cache`, and the replay calls it as well.

The simulation is not exact in these cases. Private pools, garbage collection and the memory fraction are not simulated;
`History.notes` names those that the record contains. If a request creates the address range of an expandable segment
and then fails, the address of that range is not in the record, so the addresses of later pages in it differ.
"""

from __future__ import annotations

import itertools

import numpy as np

from planner.allocator.blocks import Block, Segment
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.expandable_segments import UNKNOWN_CARD_BYTES
from planner.allocator.out_of_memory import OutOfMemory
from planner.allocator.settings import LARGEST_SMALL_BYTES, round_size
from planner.errors import SnapshotError
from planner.plan_types.sizes import format_size
from planner.snapshot.history import Action, Event, History
from planner.snapshot.initial_state import StartState
from planner.snapshot.result import AddressMismatch, Counts, DriverMismatch, Levels, ReplayResult, pair_segments

_TAKES = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
_GIVES_BACK = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
_FIRST_SYNTHETIC_ADDRESS = 1 << 60
"""Address of the first segment that the simulator allocates where the allocator record (the events that a GPU
recorded) has no such allocation. It is above all addresses of devices."""


def replay_history(history: History, *, capacity_bytes: int | None = None, look_at: int | None = None) -> ReplayResult:
    """Runs a record through the simulator, and returns the comparison of the simulation with the record.

    Args:
        history: The record.
        capacity_bytes: Memory that segments could take on the card. If None, it is inferred as described at the top of
            this module.
        look_at: Index of an event. The result then has the segments of the simulator right after it.

    Raises:
        SnapshotError: the state before the first event cannot be found, because events are missing in the record, or it
            does not fit in the capacity.
    """
    start = StartState(history)
    return _Replay(history, start, capacity_bytes).run(look_at)


def recorded_stream(history: History) -> tuple[np.ndarray, np.ndarray]:
    """Returns the allocations and frees of a record in the form that `planner.allocator.replay.replay` takes.

    Blocks that were live before the first event are allocated first, by ascending address. A request that failed
    becomes an allocation that is freed at once. Blocks that are live at the end are not freed.

    Returns:
        Two int64 arrays of equal length: the numbers of the blocks, counted from 0, and the requested sizes in bytes (0
        for a free).

    Raises:
        SnapshotError: the state before the first event cannot be found, because events are missing in the record.
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
    """Returns the peaks of memory in a record, and the memory at its end."""
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
    actions = [event.action for event in history.events]
    return Counts(
        allocations=actions.count(Action.ALLOC),
        failed_requests=actions.count(Action.OOM),
        taken=sum(actions.count(action) for action in _TAKES),
        given_back=sum(actions.count(action) for action in _GIVES_BACK),
    )


class _Replay:
    """Runs one record through the simulator. It holds the position in the record, the simulator, and the differences.

    Exchanges with the driver are compared at each request and at each `empty_cache`. Below, "the last comparison" is
    the last time that this happened.
    """

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
        """Memory that is reserved in the record at the current event."""
        self._change_bytes = 0
        """Change of the memory that is reserved in the record, since the last comparison."""
        self._released: dict[int, int] = {}
        """Maps the address of each segment that the record has released since the last comparison to its size."""
        self._places: list[int] = []
        """Addresses at which the record has taken memory from the driver since the last request."""
        self._placed: set[int] = set()
        """Addresses at which the simulator has placed segments since the last comparison."""
        self._extents: list[tuple[int, int, tuple[bool, int]]] = []
        """Start, end and pool of each segment or address range of the simulator. Some may have been released since."""
        self._synthetic_address = _FIRST_SYNTHETIC_ADDRESS
        self._addresses: list[AddressMismatch] = []
        self._driver: list[DriverMismatch] = []
        self._emptied: list[int] = []
        """Indices of the last releases of each `empty_cache` of the program."""
        self._looked_at: tuple[Segment, ...] | None = None
        self._start = start.segments()
        if capacity_bytes is not None and start.reserved_bytes > capacity_bytes:
            raise SnapshotError(
                f"the record starts with {format_size(start.reserved_bytes)} of reserved memory, which is more than "
                f"the capacity of {format_size(capacity_bytes)}: give the memory of the card with --capacity"
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
        """Maps the recorded address of each allocated block to the block of the simulator."""

    def run(self, look_at: int | None = None) -> ReplayResult:
        """Runs all events of the record through the simulator, and returns the comparison."""
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
                    self._run_releases()
            if look_at is not None and self._looked_at is None and self._index >= look_at:
                self._looked_at = self._allocator.segments()
            self._index += 1
        if self._change_bytes or self._released:
            self._compare(self._allocator.reserved_bytes, self._fixed_segments())
        return self._result()

    def _result(self) -> ReplayResult:
        """Returns the comparison. All events must have been run."""
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
            start=self._start,
            emptied=tuple(self._emptied),
            looked_at=self._looked_at,
        )

    def _place(self, size_bytes: int) -> int:
        """Returns the address for a new segment of the simulator.

        This is the recorded address. If the record has no new segment here, or if the simulator still has another
        segment at that address, it is an invented address.
        """
        address = self._places.pop(0) if self._places else None
        if address is None or self._is_taken(address):
            address = self._synthetic_address
            self._synthetic_address += size_bytes
        self._placed.add(address)
        self._extents.append((address, address + size_bytes, self._pool()))
        return address

    def _is_taken(self, address: int) -> bool:
        """True if the simulator has a segment or address range that contains the address."""
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
        """True if one of `self._extents` contains the address, perhaps one that was released.

        With expandable segments, only address ranges of the current request's pool count: the record does not show how
        long the ranges are, so simulated ranges of other pools may overlap the address.
        """
        pool = self._pool() if self._history.settings.expandable_segments else None
        return any(start <= address < end and pool in (None, of_pool) for start, end, of_pool in self._extents)

    def _pool(self) -> tuple[bool, int]:
        """Returns the pool of the current request, as a pair: True for a small pool, and the stream."""
        request = self._events[self._index]
        return round_size(request.size_bytes, self._history.settings) <= LARGEST_SMALL_BYTES, request.stream

    def _exchange(self, change_bytes: int) -> None:
        """Counts memory, in bytes, that the record took from the driver (positive) or released (negative)."""
        self._change_bytes += change_bytes
        self._reserved_bytes += change_bytes

    def _run_releases(self) -> None:
        """Handles all consecutive release events from the current one on, and moves `self._index` to the last of them.

        If the program released the memory, the simulator's cache is emptied, too. If a request released it, nothing
        more is done here, because the simulator then releases the memory in `_request`.
        """
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
            self._emptied.append(self._index)
            self._compare(reserved_bytes, before)

    def _is_for_a_request(self, following: int, reserved_bytes: int) -> bool:
        """True if the allocator released memory because a request found the card full; False if the program did.

        Args:
            following: Index of the event after the releases.
            reserved_bytes: Memory that was reserved in the record before the releases.
        """
        if self._places:  # Some pages for the request were mapped before the driver refused the next ones.
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
        """Makes a recorded request in the simulator, and compares the address and the exchanges with the driver."""
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
        """Compares the memory that the simulator and the record took and released since the last comparison.

        A difference is added to `self._driver`.

        Args:
            reserved_bytes: Memory that was reserved in the simulator at the last comparison.
            before: Sizes of the simulator's segments at the last comparison, by address. Empty if the simulator cannot
                have released any.
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
        """Maps the address of each segment of the simulator to its size.

        The result is empty for expandable segments, because these are released page by page.
        """
        if self._history.settings.expandable_segments:
            return {}
        return {segment.address: segment.size_bytes for segment in self._allocator.segments()}

    def _free_segments(self) -> dict[int, int]:
        """Maps the address of each segment of the simulator without an allocated block to its size."""
        return {
            segment.address: segment.size_bytes
            for segment in self._allocator.segments()
            if len(segment.blocks) == 1 and not segment.blocks[0].is_allocated
        }
