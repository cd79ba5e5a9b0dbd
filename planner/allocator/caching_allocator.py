"""An exact simulator of PyTorch's CUDA caching allocator: the address of each block, and the memory that it reserves.

Sources: pytorch's c10/cuda/CUDACachingAllocator.cpp (`malloc`, `get_free_block`, `should_split`, `alloc_block`,
`free_block`, `release_cached_blocks`, `garbage_collect_cached_blocks`) and c10/core/AllocatorConfig.h (the constants).

The algorithm is best fit with splitting, and free blocks are merged with free neighbors at once:

1. The size of a request is rounded up to a multiple of 512 bytes. Requests of up to 1 MiB are small, others large. Each
   stream has a pool of free blocks for small requests and one for large requests.
2. The smallest free block of the pool that is large enough is taken; among blocks of equal size, the one at the lowest
   address.
3. If that block is larger than the request, the unused bytes at its end become a free block, if there are enough of
   them: at least 512 bytes in the small pool and in expandable segments, more than 1 MiB in the large pool. Otherwise
   they stay in the allocated block.
4. If no free block is large enough, a new segment is taken from the driver: 2 MiB for a small request, 20 MiB for a
   large request below 10 MiB, else the size of the request rounded up to a multiple of 2 MiB.
5. If the driver has too little memory, all segments without an allocated block are released, and the driver is asked
   once more.

The simulation is not exact in these cases:

- Unless the caller supplies the addresses of new segments, they are invented, in ascending order. The real driver may
  choose another order, which then decides between free blocks of equal size.
- A block that was used on a second stream can be reused at once; the real allocator waits for that stream.
- Private pools of CUDA graphs are not simulated, nor are the callbacks that PyTorch runs to free memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from planner.allocator.blocks import Block, Clock, Driver, Pool, Segment, mapped_segments
from planner.allocator.expandable_segments import ExpandableRanges, expanded_bytes
from planner.allocator.out_of_memory import OutOfMemory, OutOfMemoryReport
from planner.allocator.settings import (
    LARGEST_SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    SMALLEST_BLOCK_BYTES,
    AllocatorSettings,
    round_size,
    segment_size,
)
from planner.plan_types.sizes import format_size


class CachingAllocator:
    """The simulated caching allocator of one device.

    Args:
        settings: Options of the allocator.
        capacity_bytes: Maximum memory of all segments together. None means no limit.
        place: Function that takes the size of a new segment in bytes and returns its address. For an expandable segment
            it is called once, with the size of the whole address range. None means invented, ascending addresses.
        card_bytes: Total memory of the card. It only determines how long the address ranges of expandable segments are.
            None means `capacity_bytes`.
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
        self.driver = Driver(capacity_bytes, place)
        """The driver that memory is taken from."""
        self._clocks = {is_small: Clock() for is_small in (False, True)}
        self._pools: dict[tuple[bool, int], Pool] = {}
        self.heads: dict[int, Block] = {}
        """First block of each segment of fixed size, by address."""
        self.ranges: dict[bool, ExpandableRanges] = {
            is_small: ExpandableRanges(
                page_bytes=SMALL_SEGMENT_BYTES if is_small else settings.large_segment_bytes,
                driver=self.driver,
                card_bytes=capacity_bytes if card_bytes is None else card_bytes,
            )
            for is_small in (False, True)
        }
        """The expandable segments of each size class."""
        self._collects_garbage = settings.allowed_bytes is not None and settings.garbage_collection_threshold > 0
        self.allocated_bytes = 0
        """Total size of all allocated blocks, including unused bytes at their ends that were not split off."""
        self.requested_bytes = 0
        """Total size of the requests that the allocated blocks serve, before rounding."""
        self.peak_allocated_bytes = 0
        self.peak_requested_bytes = 0
        self.retries = 0
        """Number of requests for which all free segments were released (`num_alloc_retries` in PyTorch)."""

    @property
    def reserved_bytes(self) -> int:
        """Memory that is taken from the driver and not released."""
        return self.driver.reserved_bytes

    def record_exchanges(self) -> list[tuple[int, int]]:
        """Returns a list that receives (address, bytes) whenever memory is taken from the driver.

        The bytes are negative if memory is released. With expandable segments, these are ranges of pages.
        """
        self.driver.exchanges = []
        return self.driver.exchanges

    @property
    def peak_reserved_bytes(self) -> int:
        """Maximum of `reserved_bytes` so far."""
        return self.driver.peak_reserved_bytes

    def malloc(self, size_bytes: int, stream: int = 0) -> Block:
        """Allocates a block of at least `size_bytes` bytes.

        Raises:
            OutOfMemory: the block does not fit, even after all free segments were released.
            ValueError: the size is below 1 byte. PyTorch does not ask the allocator for empty storages.
        """
        if size_bytes < 1:
            raise ValueError(
                f"malloc of {size_bytes} bytes is not possible, because PyTorch allocates no block for an empty "
                "storage: ask for at least 1 byte, or leave this request out"
            )
        rounded_bytes = round_size(size_bytes, self._settings)
        pool = self.pool(rounded_bytes <= LARGEST_SMALL_BYTES, stream)
        block = self._take_free(pool, rounded_bytes) or self._take_new(pool, rounded_bytes)
        if self._is_worth_splitting(block, rounded_bytes):
            pool.insert(block.split_off(rounded_bytes))
        block.is_allocated = True
        block.requested_bytes = size_bytes
        self.allocated_bytes += block.size_bytes
        self.requested_bytes += size_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:  # `max` is several times slower, and this runs often
            self.peak_allocated_bytes = self.allocated_bytes
        if self.requested_bytes > self.peak_requested_bytes:
            self.peak_requested_bytes = self.requested_bytes
        return block

    def free(self, block: Block) -> None:
        """Frees a block and merges it with free neighbors. The segment is kept, so no memory returns to the driver.

        Raises:
            ValueError: the block is not allocated.
        """
        if not block.is_allocated:
            raise ValueError(f"the block at {block.address:#x} is freed, but it is free already: free each block once")
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
        """True if a request would get a free block, so that the driver would not be asked for memory.

        The state of the allocator does not change.
        """
        rounded_bytes = round_size(size_bytes, self._settings)
        pool = self.pool(rounded_bytes <= LARGEST_SMALL_BYTES, stream)
        searches = pool.clock.searches
        block = self._take_free(pool, rounded_bytes)
        # Restore what the search has changed: the count of searches, the pool, and the age of the block.
        pool.clock.searches = searches
        if block is None:
            return False
        inserted_at = block.inserted_at
        pool.insert(block)
        block.inserted_at = inserted_at
        return True

    def empty_cache(self) -> None:
        """Releases memory to the driver: all segments without an allocated block.

        Of expandable segments, it releases all pages that are entirely free.
        """
        for pool in self._pools.values():
            if self._settings.expandable_segments:
                self.ranges[pool.is_small].release_free_pages(pool)
            else:
                for block in pool.free_blocks():
                    if block.is_whole_segment():
                        self._release(block)

    @property
    def largest_free_bytes(self) -> int:
        """Size in bytes of the largest free block, of all streams and both size classes; 0 if there is none.

        A request may not get this block. A pool is ordered by size.
        """
        return max((pool[-1].size_bytes for pool in self._pools.values() if len(pool)), default=0)

    def segments(self) -> tuple[Segment, ...]:
        """Returns all segments with their blocks, by ascending address."""
        heads = [*self.heads.values(), *(head for ranges in self.ranges.values() for head in ranges.heads.values())]
        segments = [segment for head in heads for segment in mapped_segments(head)]
        return tuple(sorted(segments, key=lambda segment: segment.address))

    def adopt(self, segments: Iterable[Segment]) -> dict[int, Block]:
        """Adds segments of fixed size with their blocks, so that a simulation can start from a known state.

        Returns:
            The allocated blocks by address.

        Raises:
            ValueError: a segment does not fit in the capacity, or the settings ask for expandable segments.
        """
        live: dict[int, Block] = {}
        for segment in segments:
            if self._settings.expandable_segments or not self.driver.take(segment.size_bytes):
                raise ValueError(
                    f"the segment of {format_size(segment.size_bytes)} at {segment.address:#x} cannot be added to the "
                    "allocator: set expandable_segments to False, and give segments that together fit in the capacity"
                )
            pool = self.pool(segment.is_small, segment.stream)
            block = Block(address=segment.address, size_bytes=segment.size_bytes, pool=pool)
            self.heads[segment.address] = block
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

    def pool(self, is_small: bool, stream: int) -> Pool:
        """Returns the pool of a size class and a stream. The pool is created if it does not exist yet."""
        pool = self._pools.get((is_small, stream))
        if pool is None:
            pool = self._pools[is_small, stream] = Pool(is_small=is_small, stream=stream, clock=self._clocks[is_small])
        return pool

    def _take_free(self, pool: Pool, size_bytes: int) -> Block | None:
        """Removes the free block that suits a request best from the pool, and returns it (`get_free_block` in PyTorch).

        Returns None if no free block suits.
        """
        if self._collects_garbage:
            pool.clock.searches += 1
        index = pool.first_fit_index(size_bytes)
        if index == len(pool):
            return None
        if self._settings.expandable_segments:
            # PyTorch compares blocks by the size to which they can grow, and goes on while the next block's is smaller.
            while index + 1 < len(pool) and expanded_bytes(pool[index + 1]) < expanded_bytes(pool[index]):
                index += 1
        block = pool[index]
        most_bytes = self._settings.max_split_size_bytes
        if most_bytes is not None:
            # Blocks of at least `max_split_size_bytes` only serve requests of at least that size, and only if they are
            # not much larger than the request.
            rest_bytes = block.size_bytes - size_bytes
            if size_bytes < most_bytes <= block.size_bytes:
                return None
            if size_bytes >= most_bytes and rest_bytes >= self._settings.max_non_split_rounding_bytes:
                return None
        pool.remove(block)
        return block

    def _is_worth_splitting(self, block: Block, size_bytes: int) -> bool:
        """True if the bytes of a block after the first `size_bytes` become a free block (`should_split` in PyTorch)."""
        rest_bytes = block.size_bytes - size_bytes
        if block.pool.is_small or self._settings.expandable_segments:
            return rest_bytes >= SMALLEST_BLOCK_BYTES
        most_bytes = self._settings.max_split_size_bytes
        return rest_bytes > LARGEST_SMALL_BYTES and (most_bytes is None or size_bytes < most_bytes)

    def _take_new(self, pool: Pool, size_bytes: int) -> Block:
        """Returns a block of memory that is newly taken from the driver. The block is in no pool.

        If the driver has too little, free segments are released and the driver is asked again, as in PyTorch's
        `malloc` after `get_free_block`.

        Raises:
            OutOfMemory: the block does not fit, even after all free segments were released.
        """
        # PyTorch tries in this order: release old segments (garbage collection), then a few large segments that suffice
        # for the request, then all free segments.
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
            limits = (self.driver.capacity_bytes, self._settings.allowed_bytes)
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
        """Takes memory for one request from the driver, and returns it as a block that is in no pool.

        Returns None if `allowed_bytes` would be exceeded, or if the driver has too little memory.
        """
        new_bytes = segment_size(size_bytes, self._settings)
        allowed_bytes = self._settings.allowed_bytes
        if allowed_bytes is not None and self.driver.reserved_bytes + new_bytes > allowed_bytes:
            return None
        if self._settings.expandable_segments:
            return self.ranges[pool.is_small].allocate(pool, size_bytes)
        if not self.driver.take(new_bytes):
            return None
        block = Block(address=self.driver.place(new_bytes), size_bytes=new_bytes, pool=pool)
        self.heads[block.address] = block
        self.driver.note(block.address, new_bytes)
        return block

    def _release(self, block: Block) -> None:
        """Releases a segment to the driver. `block` is its only block, and is free."""
        block.pool.remove(block)
        del self.heads[block.address]
        self.driver.give_back(block.size_bytes)
        self.driver.note(block.address, -block.size_bytes)

    def _release_oversize(self, pool: Pool, size_bytes: int) -> bool:
        """Releases free segments of at least `max_split_size_bytes` until enough for a request is released.

        If one segment suffices, only the smallest sufficient one is released, else the largest segments first. Returns
        True if enough was released, and always False without `max_split_size_bytes` or with expandable segments
        (`release_available_cached_blocks` in PyTorch).
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
        """Releases old free segments of the large pools if reserved memory exceeds the garbage collection threshold.

        It releases all free segments of at least average age, and repeats this with the remaining free segments until
        reserved memory is at most the threshold (`garbage_collect_cached_blocks` in PyTorch).
        """
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
