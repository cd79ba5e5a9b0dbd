"""Converts a recording to the stream of allocations and frees that the caching allocator receives."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from planner.allocator.replay import Round
from planner.recording.step_graph import StepGraph, round_up
from planner.workspaces.registry import Trials


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


def last_round(graph: StepGraph, stream: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Round | None:
    """Finds the last steps of a recording, which all later steps repeat.

    Such a step may keep storages that a later step frees, such as gradients, or outputs in a queue. The storages that
    are alive after the step take the places of those before it: storages of the same category, name, dtype and size, in
    the order of allocation.

    Args:
        stream: the result of `allocation_stream`.

    Returns:
        None if the recording has no such steps, for example if it has only one step.
    """
    period = graph.schedule.period
    if not graph.schedule.repeats or not period < graph.steps == len(graph.step_starts):
        return None
    ids, sizes, ticks = (column.tolist() for column in stream)
    start = bisect.bisect_right(ticks, graph.step_starts[-period])
    events = [*zip(ids, sizes, strict=True)]
    kinds = [
        (storage.category, storage.name, storage.dtype, storage.size_bytes)
        for storage, spans in zip(graph.storages, graph.spans(), strict=True)
        for _ in spans
    ]
    before, after = _alive(events[:start], kinds), _alive(events, kinds)
    if any(len(blocks) > len(before[kind]) for kind, blocks in after.items()):
        return None  # the step keeps more than the one before it did, so it does not repeat
    pairs = (zip(reversed(blocks), reversed(before[kind]), strict=False) for kind, blocks in after.items())
    succeeds = {block: earlier for each in pairs for block, earlier in each if block != earlier}
    return Round(start, succeeds)


def _alive(events: Iterable[tuple[int, int]], kinds: Sequence[object]) -> dict[object, list[int]]:
    """Returns the blocks that are allocated after these events, by kind, in the order of their allocation."""
    alive: dict[int, None] = {}
    for block, size_bytes in events:
        if size_bytes:
            alive[block] = None
        else:
            alive.pop(block, None)
    of_kind: dict[object, list[int]] = collections.defaultdict(list)
    for block in alive:
        of_kind[kinds[block]].append(block)
    return of_kind


def streams_of_blocks(graph: StepGraph) -> dict[int, int]:
    """Returns the CUDA stream of each block of `allocation_stream` that is not allocated in the default stream."""
    if not any(storage.stream for storage in graph.storages):
        return {}
    of_lives = (storage.stream for storage, spans in zip(graph.storages, graph.spans(), strict=True) for _ in spans)
    return {block: stream for block, stream in enumerate(of_lives) if stream}


def trials_of_blocks(graph: StepGraph, *, fastest: bool = False) -> dict[int, Trials]:
    """Returns what is tried for each block of `allocation_stream` if it does not fit, where something else is tried.

    Args:
        fastest: True if no smaller size may be taken. Then only the searches for the fastest algorithm are left.
    """
    of_lives = (storage.trials for storage, spans in zip(graph.storages, graph.spans(), strict=True) for _ in spans)
    found = {block: trials for block, trials in enumerate(of_lives) if trials is not None}
    if not fastest:
        return found
    return {
        block: dataclasses.replace(trials, sizes_bytes=trials.sizes_bytes[:1])
        for block, trials in found.items()
        if trials.search is not None
    }


def storages_of_blocks(graph: StepGraph, blocks: Iterable[int]) -> list[int]:
    """Returns the index of the storage of each of these blocks of `allocation_stream`."""
    of_lives = [index for index, spans in enumerate(graph.spans()) for _ in spans]
    return [of_lives[block] for block in blocks]


def with_taken(graph: StepGraph, taken: Mapping[int, int]) -> StepGraph:
    """Returns the recording with the sizes that blocks of `allocation_stream` took instead of their first ones.

    Args:
        taken: sizes by block, of storages with one life, as workspaces have.
    """
    if not taken:
        return graph
    sizes = dict(zip(storages_of_blocks(graph, taken), taken.values(), strict=True))
    storages = [
        dataclasses.replace(storage, size_bytes=sizes[index]) if index in sizes else storage
        for index, storage in enumerate(graph.storages)
    ]
    return dataclasses.replace(graph, storages=storages)


def with_largest(graph: StepGraph, searched: Mapping[int, int]) -> StepGraph:
    """Returns the recording with storages that are as large as the blocks in which their algorithms were searched for.

    Args:
        searched: sizes by block of `allocation_stream`. Such a block is freed before the storage is allocated.
    """
    sizes = zip(storages_of_blocks(graph, searched), searched.items(), strict=True)
    return with_taken(graph, {block: size for index, (block, size) in sizes if size > graph.storages[index].size_bytes})


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
