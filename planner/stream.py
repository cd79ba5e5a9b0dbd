"""The stream of allocations and frees that a recording is to the caching allocator."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Sequence

import numpy as np

from planner.step_graph import StepGraph, round_up


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """A place where two streams differ: what the recorded one has there, and what the rehearsed one has."""

    at_event: int
    """Position in the rehearsed stream."""
    recorded: tuple[int, ...]
    """Bytes taken (positive) and freed (negative), each rounded up to the allocator's granularity."""
    rehearsed: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """How much of a recorded stream a rehearsed one has, in the same order."""

    matched_bytes: int
    recorded_bytes: int
    """Of all allocations."""
    differences: tuple[Difference, ...]

    @property
    def matched_share(self) -> float:
        return self.matched_bytes / self.recorded_bytes


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


def compare(recorded: Sequence[int], rehearsed: Sequence[int]) -> Comparison:
    """Align two streams of signed sizes, as a text diff aligns lines (Ratcliff and Obershelp, `difflib`)."""
    matcher = difflib.SequenceMatcher(None, rehearsed, recorded, autojunk=False)
    same = sum(size for a, _, count in matcher.get_matching_blocks() for size in rehearsed[a : a + count] if size > 0)
    differences = tuple(
        Difference(at_event=a, recorded=tuple(recorded[c:d]), rehearsed=tuple(rehearsed[a:b]))
        for kind, a, b, c, d in matcher.get_opcodes()
        if kind != "equal"
    )
    total = sum(size for size in recorded if size > 0)
    return Comparison(matched_bytes=same, recorded_bytes=total, differences=differences)
