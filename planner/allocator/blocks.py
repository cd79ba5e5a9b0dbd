"""Blocks, pools and the driver of the simulated caching allocator, for segments of fixed size and expandable ones.

Source: `Block`, `BlockPool` and `ExpandableSegment::map` in pytorch's c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable

FIRST_ADDRESS = 1 << 46
"""First synthetic address. Segments can be placed above and below this address."""


class Block:
    """A part of a segment: allocated, free, or (in expandable segments) address space without memory.

    The blocks of a segment form a chain in the order of their addresses. If a block is split, its object becomes the
    front part; if two blocks are merged, the object of the front block remains. So the head of a chain is always the
    same object.
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
        """First address of the expandable segment; None for a block of a segment of fixed size."""
        self.requested_bytes = 0
        self.is_allocated = False
        self.is_mapped = True
        self.inserted_at = 0
        """Clock of the pool when the block became free, for garbage collection by age."""
        self.previous: Block | None = None
        self.next: Block | None = None

    def split_off(self, front_bytes: int) -> Block:
        """Shortens the block to `front_bytes` and returns a new block for the rest, in the same state, in no pool."""
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
        """Merges the following block into this one. The caller has removed the following block from its pool."""
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
        """True if the block is the only one of its segment."""
        return self.previous is None and self.next is None


class Clock:
    """Counts searches in the pools of one size class, if garbage collection is on."""

    __slots__ = ("searches",)

    def __init__(self) -> None:
        self.searches = 0


class Pool:
    """The free blocks of one size class and one stream, ordered as best fit tries them: by size, then by address.

    Upstream uses `std::set` with the comparators `BlockComparatorSize` and `BlockComparatorAddress`. Here keys are kept
    in sorted lists, in which `bisect` finds a position.
    """

    __slots__ = ("_free", "_free_keys", "_unmapped", "_unmapped_addresses", "clock", "is_small", "stream")

    def __init__(self, *, is_small: bool, stream: int, clock: Clock) -> None:
        self.is_small = is_small
        self.stream = stream
        self.clock = clock
        self._free_keys: list[tuple[int, int]] = []
        self._free: dict[int, Block] = {}
        self._unmapped_addresses: list[int] = []
        self._unmapped: dict[int, Block] = {}

    def insert(self, block: Block) -> None:
        """Adds a free block."""
        block.inserted_at = self.clock.searches
        self._free[block.address] = block
        bisect.insort(self._free_keys, (block.size_bytes, block.address))

    def remove(self, block: Block) -> None:
        """Removes a free block."""
        del self._free[block.address]
        del self._free_keys[bisect.bisect_left(self._free_keys, (block.size_bytes, block.address))]

    def first_fit_index(self, size_bytes: int) -> int:
        """Returns the index of the smallest free block of at least `size_bytes`; `len(pool)` if there is none."""
        return bisect.bisect_left(self._free_keys, (size_bytes, 0))

    def __len__(self) -> int:
        return len(self._free_keys)

    def __getitem__(self, index: int) -> Block:
        return self._free[self._free_keys[index][1]]

    def free_blocks(self) -> list[Block]:
        """Returns all free blocks, smallest first, as a copy: blocks may be removed while it is read."""
        return [self._free[address] for _, address in self._free_keys]

    def insert_unmapped(self, block: Block) -> None:
        """Adds a block of address space without memory."""
        self._unmapped[block.address] = block
        bisect.insort(self._unmapped_addresses, block.address)

    def remove_unmapped(self, block: Block) -> None:
        """Removes a block of address space without memory."""
        del self._unmapped[block.address]
        del self._unmapped_addresses[bisect.bisect_left(self._unmapped_addresses, block.address)]

    def unmapped_blocks(self) -> list[Block]:
        """Returns all blocks of address space without memory, lowest address first, as a copy."""
        return [self._unmapped[address] for address in self._unmapped_addresses]


class Driver:
    """The driver that the allocator requests memory from. Physical memory is limited, address space is not."""

    def __init__(self, capacity_bytes: int | None, place: Callable[[int], int] | None) -> None:
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self._next_address = FIRST_ADDRESS
        self.place = self._place_next if place is None else place
        """Returns the address of a new segment of the given size in bytes."""

    def take(self, size_bytes: int) -> bool:
        """Reserves physical memory. Returns False if there is too little left."""
        reserved_bytes = self.reserved_bytes + size_bytes
        if self.capacity_bytes is not None and reserved_bytes > self.capacity_bytes:
            return False
        self.reserved_bytes = reserved_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved_bytes)
        return True

    def give_back(self, size_bytes: int) -> None:
        """Releases physical memory."""
        self.reserved_bytes -= size_bytes

    def _place_next(self, size_bytes: int) -> int:
        """Places each new segment above the one before."""
        address = self._next_address
        self._next_address += size_bytes
        return address


def falling_addresses() -> Callable[[int], int]:
    """Returns a function that places each new segment below the one before."""
    next_address = FIRST_ADDRESS

    def place(size_bytes: int) -> int:
        nonlocal next_address
        next_address -= size_bytes
        return next_address

    return place


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentBlock:
    """A block in the result of `CachingAllocator.segments`."""

    size_bytes: int
    requested_bytes: int
    """Size of the request before rounding; 0 for a free block."""
    is_allocated: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """A contiguous range of reserved memory. An expandable segment with unmapped holes appears as several of these."""

    address: int
    stream: int
    is_small: bool
    blocks: tuple[SegmentBlock, ...]

    @property
    def size_bytes(self) -> int:
        """Sum of all blocks."""
        return sum(block.size_bytes for block in self.blocks)


def mapped_segments(head: Block) -> list[Segment]:
    """Returns the contiguous mapped ranges of the chain that starts at `head`, by ascending address."""
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
