"""Finds the state of the allocator before the first event of a record: undoes all events, from the last to the first.

A record may start in the middle of a run, because `max_entries` keeps only the latest events. Undoing the events gives
all segments and all live (allocated) blocks before them. It does not give the size of a block that was freed during the
record, because an event only holds the requested size. In the large pool such a block may be up to 1 MiB larger than
the request. Its size is inferred from the addresses of the blocks after it (`_UnseenBlocks`).
"""

from __future__ import annotations

import bisect
import itertools

from planner.allocator.blocks import Segment, SegmentBlock
from planner.allocator.settings import LARGEST_SMALL_BYTES, SMALL_SEGMENT_BYTES, AllocatorSettings, round_size
from planner.errors import SnapshotError
from planner.snapshot.history import Action, Event, History


class StartState:
    """The state of the allocator before the first event of a record.

    Raises:
        SnapshotError: the events contradict each other or the segments at the end, because some were not recorded.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._segments: dict[int, tuple[int, bool, int]] = {}
        """Maps the address of each segment to its size, whether it belongs to the small pool, and its stream."""
        self._live: dict[int, tuple[int | None, int]] = {}
        """Maps the address of each live block to its size (None if unknown) and its requested size."""
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
        """Maps the address of each live block to its requested size in bytes, by ascending address."""
        return {address: requested for address, (_, requested) in sorted(self._live.items())}

    def segments(self) -> tuple[Segment, ...]:
        """Returns the segments of fixed size with their blocks, by ascending address.

        Raises:
            SnapshotError: expandable segments exist before the first event. A record does not hold the address ranges
                of expandable segments, so they cannot be restored.
        """
        if self._history.settings.expandable_segments:
            if self.reserved_bytes or self._live:
                raise SnapshotError(
                    "the record starts while expandable segments are in use, and does not hold their address ranges, "
                    "so it cannot be replayed: begin to record before the first allocation, without max_entries"
                )
            return ()
        unseen = _UnseenBlocks(self._history)
        addresses = sorted(self._live)
        segments, position = [], 0
        for address, (size_bytes, is_small, stream) in sorted(self._segments.items()):
            if address < position:
                raise SnapshotError(f"the segment at {address:#x} overlaps another one before the first event: {_GAP}")
            position = address + size_bytes
            inside = addresses[bisect.bisect_left(addresses, address) : bisect.bisect_left(addresses, position)]
            blocks = self._blocks(address, position, inside, unseen, is_small=is_small)
            segments.append(Segment(address=address, stream=stream, is_small=is_small, blocks=tuple(blocks)))
        if sum(block.is_allocated for segment in segments for block in segment.blocks) < len(addresses):
            raise SnapshotError(f"a block that is live before the first event belongs to no segment: {_GAP}")
        return tuple(segments)

    def _undo(self, index: int, event: Event) -> None:
        """Changes the state after an event to the state before it.

        Raises:
            SnapshotError: the event cannot have led to the state after it.
        """
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
        """Returns the live and free blocks of one segment before the first event.

        Args:
            start: Address of the segment.
            end: Address of the first byte after the segment.
            inside: Addresses of the live blocks in the segment.
            unseen: Infers the sizes of blocks that are live before the first event and freed later in the record.
            is_small: True if the segment belongs to the small pool.
        """
        blocks, position = [], start
        for address, following in itertools.pairwise([*inside, end]):
            if address > position:
                blocks.append(SegmentBlock(size_bytes=address - position, requested_bytes=0, is_allocated=False))
            size_bytes, requested_bytes = self._live[address]
            if size_bytes is None:
                size_bytes = unseen.size_bytes(address, requested_bytes, following, is_small=is_small)
            if address < position or address + size_bytes > following:
                raise SnapshotError(f"the block at {address:#x} overlaps another block before the first event: {_GAP}")
            blocks.append(SegmentBlock(size_bytes=size_bytes, requested_bytes=requested_bytes, is_allocated=True))
            position = address + size_bytes
        if position < end:
            blocks.append(SegmentBlock(size_bytes=end - position, requested_bytes=0, is_allocated=False))
        return blocks


_GAP = (
    "some events are missing in the record; record all kinds of events, and write the snapshot before recording is "
    "switched off"
)


class _UnseenBlocks:
    """Infers the sizes of blocks that were live before the first event and were freed during the record."""

    def __init__(self, history: History) -> None:
        self._settings: AllocatorSettings = history.settings
        self._first_free: dict[int, int] = {}
        allocations = []
        for index, event in enumerate(history.events):
            if event.action is Action.ALLOC:
                allocations.append((event.address, index))
            elif event.action is Action.FREE_COMPLETED:
                self._first_free.setdefault(event.address, index)
        self._allocations = sorted(allocations)

    def size_bytes(self, address: int, requested_bytes: int, following: int, *, is_small: bool) -> int:
        """Returns the size in bytes of the block at `address`.

        In the large pool a block may be up to 1 MiB larger than the rounded request, because up to 1 MiB of unused
        bytes is not split off.

        Args:
            address: Address of the block.
            requested_bytes: Size of the request, before rounding.
            following: Address of the next live block in the segment, or of the end of the segment.
            is_small: True if the block belongs to the small pool.
        """
        rounded_bytes = round_size(requested_bytes, self._settings)
        gap_bytes = following - address - rounded_bytes
        if is_small or gap_bytes <= 0:
            return rounded_bytes
        # A gap of at most 1 MiB belongs to the block, because a free block of the large pool is larger than that. A
        # block of at least `max_split_size_bytes` is a whole segment, so the whole gap belongs to it.
        most_bytes = self._settings.max_split_size_bytes
        if gap_bytes <= LARGEST_SMALL_BYTES or (most_bytes is not None and rounded_bytes >= most_bytes):
            return rounded_bytes + gap_bytes
        # A longer gap also contains a free block. Find where that begins: at the address of the first allocation that
        # starts at most 1 MiB after the rounded request, and happens before this block is freed. If there is no such
        # allocation, assume that the block has the rounded size.
        first, last = address + rounded_bytes, address + rounded_bytes + LARGEST_SMALL_BYTES
        near = self._allocations[
            bisect.bisect_left(self._allocations, (first, 0)) : bisect.bisect_left(self._allocations, (last + 1, 0))
        ]
        before_free = [(index, start) for start, index in near if index < self._first_free[address]]
        return min(before_free)[1] - address if before_free else rounded_bytes
