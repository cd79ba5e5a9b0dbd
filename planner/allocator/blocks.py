"""The data structures of the simulated caching allocator: blocks, pools of free blocks, and the simulated driver.

They serve both kinds of segments, those of fixed size and expandable ones.

Source: `Block`, `BlockPool` and `ExpandableSegment::map` in pytorch's c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable

FIRST_ADDRESS = 1 << 46
"""Address of the first simulated segment. It leaves address space for further segments above and below."""


class Block:
    """A contiguous range of addresses in a segment: allocated, free, or unmapped.

    Unmapped means address space without memory, which only expandable segments have. The blocks of a segment form a
    linked list in the order of their addresses. If a block is split, its `Block` object becomes the front part. If two
    blocks are merged, the object of the front block remains. So the first object of the list never changes.
    """

    __slots__ = (
        "address",
        "inserted_at",
        "is_allocated",
        "is_mapped",
        "next",
        "pool",
        "previous",
        "range_start",
        "requested_bytes",
        "size_bytes",
    )

    def __init__(self, *, address: int, size_bytes: int, pool: Pool, range_start: int | None = None) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.pool = pool
        self.range_start = range_start
        """First address of the expandable segment that holds the block; None in a segment of fixed size."""
        self.requested_bytes = 0
        self.is_allocated = False
        self.is_mapped = True
        self.inserted_at = 0
        """Value of `pool.clock.searches` when the block became free. Garbage collection computes its age from it."""
        self.previous: Block | None = None
        self.next: Block | None = None

    def split_off(self, front_bytes: int) -> Block:
        """Shortens the block to its first `front_bytes`, and returns a new block for the remaining bytes.

        The new block is mapped if this one is. The caller adds it to a pool.
        """
        rest = Block(
            address=self.address + front_bytes,
            size_bytes=self.size_bytes - front_bytes,
            pool=self.pool,
            range_start=self.range_start,
        )
        rest.is_mapped = self.is_mapped
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next = rest
        self.size_bytes = front_bytes
        return rest

    def absorb_next(self) -> None:
        """Merges the next block into this block. The caller must have removed the next block from its pool before."""
        absorbed = self.next
        assert absorbed is not None
        self.size_bytes += absorbed.size_bytes
        self.next = absorbed.next
        if absorbed.next is not None:
            absorbed.next.previous = self

    def is_free(self) -> bool:
        """True if the block has memory and is not allocated."""
        return not self.is_allocated and self.is_mapped

    def is_whole_segment(self) -> bool:
        """True if the segment consists of this block only."""
        return self.previous is None and self.next is None


class Clock:
    """Counts the searches for a free block in all pools of one size class (small or large).

    Garbage collection measures the age of a free block by this count. The count stays 0 if garbage collection is off.
    """

    __slots__ = ("searches",)

    def __init__(self) -> None:
        self.searches = 0


class Pool:
    """The free and the unmapped blocks of one size class and one stream.

    Free blocks are ordered by size, then by address, and unmapped blocks by address. `len(pool)` and `pool[index]`
    refer to the free blocks. PyTorch uses `std::set` with the comparators `BlockComparatorSize` and
    `BlockComparatorAddress`. Here sorted lists hold the keys, and `bisect` finds a position in them.
    """

    __slots__ = ("_free", "_free_keys", "_unmapped", "_unmapped_addresses", "clock", "is_small", "stream")

    def __init__(self, *, is_small: bool, stream: int, clock: Clock) -> None:
        self.is_small = is_small
        self.stream = stream
        self.clock = clock
        self._free_keys: list[tuple[int, ...]] = []
        self._free: dict[int, Block] = {}
        self._unmapped_addresses: list[int] = []
        self._unmapped: dict[int, Block] = {}

    def insert(self, block: Block) -> None:
        block.inserted_at = self.clock.searches
        self._free[block.address] = block
        bisect.insort(self._free_keys, (block.size_bytes, block.address))

    def remove(self, block: Block) -> None:
        del self._free[block.address]
        del self._free_keys[bisect.bisect_left(self._free_keys, (block.size_bytes, block.address))]

    def first_fit_index(self, size_bytes: int) -> int:
        """Returns the index of the smallest free block of at least `size_bytes`.

        If every free block is smaller, it returns `len(pool)`.
        """
        return bisect.bisect_left(self._free_keys, (size_bytes,))

    def __len__(self) -> int:
        return len(self._free_keys)

    def __getitem__(self, index: int) -> Block:
        return self._free[self._free_keys[index][1]]

    def free_blocks(self) -> list[Block]:
        """Returns a new list of all free blocks, smallest first. A caller may change the pool while it iterates."""
        return [self._free[address] for _, address in self._free_keys]

    def insert_unmapped(self, block: Block) -> None:
        self._unmapped[block.address] = block
        bisect.insort(self._unmapped_addresses, block.address)

    def remove_unmapped(self, block: Block) -> None:
        del self._unmapped[block.address]
        del self._unmapped_addresses[bisect.bisect_left(self._unmapped_addresses, block.address)]

    def unmapped_blocks(self) -> list[Block]:
        """Returns a new list of all unmapped blocks, lowest address first."""
        return [self._unmapped[address] for address in self._unmapped_addresses]


class Driver:
    """The simulated CUDA driver, from which the allocator takes memory.

    Args:
        capacity_bytes: Maximum physical memory. None means no limit. Address space has no limit in any case.
        place: Function that takes the size of a new segment in bytes and returns its address. If None, each new segment
            starts where the segment before it ends.
    """

    def __init__(self, capacity_bytes: int | None, place: Callable[[int], int] | None) -> None:
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self.place = Placement() if place is None else place
        """Function that takes the size of a new segment in bytes and returns its address."""
        self.exchanges: list[tuple[int, int]] | None = None
        """Receives each change as (address, bytes), negative if memory is released; None to keep no record."""

    def take(self, size_bytes: int) -> bool:
        """Reserves `size_bytes` of physical memory and returns True. Returns False if less than that is left."""
        reserved_bytes = self.reserved_bytes + size_bytes
        if self.capacity_bytes is not None and reserved_bytes > self.capacity_bytes:
            return False
        self.reserved_bytes = reserved_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved_bytes)
        return True

    def give_back(self, size_bytes: int) -> None:
        """Releases `size_bytes` of physical memory."""
        self.reserved_bytes -= size_bytes

    def note(self, address: int, size_bytes: int) -> None:
        """Records where memory was taken, or released if `size_bytes` is negative."""
        if self.exchanges is not None:
            self.exchanges.append((address, size_bytes))


class Placement:
    """A function for `Driver.place` that puts each new segment next to the one that was placed before it.

    Args:
        descending: True to put it just below that segment, False to put it above.
    """

    def __init__(self, *, descending: bool = False) -> None:
        self.next_address = FIRST_ADDRESS
        """End of the next segment if the addresses descend, else its start."""
        self._descending = descending

    def __call__(self, size_bytes: int) -> int:
        """Returns the address of a new segment of `size_bytes` bytes."""
        if self._descending:
            self.next_address -= size_bytes
            return self.next_address
        self.next_address += size_bytes
        return self.next_address - size_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentBlock:
    """A block of a `Segment`, as a plain value that does not change with the allocator."""

    size_bytes: int
    requested_bytes: int
    """Size of the request before rounding; 0 for a free block."""
    is_allocated: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """A contiguous range of reserved memory, as a plain value that does not change with the allocator.

    An expandable segment appears as several `Segment`s if there is unmapped address space between its mapped blocks.
    """

    address: int
    stream: int
    is_small: bool
    blocks: tuple[SegmentBlock, ...]

    @property
    def size_bytes(self) -> int:
        """Total size of all blocks."""
        return sum(block.size_bytes for block in self.blocks)


def mapped_segments(head: Block) -> list[Segment]:
    """Returns the contiguous mapped ranges of the segment whose first block is `head`, by ascending address."""
    ranges: list[tuple[int, list[SegmentBlock]]] = []
    block: Block | None = head
    continues = False
    while block is not None:
        if block.is_mapped:
            if not continues:
                ranges.append((block.address, []))
            ranges[-1][1].append(
                SegmentBlock(
                    size_bytes=block.size_bytes, requested_bytes=block.requested_bytes, is_allocated=block.is_allocated
                )
            )
        continues = block.is_mapped
        block = block.next
    pool = head.pool
    return [
        Segment(address=address, stream=pool.stream, is_small=pool.is_small, blocks=tuple(blocks))
        for address, blocks in ranges
    ]
