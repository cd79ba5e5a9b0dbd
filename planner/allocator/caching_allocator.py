"""An exact simulator of CUDA's caching allocator: the address of each block, and the memory taken from the driver.

Sources: pytorch's c10/cuda/CUDACachingAllocator.cpp (`malloc`, `get_free_block`, `should_split`, `alloc_block`,
`free_block`, `release_cached_blocks`, `garbage_collect_cached_blocks`) and c10/core/AllocatorConfig.h (the constants).

The algorithm is best fit with splitting and immediate coalescing of free neighbours. A request is rounded up to 512
bytes and searched in the pool of its stream and size class (up to 1 MiB: small). Among the free blocks that are large
enough the smallest one is taken, and among equals the one at the lowest address. The rest is split off if it is large
enough (small pool: 512 bytes; large pool: more than 1 MiB; expandable segments: 512 bytes). If no free block fits, a
segment is taken from the driver: 2 MiB for small requests, 20 MiB for requests below 10 MiB, else the request rounded
up to 2 MiB. If the driver refuses, free segments are released and the driver is asked once more.

Where it stops being exact:

- New segments get synthetic, ascending addresses unless addresses are supplied. The driver's real choice decides
  between free blocks of equal size.
- A block that was used on a second stream can be reused at once; the real allocator waits for that stream.
- Private pools of CUDA graphs and callbacks for free memory are not simulated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from planner.allocator.blocks import Block, Clock, Driver, Pool, Segment, mapped_segments
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
    """The state of the allocator when a request did not fit."""

    asked_bytes: int
    """Size of the request after rounding."""
    allocated_bytes: int
    reserved_bytes: int
    capacity_bytes: int
    """The limit that the request would have exceeded."""


class OutOfMemory(PlannerError):
    """Raised for a request that does not fit, even after all free segments were released."""

    def __init__(self, report: OutOfMemoryReport) -> None:
        self.report = report
        super().__init__(
            f"{format_size(report.asked_bytes)} do not fit: {format_size(report.allocated_bytes)} allocated and "
            f"{format_size(report.reserved_bytes)} reserved of {format_size(report.capacity_bytes)}; "
            "give a larger budget or a smaller step"
        )


class CachingAllocator:
    """The caching allocator of one device.

    Args:
        settings: Options of the allocator.
        capacity_bytes: Maximum memory of all segments together. None means no limit.
        place: Returns the address of a new segment of a given size, for replays. None means synthetic addresses. For
            an expandable segment it is called once, with the size of its whole address range.
        card_bytes: Total memory of the card, from which the length of the address ranges of expandable segments
            follows. None means the capacity.
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
        """Sum of the sizes of all allocated blocks, including remainders that were too small to be split off."""
        self.requested_bytes = 0
        """Sum of the requests for these blocks, before rounding."""
        self.peak_allocated_bytes = 0
        self.peak_requested_bytes = 0
        self.retries = 0
        """Number of times that free segments were released to make room (`num_alloc_retries`)."""

    @property
    def reserved_bytes(self) -> int:
        """Memory taken from the driver."""
        return self._driver.reserved_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """Maximum memory taken from the driver so far."""
        return self._driver.peak_reserved_bytes

    def malloc(self, size_bytes: int, stream: int = 0) -> Block:
        """Allocates a block of at least `size_bytes` bytes.

        Raises:
            OutOfMemory: the block does not fit, even after all free segments were released.
            ValueError: the size is below 1. Empty storages never reach the allocator.
        """
        if size_bytes < 1:
            raise ValueError(f"malloc of {size_bytes} bytes: an empty storage allocates nothing, leave it out")
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
        """Frees a block and merges it with free neighbours. No memory is returned to the driver."""
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
        """True if a free block is large enough for a request, so that the driver would not be asked for memory."""
        rounded_bytes = round_size(size_bytes, self._settings)
        pool = self._pool(rounded_bytes <= LARGEST_SMALL_BYTES, stream)
        searches = pool.clock.searches
        block = self._take_free(pool, rounded_bytes)
        # The search must leave no trace: the clock and the age of the block are restored.
        pool.clock.searches = searches
        if block is None:
            return False
        inserted_at = block.inserted_at
        pool.insert(block)
        block.inserted_at = inserted_at
        return True

    def empty_cache(self) -> None:
        """Releases all segments without an allocated block, or all whole free pages of expandable segments."""
        for pool in self._pools.values():
            if self._settings.expandable_segments:
                self._ranges[pool.is_small].release_free_pages(pool)
            else:
                for block in pool.free_blocks():
                    if block.is_whole_segment():
                        self._release(block)

    def segments(self) -> tuple[Segment, ...]:
        """Returns all reserved memory by ascending address."""
        heads = [*self._heads.values(), *(head for ranges in self._ranges.values() for head in ranges.heads.values())]
        segments = [segment for head in heads for segment in mapped_segments(head)]
        return tuple(sorted(segments, key=lambda segment: segment.address))

    def adopt(self, segments: Iterable[Segment]) -> dict[int, Block]:
        """Adds existing segments of fixed size with their blocks, to start from a known state.

        Returns the allocated blocks by address.

        Raises:
            ValueError: a segment does not fit in the capacity, or segments are expandable.
        """
        live: dict[int, Block] = {}
        for segment in segments:
            if self._settings.expandable_segments or not self._driver.take(segment.size_bytes):
                raise ValueError(
                    f"the segment of {format_size(segment.size_bytes)} at {segment.address:#x} cannot be adopted: "
                    "give segments of fixed size that together fit in the capacity"
                )
            pool = self._pool(segment.is_small, segment.stream)
            block = Block(address=segment.address, size_bytes=segment.size_bytes, pool=pool)
            self._heads[segment.address] = block
            for index, shown in enumerate(segment.blocks):
                rest = block.split_off(shown.size_bytes) if index + 1 < len(segment.blocks) else block
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
        """Returns the pool of a size class and stream."""
        pool = self._pools.get((is_small, stream))
        if pool is None:
            pool = self._pools[is_small, stream] = Pool(is_small=is_small, stream=stream, clock=self._clocks[is_small])
        return pool

    def _take_free(self, pool: Pool, size_bytes: int) -> Block | None:
        """Removes the best free block from the pool and returns it; None if there is none (`get_free_block`)."""
        if self._collects_garbage:
            pool.clock.searches += 1
        index = pool.first_fit_index(size_bytes)
        if index == len(pool):
            return None
        if self._settings.expandable_segments:
            # Upstream compares blocks by the size to which they can grow, and walks on while that decreases.
            while index + 1 < len(pool) and expanded_bytes(pool[index + 1]) < expanded_bytes(pool[index]):
                index += 1
        block = pool[index]
        most_bytes = self._settings.max_split_size_bytes
        if most_bytes is not None:
            # Blocks from the split limit on are for requests from that limit on, and must not waste too much.
            rest_bytes = block.size_bytes - size_bytes
            if size_bytes < most_bytes <= block.size_bytes:
                return None
            if size_bytes >= most_bytes and rest_bytes >= self._settings.max_non_split_rounding_bytes:
                return None
        pool.remove(block)
        return block

    def _is_worth_splitting(self, block: Block, size_bytes: int) -> bool:
        """True if the rest of a block becomes a free block (`should_split`)."""
        rest_bytes = block.size_bytes - size_bytes
        if block.pool.is_small or self._settings.expandable_segments:
            return rest_bytes >= SMALLEST_BLOCK_BYTES
        most_bytes = self._settings.max_split_size_bytes
        return rest_bytes > LARGEST_SMALL_BYTES and (most_bytes is None or size_bytes < most_bytes)

    def _take_new(self, pool: Pool, size_bytes: int) -> Block:
        """Returns a block in new memory; raises `OutOfMemory` if there is none (`malloc` after `get_free_block`)."""
        # Upstream tries in this order, and each step releases more than the one before: the old segments above the
        # threshold of garbage collection, then large blocks that suffice for the request, then all free segments.
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
        """Returns a block in no pool in new memory of the driver; None if the driver or the limit refuses it."""
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
        """Returns a free block that is a whole segment to the driver."""
        block.pool.remove(block)
        del self._heads[block.address]
        self._driver.give_back(block.size_bytes)

    def _release_oversize(self, pool: Pool, size_bytes: int) -> bool:
        """Releases free blocks above the split limit, if they suffice for the request: one large block, or several.

        Returns True if enough was released (`release_available_cached_blocks`).
        """
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
        """Releases free large segments of at least average age until the reserved memory is below the threshold."""
        allowed_bytes = self._settings.allowed_bytes
        assert allowed_bytes is not None  # Without it, garbage collection is off.
        most_bytes = int(self._settings.garbage_collection_threshold * allowed_bytes)
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
