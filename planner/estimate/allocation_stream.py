"""The stream of allocations and frees that a recording is to the caching allocator."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from planner.recording.step_graph import StepGraph, round_up


def allocation_stream(graph: StepGraph) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int64 arrays of one length, in order of time: block ids, sizes in bytes (0 for a free), ticks.

    At one tick blocks are freed before others are taken, the last one taken first, as C++ leaves a scope. What lives to
    the end of the recording is not freed.
    """
    events = []
    identity = itertools.count()
    for storage, spans in zip(graph.storages, graph.spans(), strict=True):
        for start, stop in spans:
            life = next(identity)
            events.append((start, 1, life, life, storage.size_bytes))
            if stop < graph.ticks:
                events.append((stop, 0, -life, life, 0))
    events.sort()
    table = np.array(events, dtype=np.int64).reshape(-1, 5)
    return table[:, 3], table[:, 4], table[:, 0]


def signed_sizes(ids: Sequence[int], sizes: Sequence[int], *, granularity_bytes: int) -> list[int]:
    """Of each event: bytes taken, or minus the bytes given back."""
    taken: dict[int, int] = {}
    result = []
    for block, size in zip(ids, sizes, strict=True):
        if size:
            taken[int(block)] = round_up(int(size), granularity_bytes)
            result.append(taken[int(block)])
        else:
            result.append(-taken[int(block)])
    return result
