"""Converts a recording to the stream of allocations and frees that the caching allocator receives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from planner.recording.step_graph import StepGraph, round_up


def allocation_stream(graph: StepGraph) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the events of a recording in order of time.

    Returns:
        Three int64 arrays with one item for each event: id of the block, size in bytes (0 for a free), and tick. At
        each tick, frees come before allocations. Blocks are freed in reverse order of their allocation, as C++ destroys
        the variables of a scope. Storages that live to the end of the recording are not freed.
    """
    events = []
    identity = itertools.count()
    for storage, spans in zip(graph.storages, graph.spans(), strict=True):
        for start, stop in spans:
            block = next(identity)
            # The first three items order the events: by tick, frees (0) first, and frees by descending block id.
            events.append((start, 1, block, block, storage.size_bytes))
            if stop < graph.ticks:
                events.append((stop, 0, -block, block, 0))
    events.sort()
    table = np.array(events, dtype=np.int64).reshape(-1, 5)
    return table[:, 3], table[:, 4], table[:, 0]


def streams_of_blocks(graph: StepGraph) -> dict[int, int]:
    """Returns the CUDA stream of each block of `allocation_stream` that is not allocated in the default stream."""
    if not any(storage.stream for storage in graph.storages):
        return {}
    of_lives = (storage.stream for storage, spans in zip(graph.storages, graph.spans(), strict=True) for _ in spans)
    return {block: stream for block, stream in enumerate(of_lives) if stream}


def signed_sizes(ids: Sequence[int], sizes: Sequence[int], *, granularity_bytes: int) -> list[int]:
    """Returns the change of allocated bytes at each event: positive for an allocation, negative for a free.

    Args:
        ids, sizes: block ids and sizes in bytes from `allocation_stream`.
        granularity_bytes: multiple to which sizes are rounded up.
    """
    allocated: dict[int, int] = {}
    changes = []
    for block, size in zip(ids, sizes, strict=True):
        if size:
            allocated[int(block)] = round_up(int(size), granularity_bytes)
            changes.append(allocated[int(block)])
        else:
            changes.append(-allocated[int(block)])
    return changes
