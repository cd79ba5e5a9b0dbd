"""Certificates: rehearsals of rewritten steps, which are cached and may be started before they are needed.

While the search waits for a recording, another core can rehearse the step that the search is likely to choose.
"""

from __future__ import annotations

from collections.abc import Callable

from planner.derive.graph_cache import GraphCache
from planner.plan_types.decision_base import Decision
from planner.recording.step_graph import StepGraph
from planner.virtual_gpu.forked_process import Running, end_all

Start = Callable[[tuple[Decision, ...]], Running]
"""Starts a child process that rewrites the training step by these decisions and rehearses it twice in a row."""


class Certificates:
    """Makes and caches certificates. Rehearsals can be started before their certificate is asked for.

    One that is only likely to be needed (`foresee`) is ended as soon as another one is more likely. One that is almost
    certainly needed (`begin`) runs on until its certificate is asked for. One that is not needed at once
    (`begin_in_background`) has a low priority, and runs on until its certificate is asked for, or until `close`.
    """

    def __init__(
        self, start: Start, finish: Callable[[StepGraph], StepGraph], *, start_in_background: Start | None = None
    ) -> None:
        """
        Args:
            start: starts the rehearsal of a step.
            finish: adds the workspaces of kernels to a recording, which does not contain them.
            start_in_background: starts the rehearsal of a step with a low priority; if None, `start` is used.
        """
        self._start, self._finish = start, finish
        self._start_in_background = start_in_background or start
        self._cached: GraphCache[tuple[Decision, ...]] = GraphCache()
        self._begun: dict[tuple[Decision, ...], Running] = {}
        """Rehearsals that were started by `begin`."""
        self._in_background: dict[tuple[Decision, ...], Running] = {}
        """Rehearsals that were started by `begin_in_background`."""
        self._ahead: tuple[tuple[Decision, ...], Running] | None = None
        """Decisions and process of the rehearsal that was started by `foresee`; None if there is none."""

    def of(self, decisions: tuple[Decision, ...]) -> StepGraph:
        """Returns the certificate of `decisions`, from the cache or by a rehearsal."""
        graph = self._cached.get(decisions)
        if graph is None:
            graph = self._cached.add(decisions, self._finish(self._child(decisions).result()))
        return graph

    def begin(self, decisions: tuple[Decision, ...]) -> None:
        """Start to rehearse the step with these decisions, whose certificate will almost certainly be needed.

        A rehearsal that `foresee` has started for other decisions ends.
        """
        if not self._is_known(decisions):
            foreseen = self._foreseen(decisions)
            self.forget()
            self._begun[decisions] = foreseen or self._start(decisions)

    def begin_in_background(self, decisions: tuple[Decision, ...]) -> None:
        """Start a rehearsal with a low priority. It runs on until its certificate is asked for, or until `close`.

        If `foresee` has already started this rehearsal, it runs on with its normal priority. Does nothing if the
        rehearsal was begun before, or if the certificate is known.
        """
        if not self._is_known(decisions):
            self._in_background[decisions] = self._foreseen(decisions) or self._start_in_background(decisions)

    def is_ready(self, decisions: tuple[Decision, ...]) -> bool:
        """True if `of` returns the certificate of decisions without waiting. What `foresee` started does not count."""
        child = self._begun.get(decisions) or self._in_background.get(decisions)
        return decisions in self._cached or (child is not None and child.is_ready)

    def foresee(self, decisions: tuple[Decision, ...]) -> None:
        """Start the rehearsal of decisions that will probably be needed next, and end another one that was foreseen.

        Nothing is started while a rehearsal that was begun is running: it would only take longer.
        """
        is_ahead = self._ahead is not None and self._ahead[0] == decisions
        if self._is_known(decisions) or is_ahead or not all(child.is_ready for child in self._begun.values()):
            return
        self.forget()
        self._ahead = decisions, self._start(decisions)

    def forget(self, decisions: tuple[Decision, ...] | None = None) -> None:
        """End the rehearsal that was started by `foresee`, because its certificate will not be needed.

        Args:
            decisions: the rehearsal ends only if it was started for these decisions; None to end it in any case.
        """
        if self._ahead is not None and decisions in (None, self._ahead[0]):
            (_, child), self._ahead = self._ahead, None
            child.end()

    def close(self) -> None:
        """End all rehearsals that are still running."""
        self._end_begun()
        end_all(self._in_background.values())
        self._in_background.clear()

    def _is_known(self, decisions: tuple[Decision, ...]) -> bool:
        """True if the certificate is cached, or its rehearsal was begun and is not ended by `forget`."""
        return decisions in self._cached or decisions in self._begun or decisions in self._in_background

    def _end_begun(self) -> None:
        self.forget()
        end_all(self._begun.values())
        self._begun.clear()

    def _child(self, decisions: tuple[Decision, ...]) -> Running:
        """Returns the rehearsal of decisions. If it was not begun, those that were begun for other decisions end.

        Rehearsals in the background go on.
        """
        for children in (self._begun, self._in_background):
            if decisions in children:
                return children.pop(decisions)
        foreseen = self._foreseen(decisions)
        self._end_begun()
        return foreseen or self._start(decisions)

    def _foreseen(self, decisions: tuple[Decision, ...]) -> Running | None:
        """Returns the rehearsal that was started by `foresee`, which then belongs to the caller; None for others."""
        if self._ahead is None or self._ahead[0] != decisions:
            return None
        (_, child), self._ahead = self._ahead, None
        return child
