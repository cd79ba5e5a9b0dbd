"""Blocks, pools, views and the driver: what both kinds of segment of the simulated caching allocator are made of.

Source: `Block`, `BlockPool` and `ExpandableSegment::map` in pytorch's c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable

FIRST_ADDRESS = 1 << 46
"""Where synthetic addresses start: a driver has plenty of address space on both sides."""


class Block:
    """A stretch of a segment: handed out, free, or (expandable segments) address space without memory.

    Blocks of one segment form a chain in the order of their addresses. A block that is split keeps its own
    front, and of two blocks that merge the front one stays: the head of a chain is the same object for good.
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
        """First address of the expandable segment; None in a segment of fixed size."""
        self.requested_bytes = 0
        self.is_allocated = False
        self.is_mapped = True
        self.inserted_at = 0
        """The pool's clock when the block became free, for garbage collection by age."""
        self.previous: Block | None = None
        self.next: Block | None = None

    def split_off(self, front_bytes: int) -> Block:
        """Shorten the block to `front_bytes` and return a new block for the rest, in the same state, in no list."""
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
        """Take over the following block. The caller has taken it out of its list."""
        absorbed = self.next
        self.size_bytes += absorbed.size_bytes
        self.next = absorbed.next
        if absorbed.next is not None:
            absorbed.next.previous = self

    def is_free(self) -> bool:
        return not self.is_allocated and self.is_mapped

    def is_whole_segment(self) -> bool:
        return self.previous is None and self.next is None


class Clock:
    """Counts searches in the pools of one size class; runs only while garbage collection is on."""

    __slots__ = ("searches",)

    def __init__(self) -> None:
        self.searches = 0


class Pool:
    """The free blocks of one size class and one stream, in the order in which they are tried: size, then address."""

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
        block.inserted_at = self.clock.searches
        self._free[block.address] = block
        bisect.insort(self._free_keys, (block.size_bytes, block.address))

    def remove(self, block: Block) -> None:
        del self._free[block.address]
        del self._free_keys[bisect.bisect_left(self._free_keys, (block.size_bytes, block.address))]

    def first_fit_index(self, size_bytes: int) -> int:
        """Position of the smallest free block of at least `size_bytes`; `len(pool)` where there is none."""
        return bisect.bisect_left(self._free_keys, (size_bytes, 0))

    def __len__(self) -> int:
        return len(self._free_keys)

    def __getitem__(self, index: int) -> Block:
        return self._free[self._free_keys[index][1]]

    def free_blocks(self) -> list[Block]:
        """All free blocks, smallest first; a copy, so that blocks may be removed while it is read."""
        return [self._free[address] for _, address in self._free_keys]

    def insert_unmapped(self, block: Block) -> None:
        self._unmapped[block.address] = block
        bisect.insort(self._unmapped_addresses, block.address)

    def remove_unmapped(self, block: Block) -> None:
        del self._unmapped[block.address]
        del self._unmapped_addresses[bisect.bisect_left(self._unmapped_addresses, block.address)]

    def unmapped_blocks(self) -> list[Block]:
        """Stretches of address space without memory, lowest address first; a copy."""
        return [self._unmapped[address] for address in self._unmapped_addresses]


class Driver:
    """The other side of the allocator: physical memory that can run out, and addresses that cannot."""

    def __init__(self, capacity_bytes: int | None, place: Callable[[int], int] | None) -> None:
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self._next_address = FIRST_ADDRESS
        self.place = self._place_next if place is None else place
        """From the size of a new segment in bytes to its address."""

    def take(self, size_bytes: int) -> bool:
        """Reserve physical memory; False where it does not fit."""
        reserved_bytes = self.reserved_bytes + size_bytes
        if self.capacity_bytes is not None and reserved_bytes > self.capacity_bytes:
            return False
        self.reserved_bytes = reserved_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved_bytes)
        return True

    def give_back(self, size_bytes: int) -> None:
        self.reserved_bytes -= size_bytes

    def _place_next(self, size_bytes: int) -> int:
        address = self._next_address
        self._next_address += size_bytes
        return address


def falling_addresses() -> Callable[[int], int]:
    """Places for new segments, each below the one before."""
    next_address = FIRST_ADDRESS

    def place(size_bytes: int) -> int:
        nonlocal next_address
        next_address -= size_bytes
        return next_address

    return place


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentBlock:
    """One block of a segment as `CachingAllocator.segments` shows it."""

    size_bytes: int
    requested_bytes: int
    """0 for a free block."""
    is_allocated: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of reserved memory; of an expandable segment, one stretch that is mapped without a hole."""

    address: int
    stream: int
    is_small: bool
    blocks: tuple[SegmentBlock, ...]

    @property
    def size_bytes(self) -> int:
        return sum(block.size_bytes for block in self.blocks)


def mapped_stretches(head: Block) -> list[Segment]:
    """The reserved stretches of the chain that starts at `head`, by ascending address."""
    stretches: list[tuple[int, list[SegmentBlock]]] = []
    block: Block | None = head
    joined = False
    while block is not None:
        if block.is_mapped:
            if not joined:
                stretches.append((block.address, []))
            stretches[-1][1].append(
                SegmentBlock(
                    size_bytes=block.size_bytes, requested_bytes=block.requested_bytes, is_allocated=block.is_allocated
                )
            )
        joined = block.is_mapped
        block = block.next
    pool = head.pool
    return [
        Segment(address=address, stream=pool.stream, is_small=pool.is_small, blocks=tuple(blocks))
        for address, blocks in stretches
    ]
