"""A record of the caching allocator run through the simulator, held against the record after each event.

The simulator gets what a program and a driver decide: requests, streams, frees, and where new segments lie. Everything
else is its own work and is compared: the block that each request gets, what is taken from the driver and given back,
which requests fail, and every segment with its blocks at the end.

How much memory the driver could give is not recorded. Where the record gives segments back or runs out of memory, the
most that was ever reserved stands in for it: a request that would go beyond it while segments are given back found the
card full, so the simulator must give back the same ones by itself; otherwise the program has called `empty_cache`.

Left out, and said in `History.notes`: private pools, garbage collection, the memory fraction. Not known: where the
address range of expandable segments lies that a request made before it failed; what is put there later differs.
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
_FIRST_MADE_UP_ADDRESS = 1 << 60
"""Where segments lie that the simulator takes and the record does not; no device has such addresses."""


def replay_history(history: History, *, capacity_bytes: int | None = None) -> ReplayResult:
    """Run a record through the simulator.

    Args:
        history: what was recorded.
        capacity_bytes: memory that segments could take on the card; None: found as the file's docstring says.

    Raises:
        SnapshotError: when the start cannot be found, as after a gap in the record.
    """
    start = StartState(history)
    return _Replay(history, start, capacity_bytes).run()


def recorded_stream(history: History) -> tuple[np.ndarray, np.ndarray]:
    """Births and deaths in order: int64 arrays of ids and of sizes in bytes (0 for a death), as `replay` takes them.

    Ids count up from 0. What lived before the first event is born first, by ascending address; a request that failed
    is born and dies at once; what lives at the end does not die.
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
    """One record run through one simulator."""

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
        """As recorded, at the event that is looked at."""
        self._change_bytes = 0
        """Of reserved memory since the last comparison, as recorded."""
        self._released: dict[int, int] = {}
        """Sizes of segments given back since the last comparison, as recorded, by address."""
        self._places: list[int] = []
        """Where the record has put memory since the last request."""
        self._placed: set[int] = set()
        """Where the simulator has put segments since the last comparison."""
        self._extents: list[tuple[int, int, tuple[bool, int]]] = []
        """Where the simulator has segments or ranges, and perhaps some that it gave back: start, end and pool."""
        self._made_up_address = _FIRST_MADE_UP_ADDRESS
        self._addresses: list[AddressMismatch] = []
        self._driver: list[DriverMismatch] = []
        self._start = start.segments()
        if capacity_bytes is not None and start.reserved_bytes > capacity_bytes:
            raise SnapshotError(
                f"the record starts with {format_size(start.reserved_bytes)} of segments, "
                f"more than a capacity of {format_size(capacity_bytes)}: give the memory of the card"
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
        """Blocks handed out, by the address that was recorded for them."""

    def run(self) -> ReplayResult:
        while self._index < len(self._events):
            event = self._events[self._index]
            match event.action:
                case Action.ALLOC | Action.OOM:
                    self._request(event)
                case Action.FREE_COMPLETED:
                    block = self._live.pop(event.address, None)  # None where only the simulator ran out of memory
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
        """As recorded; made up where the record has no new segment, or has it where the simulator still has another."""
        address = self._places.pop(0) if self._places else None
        if address is None or self._is_taken(address):
            address = self._made_up_address
            self._made_up_address += size_bytes
        self._placed.add(address)
        self._extents.append((address, address + size_bytes, self._pool()))
        return address

    def _is_taken(self, address: int) -> bool:
        if not self._is_inside(address):
            return False
        there = [(segment.address, (segment.is_small, segment.stream)) for segment in self._allocator.segments()]
        self._extents = [
            (start, end, pool)
            for start, end, pool in self._extents
            if any(start <= at < end and pool == of_pool for at, of_pool in there)
        ]
        return self._is_inside(address)

    def _is_inside(self, address: int) -> bool:
        """Whether the address lies in a known segment, or in a known range of the same pool: others may overlap it."""
        pool = self._pool() if self._history.settings.expandable_segments else None
        return any(start <= address < end and pool in (None, of_pool) for start, end, of_pool in self._extents)

    def _pool(self) -> tuple[bool, int]:
        request = self._events[self._index]
        return round_size(request.size_bytes, self._history.settings) <= LARGEST_SMALL_BYTES, request.stream

    def _exchange(self, change_bytes: int) -> None:
        self._change_bytes += change_bytes
        self._reserved_bytes += change_bytes

    def _give_back(self) -> None:
        """Look at all that is given back at once, and stop at its last event."""
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
        """Whether memory was given back since a request found the card full, and not by the program itself.

        Args:
            following: index of the event after it.
            reserved_bytes: what was reserved before it, as recorded.
        """
        if self._places:  # a part of the request's memory is there, the rest was refused
            return True
        follow = itertools.islice(self._events, following, None)
        request = next((event for event in follow if event.action in (Action.ALLOC, Action.OOM)), None)
        if request is None or self._allocator.is_cached(request.size_bytes, request.stream):
            return False
        if self._history.settings.max_split_size_bytes is not None and self._released == self._free_segments():
            return False  # a request may give back less than all
        event = self._events[following]
        if event.action is Action.OOM:
            return True
        return event.action in _TAKES and reserved_bytes + event.size_bytes > self._capacity_bytes

    def _request(self, event: Event) -> None:
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
        else:  # the record has given everything back and failed all the same
            self._allocator.free(block)
            self._allocator.empty_cache()

    def _compare(self, reserved_bytes: int, before: dict[int, int]) -> None:
        """Hold what the simulator gave back and took since `reserved_bytes` and `before` against the record."""
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
        """Segments that are given back as a whole, by address; none where they are expandable."""
        if self._history.settings.expandable_segments:
            return {}
        return {segment.address: segment.size_bytes for segment in self._allocator.segments()}

    def _free_segments(self) -> dict[int, int]:
        return {
            segment.address: segment.size_bytes
            for segment in self._allocator.segments()
            if len(segment.blocks) == 1 and not segment.blocks[0].is_allocated
        }
