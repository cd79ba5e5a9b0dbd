"""Keeps recordings in memory up to a number of ops. A recording of a large model takes hundreds of megabytes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from planner.recording.step_graph import StepGraph

_MOST_OPS = 200_000
"""Maximum number of ops in all recordings of a cache together. An op takes about a kilobyte of memory."""

Key = TypeVar("Key", bound=Hashable)


class GraphCache(Generic[Key]):
    """The recordings that were used last. The last one is kept even if it alone has more than the maximum of ops."""

    def __init__(self, most_ops: int = _MOST_OPS) -> None:
        self._most_ops = most_ops
        self._graphs: dict[Key, StepGraph] = {}
        """From the least to the most recently used."""

    def __contains__(self, key: Key) -> bool:
        return key in self._graphs

    def get(self, key: Key) -> StepGraph | None:
        """Returns a recording, which counts as used; None if it is not kept."""
        graph = self._graphs.pop(key, None)
        if graph is not None:
            self._graphs[key] = graph
        return graph

    def add(self, key: Key, graph: StepGraph) -> StepGraph:
        """Keep a recording, and drop those that were not used for the longest time. Returns the recording."""
        self._graphs.pop(key, None)
        self._graphs[key] = graph
        ops = sum(len(kept.ops) for kept in self._graphs.values())
        while len(self._graphs) > 1 and ops > self._most_ops:
            ops -= len(self._graphs.pop(next(iter(self._graphs))).ops)
        return graph

    def clear(self) -> None:
        """Drop all recordings."""
        self._graphs.clear()
