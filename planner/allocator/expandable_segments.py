"""Expandable segments: address ranges larger than the card, to which memory is mapped page by page when it is needed.

Source: `ExpandableSegment`, `find_expandable_block`, `map_block`, `unmap_block` and
`try_allocate_expandable_block` in pytorch's c10/cuda/CUDACachingAllocator.cpp.

A range starts as one unmapped block. An allocation that fits in no free block takes the lowest address where adjacent
free and unmapped blocks together are long enough, and maps whole pages there. A page has 2 MiB in the small pool, and
`large_segment_bytes` (20 MiB by default) in the large pool. Memory is only released in whole free pages.

A range is 1 1/8 times as long as the card's memory. If the memory of the card is not given, the simulated capacity is
used instead, and the simulation may not be exact. Best fit compares free blocks by the size to which
they can grow, and the last block can grow to the end of its range: only choices that involve it can differ.
"""

from __future__ import annotations

from planner.allocator.blocks import Block, Driver, Pool

UNKNOWN_CARD_BYTES = 1 << 42
"""Total memory of the card (4 TiB) that is assumed if neither the memory of the card nor a capacity is given."""


class ExpandableRanges:
    """The expandable segments of one size class (small or large), for all streams.

    Args:
        page_bytes: Size of a page, the smallest piece that is mapped or unmapped.
        driver: Driver that memory is taken from.
        card_bytes: Total memory of the card. None means `UNKNOWN_CARD_BYTES`.
    """

    def __init__(self, *, page_bytes: int, driver: Driver, card_bytes: int | None) -> None:
        total_bytes = UNKNOWN_CARD_BYTES if card_bytes is None else card_bytes
        self._page_bytes = page_bytes
        self._range_bytes = -(-(total_bytes + total_bytes // 8) // page_bytes) * page_bytes
        self._driver = driver
        self.heads: dict[int, Block] = {}
        """First block of each range, by address."""

    def allocate(self, pool: Pool, size_bytes: int) -> Block | None:
        """Maps the pages that a request needs, and returns a free block of at least `size_bytes` that is in no pool.

        Returns None if the driver has too little memory. Pages that were mapped before then stay mapped, as in PyTorch.
        """
        room = self._find_room(pool, size_bytes)
        candidate = room if room.is_mapped else self._map(room, min(room.size_bytes, size_bytes))
        # The room may consist of several free and unmapped blocks. Each mapped block merges with its free neighbours.
        while candidate is not None and candidate.size_bytes < size_bytes:
            unmapped = candidate.next
            assert unmapped is not None  # `_find_room` has checked that the room is long enough.
            candidate = self._map(unmapped, min(size_bytes - candidate.size_bytes, unmapped.size_bytes))
        if candidate is not None:
            pool.remove(candidate)
        return candidate

    def release_free_pages(self, pool: Pool) -> None:
        """Unmaps all pages of a pool that are entirely free, and removes address ranges without any mapped page."""
        for block in pool.free_blocks():
            unmapped = self._unmap(block)
            if unmapped is not None and unmapped.is_whole_segment():
                pool.remove_unmapped(unmapped)
                del self.heads[unmapped.address]

    def _find_room(self, pool: Pool, size_bytes: int) -> Block:
        """Finds the lowest address where adjacent free and unmapped blocks together have at least `size_bytes`.

        Returns the first of these blocks. If there is no such place, it reserves a new address range and returns its
        only block (`find_expandable_block` in PyTorch).
        """
        for unmapped in pool.unmapped_blocks():
            before = unmapped.previous
            start = before if before is not None and not before.is_allocated else unmapped
            if _has_room(start, size_bytes):
                return start
        # A request that no card of this size could serve is simulated too, to say how much memory it would need.
        range_bytes = max(self._range_bytes, -(-size_bytes // self._page_bytes) * self._page_bytes)
        address = self._driver.place(range_bytes)
        unmapped = Block(address=address, size_bytes=range_bytes, pool=pool, range_start=address)
        unmapped.is_mapped = False
        pool.insert_unmapped(unmapped)
        self.heads[address] = unmapped
        return unmapped

    def _map(self, block: Block, size_bytes: int) -> Block | None:
        """Maps the first `size_bytes` of an unmapped block, rounded up to whole pages.

        The mapped block is merged with free neighbors and added to the pool as a free block. Returns the merged block,
        or None if the driver has too little memory.
        """
        pool = block.pool
        mapped_bytes = -(-size_bytes // self._page_bytes) * self._page_bytes
        if not self._driver.take(mapped_bytes):
            return None
        self._driver.note(block.address, mapped_bytes)
        pool.remove_unmapped(block)
        if mapped_bytes < block.size_bytes:
            pool.insert_unmapped(block.split_off(mapped_bytes))
        block.is_mapped = True
        if block.previous is not None and block.previous.is_free():
            block = block.previous
            pool.remove(block)
            block.absorb_next()
        if block.next is not None and block.next.is_free():
            pool.remove(block.next)
            block.absorb_next()
        pool.insert(block)
        return block

    def _unmap(self, block: Block) -> Block | None:
        """Unmaps all pages that a free block contains entirely.

        Returns the unmapped block, merged with unmapped neighbors, or None if the block contains no entire page.
        """
        pool, start, page_bytes = block.pool, block.range_start, self._page_bytes
        assert start is not None  # All blocks of expandable segments have it.
        # Round the start up and the end down to pages, counted from the start of the range.
        first = start - (start - block.address) // page_bytes * page_bytes
        end = start + (block.address + block.size_bytes - start) // page_bytes * page_bytes
        if first >= end:
            return None
        pool.remove(block)
        if first > block.address:
            rest = block.split_off(first - block.address)
            pool.insert(block)
            block = rest
        if end < block.address + block.size_bytes:
            pool.insert(block.split_off(end - block.address))
        block.is_mapped = False
        self._driver.give_back(end - first)
        self._driver.note(first, first - end)
        if block.next is not None and not block.next.is_mapped:
            pool.remove_unmapped(block.next)
            block.absorb_next()
        if block.previous is not None and not block.previous.is_mapped:
            block.previous.absorb_next()
            return block.previous
        pool.insert_unmapped(block)
        return block


def expanded_bytes(block: Block) -> int:
    """Returns the size to which a free block can grow: its own size plus that of the unmapped block after it.

    Best fit compares the free blocks of expandable segments by this size.
    """
    after = block.next
    return block.size_bytes + (after.size_bytes if after is not None and not after.is_mapped else 0)


def _has_room(block: Block | None, size_bytes: int) -> bool:
    """True if the blocks from `block` up to the next allocated block together have at least `size_bytes`."""
    room_bytes = 0
    while room_bytes < size_bytes and block is not None and not block.is_allocated:
        room_bytes += block.size_bytes
        block = block.next
    return room_bytes >= size_bytes
