"""Finds the state before the first event of a record: undoes all events, from the last to the first.

A record may start in the middle of a run, because `max_entries` keeps only the latest events. Undoing the events gives
all segments and all live blocks before them. It does not give the size of a block that was freed during the record,
because an event holds the size of the request. In the large pool such a block may be up to 1 MiB larger, which follows
from its neighbours (`_UnseenBlocks`).
"""

from __future__ import annotations

import bisect
import itertools

from planner.allocator.blocks import Segment, SegmentBlock
from planner.allocator.settings import LARGEST_SMALL_BYTES, SMALL_SEGMENT_BYTES, AllocatorSettings, round_size
from planner.errors import SnapshotError
from planner.snapshot.file import Action, Event, History


class StartState:
    """The state before the first event.

    Raises:
        SnapshotError: the events do not lead to the segments at the end, as after a gap in the record.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._segments: dict[int, tuple[int, bool, int]] = {}
        """Size, whether it belongs to the small pool, and stream of each segment, by address."""
        self._live: dict[int, tuple[int | None, int]] = {}
        """Size (None if unknown) and size of the request of each live block, by address."""
        self.reserved_bytes = sum(segment.size_bytes for segment in history.segments)
        for segment in history.segments:
            self._segments[segment.address] = (segment.size_bytes, segment.is_small, segment.stream)
            address = segment.address
            for block in segment.blocks:
                if block.is_allocated:
                    self._live[address] = (block.size_bytes, block.requested_bytes)
                address += block.size_bytes
        for index, event in reversed(tuple(enumerate(history.events))):
            self._undo(index, event)

    @property
    def live(self) -> dict[int, int]:
        """Sizes of the requests of the live blocks, by ascending address."""
        return {address: requested for address, (_, requested) in sorted(self._live.items())}

    def segments(self) -> tuple[Segment, ...]:
        """Returns the segments of fixed size with their blocks, by ascending address.

        Raises:
            SnapshotError: there are expandable segments, whose address ranges are not in a record.
        """
        if self._history.settings.expandable_segments:
            if self.reserved_bytes or self._live:
                raise SnapshotError(
                    "the record starts while expandable segments are in use, which is not simulated: "
                    "begin to record before the first allocation, without max_entries"
                )
            return ()
        unseen = _UnseenBlocks(self._history)
        addresses = sorted(self._live)
        segments, position = [], 0
        for address, (size_bytes, is_small, stream) in sorted(self._segments.items()):
            if address < position:
                raise SnapshotError(f"the segment at {address:#x} overlaps the one before it: {_GAP}")
            position = address + size_bytes
            inside = addresses[bisect.bisect_left(addresses, address) : bisect.bisect_left(addresses, position)]
            blocks = self._blocks(address, position, inside, unseen, is_small=is_small)
            segments.append(Segment(address=address, stream=stream, is_small=is_small, blocks=tuple(blocks)))
        if sum(block.is_allocated for segment in segments for block in segment.blocks) < len(addresses):
            raise SnapshotError(f"a block that is live before the first event is inside no segment: {_GAP}")
        return tuple(segments)

    def _undo(self, index: int, event: Event) -> None:
        """Changes the state to that before the event; raises `SnapshotError` if the event cannot have led to it."""
        fits = True
        match event.action:
            case Action.ALLOC:
                fits = self._live.pop(event.address, None) is not None
            case Action.FREE_COMPLETED:
                fits = event.address not in self._live
                self._live[event.address] = (None, event.size_bytes)
            case Action.SEGMENT_ALLOC:
                size_bytes, _, _ = self._segments.pop(event.address, (0, False, 0))
                fits = size_bytes == event.size_bytes
                self.reserved_bytes -= event.size_bytes
            case Action.SEGMENT_FREE:
                fits = event.address not in self._segments
                is_small = event.size_bytes == SMALL_SEGMENT_BYTES
                self._segments[event.address] = (event.size_bytes, is_small, event.stream)
                self.reserved_bytes += event.size_bytes
            case Action.SEGMENT_MAP:
                self.reserved_bytes -= event.size_bytes
                fits = self.reserved_bytes >= 0
            case Action.SEGMENT_UNMAP:
                self.reserved_bytes += event.size_bytes
        if not fits:
            raise SnapshotError(
                f"event {index} ({event.action.value} at {event.address:#x}) contradicts the events after it: {_GAP}"
            )

    def _blocks(
        self, start: int, end: int, inside: list[int], unseen: _UnseenBlocks, *, is_small: bool
    ) -> list[SegmentBlock]:
        """Returns the blocks of the segment from `start` to `end`. `inside` are the addresses of its live blocks."""
        blocks, position = [], start
        for address, following in itertools.pairwise([*inside, end]):
            if address > position:
                blocks.append(SegmentBlock(size_bytes=address - position, requested_bytes=0, is_allocated=False))
            size_bytes, requested_bytes = self._live[address]
            if size_bytes is None:
                size_bytes = unseen.size_bytes(address, requested_bytes, following, is_small=is_small)
            if address < position or address + size_bytes > following:
                raise SnapshotError(f"the block at {address:#x} overlaps another one before the first event: {_GAP}")
            blocks.append(SegmentBlock(size_bytes=size_bytes, requested_bytes=requested_bytes, is_allocated=True))
            position = address + size_bytes
        if position < end:
            blocks.append(SegmentBlock(size_bytes=end - position, requested_bytes=0, is_allocated=False))
        return blocks


_GAP = "the record has a gap; write the snapshot before recording is switched off, and record all kinds of events"


class _UnseenBlocks:
    """Infers the sizes of blocks that were live before the first event and were freed during the record."""

    def __init__(self, history: History) -> None:
        self._settings: AllocatorSettings = history.settings
        self._first_death: dict[int, int] = {}
        births = []
        for index, event in enumerate(history.events):
            if event.action is Action.ALLOC:
                births.append((event.address, index))
            elif event.action is Action.FREE_COMPLETED:
                self._first_death.setdefault(event.address, index)
        self._births = sorted(births)

    def size_bytes(self, address: int, requested_bytes: int, following: int, *, is_small: bool) -> int:
        """Returns the size of the block at `address`.

        In the large pool it may be up to 1 MiB larger than the rounded request, because such a rest is not split off.

        Args:
            following: Address of the next live block, or end of the segment.
        """
        rounded_bytes = round_size(requested_bytes, self._settings)
        gap_bytes = following - address - rounded_bytes
        if is_small or gap_bytes <= 0:
            return rounded_bytes
        # A gap of at most 1 MiB belongs to the block, because no free block of the large pool is so small. A block
        # above the split limit is a whole segment.
        most_bytes = self._settings.max_split_size_bytes
        if gap_bytes <= LARGEST_SMALL_BYTES or (most_bytes is not None and rounded_bytes >= most_bytes):
            return rounded_bytes + gap_bytes
        # In a longer gap, the first allocation that starts near the block before it is freed shows where the free block
        # after it begins. Without such an allocation the block is taken to have the rounded size.
        first, last = address + rounded_bytes, address + rounded_bytes + LARGEST_SMALL_BYTES
        near = self._births[
            bisect.bisect_left(self._births, (first, 0)) : bisect.bisect_left(self._births, (last + 1, 0))
        ]
        before_death = [(index, start) for start, index in near if index < self._first_death[address]]
        return min(before_death)[1] - address if before_death else rounded_bytes
