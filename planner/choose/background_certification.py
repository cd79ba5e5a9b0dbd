"""Certifies the plans of a trade-off while the search for further ones goes on.

Each plan is rehearsed, and then measured under the smallest budget in which it runs. Both are done in child processes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import statistics
import time

from planner.choose import fitting
from planner.choose.choice import Choice
from planner.choose.planning_session import Certified, PlanningSession
from planner.errors import PlannerError
from planner.estimate.footprint import smallest_of
from planner.plan_types.decision_base import Decision
from planner.profiles.device import DeviceProfile
from planner.recording.step_graph import StepGraph
from planner.virtual_gpu.forked_process import Child, Refuse

_PAUSE_SECONDS = 0.02
"""Time between two looks at the processes that certify plans, while they are waited for."""


@dataclasses.dataclass(kw_only=True)
class _InWork:
    """A choice that is being certified."""

    choice: Choice
    seconds: float = 0.0
    """CPU time in seconds of the processes that have been used for it so far."""
    graph: StepGraph | None = None
    """Its certificate; None while the step is being rehearsed."""
    child: Child | None = None
    """The process that searches the smallest budget in which it runs; None while the step is being rehearsed."""


class BackgroundCertification:
    """Certifies choices while the search goes on, and measures each plan under the smallest budget in which it runs.

    At most two choices are in work at a time, each in a process of low priority: the step of one is rehearsed, and the
    smallest budget is searched for another one, whose step has been rehearsed.
    """

    def __init__(self, session: PlanningSession, seconds: float) -> None:
        """
        Args:
            seconds: estimate of the CPU time of a choice, until the first one is finished.
        """
        self._session, self._estimated_seconds = session, seconds
        self._added: set[tuple[Decision, ...]] = set()
        self._waiting: collections.deque[Choice] = collections.deque()
        self._rehearsed: _InWork | None = None
        self._measured: _InWork | None = None
        self._seconds: list[float] = []
        """CPU time of each plan that is finished. It depends less on the load of the machine than the duration."""
        self._failed: list[Choice] = []
        """Choices whose rehearsal has failed, until `settle` rehearses them again."""
        self._error: PlannerError | None = None
        """The error of a process that measured a plan, until `settle` raises it; None if there is none."""
        self._unchecked: list[Certified] = []
        """Plans for which `settle` has not checked yet that the recordings were right."""
        self.points: list[Certified] = []
        """The plans that are finished."""

    def add(self, choice: Choice | None) -> None:
        """Certify a choice as soon as possible; each choice is certified once. Does nothing if the choice is None."""
        if choice is not None and choice.decisions not in self._added:
            self._added.add(choice.decisions)
            self._waiting.append(choice)

    @property
    def seconds_left(self) -> float:
        """Estimate of the time in seconds that the unfinished choices need, and one more. Two are in work at a time."""
        seconds = statistics.fmean(self._seconds) if self._seconds else self._estimated_seconds
        return seconds * (self._unfinished + 1) / 2

    @property
    def _unfinished(self) -> int:
        return len(self._waiting) + (self._rehearsed is not None) + (self._measured is not None)

    def advance(self) -> None:
        """Take what the processes have finished, and start the next ones. Never waits.

        Errors are raised later, by `settle`, because the search takes some errors for those of its own rehearsals.
        """
        try:
            if self._measured is not None and self._measured.child is not None and self._measured.child.is_ready:
                work, self._measured = self._measured, None
                self._finish(work)
            if self._rehearsed is not None and self._measured is None and self._is_rehearsed(self._rehearsed.choice):
                work, self._rehearsed = self._rehearsed, None
                self._measure(work)
        except PlannerError as error:
            self._error = error
        if self._rehearsed is None and self._waiting:
            self._rehearsed = _InWork(choice=self._waiting.popleft())
            if decisions := self._rehearsed.choice.rehearsed:
                self._session.certificates.begin_in_background(decisions)

    def _is_rehearsed(self, choice: Choice) -> bool:
        return not choice.rehearsed or self._session.certificates.is_ready(choice.rehearsed)

    def _measure(self, work: _InWork) -> None:
        """Start to search the smallest budget of a choice whose step has been rehearsed."""
        before = _seconds_of_children()
        try:
            work.graph = self._session.certificate_of(work.choice)
        except PlannerError:
            self._failed.append(work.choice)
            return
        work.seconds += _seconds_of_children() - before
        alternatives = self._session.with_each_allocator(work.choice)
        work.child = Child(functools.partial(_smallest_total, work.graph, self._session.card, alternatives))
        work.child.in_background()
        self._measured = work

    def _finish(self, work: _InWork) -> None:
        """Note a plan whose smallest budget is known."""
        assert work.graph is not None and work.child is not None
        before = _seconds_of_children()
        point = self._session.with_allocator(work.choice, work.graph, work.child.result())
        self.points.append(point)
        self._unchecked.append(point)
        self._seconds.append(work.seconds + _seconds_of_children() - before)

    def settle(self) -> None:
        """Raise errors, and end the search if recordings were wrong (`fitting.check_recordings`).

        It has to be called by `fitting.repeated_if_dropped`.
        """
        if self._error is not None:
            raise self._error
        while self._failed:
            choice = self._failed.pop()
            fitting.certify(self._session, choice)
            self._waiting.append(choice)
        while self._unchecked:
            fitting.check_recordings(self._session, self._unchecked.pop())

    def wait(self, most: int = 0) -> None:
        """Wait until at most this number of choices are unfinished. The checks of the watch have to call `advance`.

        It has to be called by `fitting.repeated_if_dropped`, since it raises what `settle` raises.
        """
        watch, number = self._session.watch, len(self._added)
        self.settle()
        while self._unfinished > most:
            watch.stage(f"certifying plan {number - self._unfinished + 1} of {number}")
            watch.check()
            self.settle()
            time.sleep(_PAUSE_SECONDS)

    def close(self) -> None:
        """End the search of a smallest budget that is still running."""
        if self._measured is not None and self._measured.child is not None:
            self._measured.child.end()


def _seconds_of_children() -> float:
    """Returns the CPU time in seconds of the child processes that have ended; 0 on Windows."""
    times = os.times()
    return times.children_user + times.children_system


def _smallest_total(
    graph: StepGraph, card: DeviceProfile, alternatives: list[tuple[Decision, ...]], refuse: Refuse
) -> int:
    """Runs in a child process: returns the smallest total in bytes in which a step runs (`smallest_of`)."""
    return smallest_of(graph, card, alternatives, fastest=True)
