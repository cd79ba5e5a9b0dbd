"""Keeps recordings in memory up to a number of ops. A recording of a large model takes hundreds of megabytes.

Recordings that are derived from others may leave memory, because they can be derived again (`DerivedGraph`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from planner.recording.step_graph import StepGraph

_MOST_OPS = 200_000
"""Maximum number of ops in all recordings of a cache together. An op takes about a kilobyte of memory."""

Key = TypeVar("Key", bound=Hashable)


class GraphCache(Generic[Key]):
    """Keeps the most recently used recordings. The last one is kept even if it alone has more ops than the maximum."""

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
        """Keep a recording, and drop the least recently used ones if there are too many ops. Returns the recording."""
        self._graphs.pop(key, None)
        self._graphs[key] = graph
        ops = sum(len(kept.ops) for kept in self._graphs.values())
        while len(self._graphs) > 1 and ops > self._most_ops:
            ops -= len(self._graphs.pop(next(iter(self._graphs))).ops)
        return graph


class DerivedGraph:
    """A recording that is derived from others when it is asked for, unless it is in the cache."""

    def __init__(
        self, derive: Callable[[], StepGraph], cache: GraphCache[object], graph: StepGraph | None = None
    ) -> None:
        """
        Args:
            derive: derives the recording. It must return an equal recording each time.
            cache: keeps the recording while it is used.
            graph: the recording, if it has been derived already.
        """
        self._derive, self._cache = derive, cache
        self._key = object()  # not this object, so that no cycle of references keeps the recording in memory
        if graph is not None:
            cache.add(self._key, graph)

    def __call__(self) -> StepGraph:
        """Returns the recording."""
        graph = self._cache.get(self._key)
        return self._cache.add(self._key, self._derive()) if graph is None else graph
