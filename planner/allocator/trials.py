"""Allocates the workspaces of convolutions as PyTorch does: if one does not fit, it tries the next algorithm.

Source: aten/src/ATen/native/cudnn/Conv_v8.cpp (`run_single_conv`, `try_configs`). A request that does not fit releases
the cache, raises `OutOfMemoryError`, and is caught. The algorithms come in the order of cuDNN's heuristics. The first
one that runs is remembered by its thread for the same convolution (`benchmark_cache`). The next call tries it first,
and if it does not fit any more, all of them again.

Where it is not exact: PyTorch tells apart convolutions whose tensors have other alignments, and forgets the one that
was used least recently after 10,000 of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.allocator.blocks import Block
from planner.allocator.caching_allocator import CachingAllocator, OutOfMemory
from planner.workspaces.registry import Trials


class WorkspaceTrials:
    """Allocates storages, and those that have `Trials` with the first size that fits.

    Args:
        trials: what is tried for each storage for which something else is tried.
    """

    def __init__(self, trials: Mapping[int, Trials]) -> None:
        self._trials = trials
        self._remembered: dict[str, int] = {}
        self.taken: dict[int, int] = {}
        """Bytes of each storage that got another size than the first one."""

    def malloc(self, allocator: CachingAllocator, storage: int, size_bytes: int, stream: int) -> Block | None:
        """Allocates a storage; returns None if its algorithm needs no memory.

        Raises:
            OutOfMemory: none of the sizes fits.
        """
        trials = self._trials.get(storage)
        if trials is None:
            return allocator.malloc(size_bytes, stream)
        first, *others = trials.sizes_bytes
        latest = self._remembered.get(trials.remembered_as, first)
        failure: OutOfMemory | None = None
        for size in (latest, *(each for each in (first, *others) if each != latest)):
            try:
                block = allocator.malloc(size, stream) if size else None
            except OutOfMemory as error:
                failure = failure or error
                continue
            self._remembered[trials.remembered_as] = size
            if size != first:
                self.taken[storage] = size
            return block
        assert failure is not None  # There is at least one size.
        raise failure
