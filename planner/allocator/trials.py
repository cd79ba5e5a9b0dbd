"""Allocates the workspaces of convolutions as PyTorch does: if one does not fit, it tries the next algorithm.

Source: aten/src/ATen/native/cudnn/Conv_v8.cpp (`run_single_conv`, `try_configs`). A request that does not fit releases
the cache, raises `OutOfMemoryError`, and is caught. The algorithms come in the order of cuDNN's heuristics. The first
one that runs is remembered by its thread for the same convolution (`benchmark_cache`). The next call tries it first,
and if it does not fit any more, all of them again.

With `torch.backends.cudnn.benchmark = True` (`get_plans_from_find`, `generate_and_filter_plans`, `try_plans`, and
cudnn_frontend_find_plan.h, `time_sorted_plan`), a convolution that has no remembered algorithm searches for one:

1. Algorithms are left out if their workspace is larger than the free memory of the card, or than the largest free block
   of the allocator if that is more (`cacheInfo`).
2. A block for the largest workspace of the others is allocated. If it does not fit, half of it is tried, and so on, and
   the algorithms that need more are left out, too.
3. The times of the first algorithms are measured in this block, at most `torch.backends.cudnn.benchmark_limit` of those
   that run. The block is freed, and the cache is emptied.
4. The fastest one runs, and is remembered.

Where it is not exact: PyTorch tells apart convolutions whose tensors have other alignments, and forgets the one that
was used least recently after 10,000 of them. Without the card it is not known which algorithm is the fastest, so the
one with the largest workspace is taken: the allocated bytes are an upper bound. If an algorithm fails on the card,
PyTorch compares one more, which may need more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from planner.allocator.blocks import Block
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.out_of_memory import OutOfMemory
from planner.workspaces.registry import Search, Trials


def _nothing(block: Block) -> None:
    """Does nothing with the block of a search."""


class WorkspaceTrials:
    """Allocates storages, and those that have `Trials` with the first size that fits.

    Args:
        trials: what is tried for each storage for which something else is tried.
        on_search: called with the block of each search before it is freed.
    """

    def __init__(self, trials: Mapping[int, Trials], on_search: Callable[[Block], None] = _nothing) -> None:
        self._trials = trials
        self._on_search = on_search
        self._remembered: dict[str, int] = {}
        self.taken: dict[int, int] = {}
        """Bytes of each storage that got another size than the first one."""
        self.searched: dict[int, int] = {}
        """Bytes of the block of the search for each storage whose algorithm was searched for."""

    def malloc(self, allocator: CachingAllocator, storage: int, size_bytes: int, stream: int) -> Block | None:
        """Allocates a storage; returns None if its algorithm needs no memory.

        Raises:
            OutOfMemory: none of the sizes fits.
        """
        trials = self._trials.get(storage)
        if trials is None:
            return allocator.malloc(size_bytes, stream)
        first, *others = trials.sizes_bytes
        latest = self._remembered.get(trials.remembered_as)
        sizes = [first, *others] if latest is None else [latest, *(each for each in (first, *others) if each != latest)]
        failure: OutOfMemory | None = None
        if trials.search is not None:
            if latest is not None:
                try:
                    return self._taken(trials, storage, latest, allocator.malloc(latest, stream) if latest else None)
                except OutOfMemory as error:
                    failure = error
            most = max(self._search(trials.search, allocator, storage, stream), default=0)
            sizes = [size for size in sizes if size <= most] or sizes[-1:]
        for size in sizes:
            try:
                return self._taken(trials, storage, size, allocator.malloc(size, stream) if size else None)
            except OutOfMemory as error:
                failure = failure or error
        assert failure is not None  # There is at least one size.
        raise failure

    def _taken(self, trials: Trials, storage: int, size_bytes: int, block: Block | None) -> Block | None:
        self._remembered[trials.remembered_as] = size_bytes
        if size_bytes != trials.sizes_bytes[0]:
            self.taken[storage] = size_bytes
        return block

    def _search(self, search: Search, allocator: CachingAllocator, storage: int, stream: int) -> tuple[int, ...]:
        """Tries the algorithms in one block, and returns the sizes of those whose times are compared.

        Afterwards the block is free, and the cache is empty.
        """
        available = _largest_available_bytes(allocator, search.card_bytes)
        largest = max((size for size in search.plans_bytes if size <= available), default=0)
        block = None
        while largest and block is None:
            try:
                block = allocator.malloc(largest, stream)
            except OutOfMemory:
                largest //= 2
                available = largest
        if block is not None:
            self.searched[storage] = largest
            self._on_search(block)
            allocator.free(block)
        allocator.empty_cache()
        return search.compared(available)


def _largest_available_bytes(allocator: CachingAllocator, card_bytes: int) -> int:
    """Returns what PyTorch takes for the largest block that it could get: the free memory, or a larger free block.

    Args:
        card_bytes: maximum memory of all segments together on the card. A smaller capacity counts instead.
    """
    capacity = allocator.driver.capacity_bytes
    limit = card_bytes if capacity is None else min(card_bytes, capacity)
    return max(limit - allocator.reserved_bytes, allocator.largest_free_bytes)
