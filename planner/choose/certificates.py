"""Certificates: rehearsals of rewritten steps, kept while they may be asked for again, or begun before they are.

While the search waits for a recording, another core may rehearse the step that the search is likely to choose.
"""

from __future__ import annotations

from collections.abc import Callable

from planner.plan_types.decisions import Decision
from planner.recording.step_graph import StepGraph
from planner.virtual_gpu.forked_process import Child

_MOST_OPS = 200_000
"""Of certificates that are kept at hand; an op takes about a kilobyte."""

Start = Callable[[tuple[Decision, ...]], Child]
"""Begin to rehearse two full steps, rewritten by decisions."""


class Certificates:
    """By decisions. One at most is in the making without having been asked for."""

    def __init__(self, start: Start, finish: Callable[[StepGraph], StepGraph]) -> None:
        self._start, self._finish = start, finish
        self._made: dict[tuple[Decision, ...], StepGraph] = {}
        self._foreseen: tuple[tuple[Decision, ...], Child] | None = None

    def of(self, decisions: tuple[Decision, ...], *, then: tuple[Decision, ...] | None = None) -> StepGraph:
        """Rehearsed, or still at hand: a search under several budgets comes to the same decisions again.

        Args:
            then: what will be asked for next; it is begun before this one is waited for.
        """
        child = None if decisions in self._made else self._child(decisions)
        if then is not None:
            self.foresee(then)
        graph = self._made.pop(decisions) if child is None else self._finish(child.result())
        self._made[decisions] = graph
        while len(self._made) > 1 and sum(len(graph.ops) for graph in self._made.values()) > _MOST_OPS:
            del self._made[next(iter(self._made))]
        return graph

    def foresee(self, decisions: tuple[Decision, ...]) -> None:
        """Begin with what will likely be asked for next, and leave what was foreseen before."""
        if decisions in self._made or (self._foreseen is not None and self._foreseen[0] == decisions):
            return
        self.forget()
        self._foreseen = decisions, self._start(decisions)

    def forget(self) -> None:
        """What was foreseen will not be asked for."""
        if self._foreseen is not None:
            self._foreseen[1].end()
            self._foreseen = None

    def _child(self, decisions: tuple[Decision, ...]) -> Child:
        if self._foreseen is not None and self._foreseen[0] == decisions:
            (_, child), self._foreseen = self._foreseen, None
            return child
        self.forget()
        return self._start(decisions)
