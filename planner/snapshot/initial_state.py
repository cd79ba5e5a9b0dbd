"""The state before the first event of a record, by undoing all events from the state at the end.

A record may start in the middle of a run (`max_entries` keeps the latest events only). Undoing gives every segment and
every live block before it. What it does not give is the size of a block that died during the record, since events tell
requests: in the large pool it may hold up to 1 MiB more, which the neighbours show.
"""

from __future__ import annotations

import bisect
import itertools

from planner.allocator.blocks import Segment, SegmentBlock
from planner.allocator.settings import LARGEST_SMALL_BYTES, SMALL_SEGMENT_BYTES, AllocatorSettings, round_size
from planner.errors import SnapshotError
from planner.snapshot.file import Action, Event, History


class StartState:
    """What was there before the first event.

    Raises:
        SnapshotError: when the events do not lead to the segments at the end, as after a gap in the record.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._segments: dict[int, tuple[int, bool, int]] = {}
        """Size, whether of the small pool, and stream of each segment, by address."""
        self._live: dict[int, tuple[int | None, int]] = {}
        """Size (None: not known) and request of each live block, by address."""
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
        """Requests of the live blocks by ascending address."""
        return {address: requested for address, (_, requested) in sorted(self._live.items())}

    def segments(self) -> tuple[Segment, ...]:
        """Segments of fixed size with their blocks, by ascending address.

        Raises:
            SnapshotError: for expandable segments, whose address ranges a record does not tell.
        """
        if self._history.settings.expandable_segments:
            if self.reserved_bytes or self._live:
                raise SnapshotError(
                    "the record starts with expandable segments that are in use, which is not simulated: "
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
            raise SnapshotError(f"a block that is live before the first event is in no segment: {_GAP}")
        return tuple(segments)

    def _undo(self, index: int, event: Event) -> None:
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
                f"event {index} ({event.action.value} at {event.address:#x}) does not lead to what follows it: {_GAP}"
            )

    def _blocks(
        self, start: int, end: int, inside: list[int], unseen: _UnseenBlocks, *, is_small: bool
    ) -> list[SegmentBlock]:
        """Blocks of one segment; `inside`: addresses of its live ones."""
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


_GAP = "the record has a gap, make the snapshot before recording is switched off and record every action"


class _UnseenBlocks:
    """Sizes of blocks that were live before the first event and died during the record."""

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
        """Size of the block at `address`; `following`: address of the next live block, or end of the segment.

        In the large pool it may hold up to 1 MiB more than the rounded request. A gap of at most 1 MiB before the next
        live block is such a rest, since no free block of that pool is so small; in a longer gap, the first allocation
        that starts near the block, before it dies, shows where the free block after it begins. A block above the split
        limit is a whole segment.
        """
        rounded_bytes = round_size(requested_bytes, self._settings)
        gap_bytes = following - address - rounded_bytes
        if is_small or gap_bytes <= 0:
            return rounded_bytes
        most_bytes = self._settings.max_split_size_bytes
        if gap_bytes <= LARGEST_SMALL_BYTES or (most_bytes is not None and rounded_bytes >= most_bytes):
            return rounded_bytes + gap_bytes
        first, last = address + rounded_bytes, address + rounded_bytes + LARGEST_SMALL_BYTES
        near = self._births[
            bisect.bisect_left(self._births, (first, 0)) : bisect.bisect_left(self._births, (last + 1, 0))
        ]
        before_death = [(index, start) for start, index in near if index < self._first_death[address]]
        return min(before_death)[1] - address if before_death else rounded_bytes
