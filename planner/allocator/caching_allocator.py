"""An exact simulator of CUDA's caching allocator: which addresses it hands out, and what it takes from the driver.

Sources: pytorch's c10/cuda/CUDACachingAllocator.cpp (`malloc`, `get_free_block`, `should_split`, `alloc_block`,
`free_block`, `release_cached_blocks`, `garbage_collect_cached_blocks`) and c10/core/AllocatorConfig.h (the constants).

A request is rounded to 512 bytes and searched in the pool of its stream and size class (up to 1 MiB: small). The
smallest free block that is large enough wins, ties go to the lowest address; the rest is split off when it is worth it
(small pool: 512 bytes; large pool: more than 1 MiB; expandable segments: 512 bytes). Without such a block a segment is
taken from the driver: 2 MiB for small requests, 20 MiB below 10 MiB, else the request rounded to 2 MiB. When the driver
refuses, free segments are given back and it is asked once more. Freed blocks merge with free neighbours.

Where it stops being exact: addresses of new segments are made up in ascending order unless they are supplied, and the
driver's choice decides between free blocks of equal size; a block that was used on a second stream is free at once,
where the real allocator waits for that stream; private pools of CUDA graphs and free-memory callbacks are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from planner.allocator.blocks import Block, Clock, Driver, Pool, Segment, mapped_stretches
from planner.allocator.expandable_segments import ExpandableRanges, expanded_bytes
from planner.allocator.settings import (
    LARGEST_SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    SMALLEST_BLOCK_BYTES,
    AllocatorSettings,
    round_size,
    segment_size,
)
from planner.errors import PlannerError
from planner.plan_types.sizes import format_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutOfMemoryReport:
    """What the allocator held when a request did not fit."""

    asked_bytes: int
    """The request, rounded."""
    allocated_bytes: int
    reserved_bytes: int
    capacity_bytes: int
    """The limit that was in the way."""


class OutOfMemory(PlannerError):
    """A request that does not fit, even after everything free was given back to the driver."""

    def __init__(self, report: OutOfMemoryReport) -> None:
        self.report = report
        super().__init__(
            f"{format_size(report.asked_bytes)} do not fit: {format_size(report.allocated_bytes)} allocated and "
            f"{format_size(report.reserved_bytes)} reserved of {format_size(report.capacity_bytes)}; "
            "give a larger budget or a smaller step"
        )


class CachingAllocator:
    """The allocator of one device. Sizes in bytes; streams are told apart by their number only.

    Args:
        settings: options of the allocator.
        capacity_bytes: memory that segments can take in all; None: no limit.
        place: from the size of a new segment to its address, for replays; None makes addresses up. An expandable
            segment is placed once, with the size of its whole address range.
        card_bytes: total memory of the card, which the address ranges of expandable segments are made for; None: the
            capacity.
    """

    def __init__(
        self,
        settings: AllocatorSettings,
        capacity_bytes: int | None,
        *,
        place: Callable[[int], int] | None = None,
        card_bytes: int | None = None,
    ) -> None:
        self._settings = settings
        self._driver = Driver(capacity_bytes, place)
        self._clocks = {is_small: Clock() for is_small in (False, True)}
        self._pools: dict[tuple[bool, int], Pool] = {}
        self._heads: dict[int, Block] = {}
        self._ranges: dict[bool, ExpandableRanges] = {
            is_small: ExpandableRanges(
                page_bytes=SMALL_SEGMENT_BYTES if is_small else settings.large_segment_bytes,
                driver=self._driver,
                card_bytes=capacity_bytes if card_bytes is None else card_bytes,
            )
            for is_small in (False, True)
        }
        self._collects_garbage = settings.allowed_bytes is not None and settings.garbage_collection_threshold > 0
        self.allocated_bytes = 0
        """Sum of the blocks handed out, with what was not worth splitting off."""
        self.requested_bytes = 0
        """Sum of the requests behind them, before rounding."""
        self.peak_allocated_bytes = 0
        self.peak_requested_bytes = 0
        self.retries = 0
        """How often free segments were given back in order to make room (`num_alloc_retries`)."""

    @property
    def reserved_bytes(self) -> int:
        """Memory taken from the driver."""
        return self._driver.reserved_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        return self._driver.peak_reserved_bytes

    def malloc(self, size_bytes: int, stream: int = 0) -> Block:
        """Hand out a block of at least `size_bytes` bytes.

        Raises:
            OutOfMemory: when it does not fit even after everything free was given back.
            ValueError: for a size below 1: such storages never reach the allocator.
        """
        if size_bytes < 1:
            raise ValueError(f"malloc of {size_bytes} bytes: storages without bytes take nothing, leave them out")
        rounded_bytes = round_size(size_bytes, self._settings)
        pool = self._pool(rounded_bytes <= LARGEST_SMALL_BYTES, stream)
        block = self._take_free(pool, rounded_bytes) or self._take_new(pool, rounded_bytes)
        if self._is_worth_splitting(block, rounded_bytes):
            pool.insert(block.split_off(rounded_bytes))
        block.is_allocated = True
        block.requested_bytes = size_bytes
        self.allocated_bytes += block.size_bytes
        self.requested_bytes += size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_requested_bytes = max(self.peak_requested_bytes, self.requested_bytes)
        return block

    def free(self, block: Block) -> None:
        """Take a block back and merge it with free neighbours. Nothing goes back to the driver."""
        if not block.is_allocated:
            raise ValueError(f"free of the block at {block.address:#x}, which is free already: free a block once")
        block.is_allocated = False
        self.allocated_bytes -= block.size_bytes
        self.requested_bytes -= block.requested_bytes
        block.requested_bytes = 0
        pool, before = block.pool, block.previous
        if before is not None and not before.is_allocated and before.is_mapped:
            pool.remove(before)
            before.absorb_next()
            block = before
        after = block.next
        if after is not None and not after.is_allocated and after.is_mapped:
            pool.remove(after)
            block.absorb_next()
        pool.insert(block)

    def is_cached(self, size_bytes: int, stream: int = 0) -> bool:
        """Whether a free block would serve such a request, so that nothing is asked of the driver."""
        rounded_bytes = round_size(size_bytes, self._settings)
        pool = self._pool(rounded_bytes <= LARGEST_SMALL_BYTES, stream)
        searches = pool.clock.searches
        block = self._take_free(pool, rounded_bytes)
        pool.clock.searches = searches
        if block is None:
            return False
        inserted_at = block.inserted_at
        pool.insert(block)
        block.inserted_at = inserted_at
        return True

    def empty_cache(self) -> None:
        """Give every segment without a live block, and every whole free page, back to the driver."""
        for pool in self._pools.values():
            if self._settings.expandable_segments:
                self._ranges[pool.is_small].release_free_pages(pool)
            else:
                for block in pool.free_blocks():
                    if block.is_whole_segment():
                        self._release(block)

    def segments(self) -> tuple[Segment, ...]:
        """What is reserved now, by ascending address."""
        heads = [*self._heads.values(), *(head for ranges in self._ranges.values() for head in ranges.heads.values())]
        segments = [segment for head in heads for segment in mapped_stretches(head)]
        return tuple(sorted(segments, key=lambda segment: segment.address))

    def adopt(self, segments: Iterable[Segment]) -> dict[int, Block]:
        """Start from a known state: take over segments of fixed size with their blocks; live blocks by address."""
        live: dict[int, Block] = {}
        for segment in segments:
            if self._settings.expandable_segments or not self._driver.take(segment.size_bytes):
                raise ValueError(
                    f"the segment of {format_size(segment.size_bytes)} at {segment.address:#x} cannot be adopted: "
                    "only segments of fixed size that fit the capacity can"
                )
            pool = self._pool(segment.is_small, segment.stream)
            block = Block(address=segment.address, size_bytes=segment.size_bytes, pool=pool)
            self._heads[segment.address] = block
            for index, shown in enumerate(segment.blocks):
                rest = block.split_off(shown.size_bytes) if index + 1 < len(segment.blocks) else None
                if shown.is_allocated:
                    block.is_allocated = True
                    block.requested_bytes = shown.requested_bytes
                    self.allocated_bytes += shown.size_bytes
                    self.requested_bytes += shown.requested_bytes
                    live[block.address] = block
                else:
                    pool.insert(block)
                block = rest
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_requested_bytes = max(self.peak_requested_bytes, self.requested_bytes)
        return live

    def _pool(self, is_small: bool, stream: int) -> Pool:
        pool = self._pools.get((is_small, stream))
        if pool is None:
            pool = self._pools[is_small, stream] = Pool(is_small=is_small, stream=stream, clock=self._clocks[is_small])
        return pool

    def _take_free(self, pool: Pool, size_bytes: int) -> Block | None:
        if self._collects_garbage:
            pool.clock.searches += 1
        index = pool.first_fit_index(size_bytes)
        if index == len(pool):
            return None
        if self._settings.expandable_segments:
            while index + 1 < len(pool) and expanded_bytes(pool[index + 1]) < expanded_bytes(pool[index]):
                index += 1
        block = pool[index]
        most_bytes = self._settings.max_split_size_bytes
        if most_bytes is not None:
            rest_bytes = block.size_bytes - size_bytes
            if size_bytes < most_bytes <= block.size_bytes:
                return None
            if size_bytes >= most_bytes and rest_bytes >= self._settings.max_non_split_rounding_bytes:
                return None
        pool.remove(block)
        return block

    def _is_worth_splitting(self, block: Block, size_bytes: int) -> bool:
        rest_bytes = block.size_bytes - size_bytes
        if block.pool.is_small or self._settings.expandable_segments:
            return rest_bytes >= SMALLEST_BLOCK_BYTES
        most_bytes = self._settings.max_split_size_bytes
        return rest_bytes > LARGEST_SMALL_BYTES and (most_bytes is None or size_bytes < most_bytes)

    def _take_new(self, pool: Pool, size_bytes: int) -> Block:
        if self._collects_garbage:
            self._collect_garbage()
        block = self._extend(pool, size_bytes)
        if block is None and self._release_oversize(pool, size_bytes):
            block = self._extend(pool, size_bytes)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._extend(pool, size_bytes)
        if block is None:
            limits = (self._driver.capacity_bytes, self._settings.allowed_bytes)
            raise OutOfMemory(
                OutOfMemoryReport(
                    asked_bytes=size_bytes,
                    allocated_bytes=self.allocated_bytes,
                    reserved_bytes=self.reserved_bytes,
                    capacity_bytes=min(limit for limit in limits if limit is not None),
                )
            )
        return block

    def _extend(self, pool: Pool, size_bytes: int) -> Block | None:
        """A block in no list, in memory that the driver gave just now; None when it refused."""
        new_bytes = segment_size(size_bytes, self._settings)
        allowed_bytes = self._settings.allowed_bytes
        if allowed_bytes is not None and self._driver.reserved_bytes + new_bytes > allowed_bytes:
            return None
        if self._settings.expandable_segments:
            return self._ranges[pool.is_small].allocate(pool, size_bytes)
        if not self._driver.take(new_bytes):
            return None
        block = Block(address=self._driver.place(new_bytes), size_bytes=new_bytes, pool=pool)
        self._heads[block.address] = block
        return block

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        del self._heads[block.address]
        self._driver.give_back(block.size_bytes)

    def _release_oversize(self, pool: Pool, size_bytes: int) -> bool:
        """Give back as many blocks above the split limit as the request needs, one alone if one is large enough."""
        most_bytes = self._settings.max_split_size_bytes
        if most_bytes is None or self._settings.expandable_segments:
            return False
        wanted_bytes = max(size_bytes, most_bytes)
        index = pool.first_fit_index(wanted_bytes)
        if index < len(pool):
            self._release(pool[index])
            return True
        released_bytes = 0
        for block in reversed(pool.free_blocks()):
            if released_bytes >= wanted_bytes or block.size_bytes < most_bytes:
                break
            released_bytes += block.size_bytes
            self._release(block)
        return released_bytes >= wanted_bytes

    def _collect_garbage(self) -> None:
        """Give back free large segments of at least average age until the threshold is respected."""
        most_bytes = int(self._settings.garbage_collection_threshold * self._settings.allowed_bytes)
        excess_bytes = self.reserved_bytes - most_bytes
        if excess_bytes <= 0 or self._settings.expandable_segments:
            return
        now = self._clocks[False].searches
        pools = [pool for pool in self._pools.values() if not pool.is_small]
        whole = [block for pool in pools for block in pool.free_blocks() if block.is_whole_segment()]
        while excess_bytes > 0 and whole:
            average_age = sum(now - block.inserted_at for block in whole) / len(whole)
            for block in whole:
                if now - block.inserted_at >= average_age:
                    excess_bytes -= block.size_bytes
                    self._release(block)
            whole = [block for block in whole if now - block.inserted_at < average_age]
