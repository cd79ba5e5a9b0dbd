"""The state of a simulated allocator as a plain value: it can be compared, kept, and restored as often as needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from planner.allocator.blocks import Block, Placement, Pool
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.settings import AllocatorSettings

_FREE, _UNMAPPED, _UNMARKED = -1, -2, -3
"""Stand for a mark in a state: a free block, an unmapped block, and an allocated block without a mark."""


@dataclasses.dataclass(frozen=True, slots=True)
class AllocatorState:
    """All segments and blocks of an allocator. From equal states, equal requests lead to equal states.

    The ages of blocks, which garbage collection uses, are not part of it.
    """

    next_address: int
    """Address at which the next segment is placed (`Placement.next_address`)."""
    segments: tuple[tuple[int, bool, int, bool, tuple[int, ...]], ...]
    """For each segment, by ascending address: its address, whether it is in the small pool, its stream, whether it is
    expandable, and for each of its blocks the size in bytes and the mark, one after the other. Adjacent blocks that
    stay allocated for ever are one block."""


def capture(allocator: CachingAllocator, marks: Mapping[int, int]) -> AllocatorState:
    """Returns the state of an allocator whose segments are placed by a `Placement`.

    Args:
        marks: numbers from 0 by which allocated blocks are recognized, by address. Blocks without a mark stay allocated
            for ever, and need not be recognized.
    """
    place = allocator.driver.place
    assert isinstance(place, Placement)
    heads = [(head, False) for head in allocator.heads.values()]
    heads += [(head, True) for ranges in allocator.ranges.values() for head in ranges.heads.values()]
    segments = []
    for head, is_expandable in sorted(heads, key=lambda item: item[0].address):
        blocks: list[int] = []
        block: Block | None = head
        while block is not None:
            if block.is_allocated:
                mark = marks.get(block.address, _UNMARKED)
            else:
                mark = _FREE if block.is_mapped else _UNMAPPED
            if mark == _UNMARKED and blocks and blocks[-1] == _UNMARKED:
                blocks[-2] += block.size_bytes
            else:
                blocks += (block.size_bytes, mark)
            block = block.next
        segments.append((head.address, head.pool.is_small, head.pool.stream, is_expandable, tuple(blocks)))
    return AllocatorState(place.next_address, tuple(segments))


def restore(
    state: AllocatorState,
    settings: AllocatorSettings,
    capacity_bytes: int | None,
    *,
    card_bytes: int | None,
    descending: bool,
) -> tuple[CachingAllocator, dict[int, Block]]:
    """Returns an allocator in a captured state, and its marked blocks by mark.

    Its peaks are those since the state was captured. The requests of its blocks count with the sizes of the blocks.

    Args:
        settings, capacity_bytes, card_bytes: as for the allocator whose state was captured.
        descending: direction of the `Placement` of its segments.
    """
    place = Placement(descending=descending)
    place.next_address = state.next_address
    allocator = CachingAllocator(settings, capacity_bytes, place=place, card_bytes=card_bytes)
    marked: dict[int, Block] = {}
    for address, is_small, stream, is_expandable, sizes_and_marks in state.segments:
        pool = allocator.pool(is_small, stream)
        heads = allocator.ranges[is_small].heads if is_expandable else allocator.heads
        blocks = _blocks(address, pool, address if is_expandable else None, sizes_and_marks)
        heads[address] = blocks[0]
        for block, mark in zip(blocks, sizes_and_marks[1::2], strict=True):
            if mark == _UNMAPPED:
                block.is_mapped = False
                pool.insert_unmapped(block)
                continue
            allocator.driver.reserved_bytes += block.size_bytes
            if mark == _FREE:
                pool.insert(block)
                continue
            block.is_allocated = True
            block.requested_bytes = block.size_bytes
            allocator.allocated_bytes += block.size_bytes
            if mark != _UNMARKED:
                marked[mark] = block
    allocator.driver.peak_reserved_bytes = allocator.driver.reserved_bytes
    allocator.requested_bytes = allocator.peak_requested_bytes = allocator.allocated_bytes
    allocator.peak_allocated_bytes = allocator.allocated_bytes
    return allocator, marked


def _blocks(address: int, pool: Pool, range_start: int | None, sizes_and_marks: tuple[int, ...]) -> list[Block]:
    """Returns the blocks of a segment, each linked with its neighbors."""
    blocks: list[Block] = []
    for size_bytes in sizes_and_marks[::2]:
        block = Block(address=address, size_bytes=size_bytes, pool=pool, range_start=range_start)
        if blocks:
            block.previous, blocks[-1].next = blocks[-1], block
        blocks.append(block)
        address += size_bytes
    return blocks
