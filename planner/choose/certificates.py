"""Certificates: rehearsals of rewritten steps, cached, and started before they are needed.

While the search waits for a recording, another core can rehearse the step that the search is likely to choose.
"""

from __future__ import annotations

from collections.abc import Callable

from planner.plan_types.decision_base import Decision
from planner.recording.step_graph import StepGraph
from planner.virtual_gpu.forked_process import Child

_MOST_OPS = 200_000
"""Maximum number of ops in all cached certificates; an op takes about a kilobyte."""

Start = Callable[[tuple[Decision, ...]], Child]
"""Starts to rehearse two full steps that are rewritten by these decisions."""


class Certificates:
    """Certificates by decisions. At most one runs ahead, without having been asked for."""

    def __init__(self, start: Start, finish: Callable[[StepGraph], StepGraph]) -> None:
        """
        Args:
            finish: adds what a rehearsal cannot show (workspaces).
        """
        self._start, self._finish = start, finish
        self._cached: dict[tuple[Decision, ...], StepGraph] = {}
        """From the least to the most recently used."""
        self._ahead: tuple[tuple[Decision, ...], Child] | None = None
        """The certificate that was started without having been asked for."""

    def of(self, decisions: tuple[Decision, ...], *, then: tuple[Decision, ...] | None = None) -> StepGraph:
        """The certificate of these decisions, rehearsed or from the cache.

        Args:
            then: the decisions that will be asked for next; their rehearsal starts before this one is waited for.
        """
        child = None if decisions in self._cached else self._child(decisions)
        if then is not None:
            self.foresee(then)
        graph = self._cached.pop(decisions) if child is None else self._finish(child.result())
        self._cached[decisions] = graph
        while len(self._cached) > 1 and sum(len(graph.ops) for graph in self._cached.values()) > _MOST_OPS:
            del self._cached[next(iter(self._cached))]
        return graph

    def foresee(self, decisions: tuple[Decision, ...]) -> None:
        """Start the rehearsal that will likely be asked for next, instead of the one that was foreseen before."""
        if decisions in self._cached or (self._ahead is not None and self._ahead[0] == decisions):
            return
        self.forget()
        self._ahead = decisions, self._start(decisions)

    def forget(self) -> None:
        """End the rehearsal that was foreseen: it will not be asked for."""
        if self._ahead is not None:
            self._ahead[1].end()
            self._ahead = None

    def _child(self, decisions: tuple[Decision, ...]) -> Child:
        if self._ahead is not None and self._ahead[0] == decisions:
            (_, child), self._ahead = self._ahead, None
            return child
        self.forget()
        return self._start(decisions)
