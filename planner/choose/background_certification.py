"""Certifies the plans of a trade-off while the search for further ones goes on.

Child processes rehearse each plan, and then search for the smallest budget in which it runs. The plan is measured under
that budget.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import statistics
import time

from planner.choose import fitting
from planner.choose.choice import Certified, Choice
from planner.choose.planning_session import PlanningSession
from planner.errors import PlannerError
from planner.estimate.smallest_total import smallest_of
from planner.plan_types.decision_base import Decision
from planner.profiles.device import DeviceProfile
from planner.recording.step_graph import StepGraph
from planner.virtual_gpu.forked_process import Child, Refuse

_PAUSE_SECONDS = 0.02
"""Time in seconds between two checks of the child processes, while they are waited for."""


@dataclasses.dataclass(kw_only=True)
class _Measurement:
    """A choice whose smallest budget is being searched for."""

    choice: Choice
    graph: StepGraph
    """Its certificate."""
    child: Child
    """The process that searches for the smallest budget."""
    seconds: float
    """CPU time in seconds of its rehearsal."""


class BackgroundCertification:
    """Certifies choices while the search goes on, and measures each plan under the smallest budget in which it runs.

    At most two choices are being certified at a time, each by a child process of low priority: the step of one choice
    is rehearsed. For another one, which has been rehearsed, the smallest budget is searched for.
    """

    def __init__(self, session: PlanningSession, first_estimate_seconds: float) -> None:
        """
        Args:
            first_estimate_seconds: estimated time in seconds to certify a choice, used until one is certified.
        """
        self._session, self._first_estimate_seconds = session, first_estimate_seconds
        self._added: dict[tuple[Decision, ...], int] = {}
        """By the rehearsed decisions of each choice that was added: how often something had been left out before."""
        self._waiting: collections.deque[Choice] = collections.deque()
        self._in_rehearsal: Choice | None = None
        """The choice that is being rehearsed, or that has been rehearsed and waits for its measurement."""
        self._in_measurement: _Measurement | None = None
        self._seconds: list[float] = []
        """CPU time in seconds of each certified plan. CPU time varies less with the machine's load than wall time."""
        self._failed: list[Choice] = []
        """Choices whose rehearsal has failed, until `raise_errors` rehearses them again."""
        self._error: PlannerError | None = None
        """Any other error that `advance` has met, for `raise_errors`."""
        self._unchecked: list[Certified] = []
        """Plans that are not what was promised, until `raise_errors` has checked that the recordings were right."""
        self.points: list[Certified] = []
        """The certified plans, each measured under the smallest budget in which it runs."""

    def add(self, choice: Choice | None) -> None:
        """Queue a choice, which `advance` will certify.

        Does nothing if the choice is None, or if a choice with the same rehearsed decisions was added before.
        """
        if choice is not None and choice.rehearsed_decisions not in self._added:
            self._added[choice.rehearsed_decisions] = self._session.searches.number_left_out
            self._waiting.append(choice)

    @property
    def needed_seconds(self) -> float:
        """Estimated time in seconds to certify all unfinished choices and one further choice, two at a time.

        On Windows it is 0 after the first certificate, because the CPU time of child processes is unknown there.
        """
        seconds = statistics.fmean(self._seconds) if self._seconds else self._first_estimate_seconds
        return seconds * (self._unfinished + 1) / 2

    @property
    def _unfinished(self) -> int:
        return len(self._waiting) + (self._in_rehearsal is not None) + (self._in_measurement is not None)

    def advance(self) -> None:
        """Collect the results of child processes that have finished, and start the next ones. Never waits.

        `raise_errors` raises errors later, because the search would take some of them for those of its own rehearsals.
        """
        try:
            if self._in_measurement is not None and self._in_measurement.child.is_ready:
                self._finish_measurement(self._in_measurement)
            if self._in_rehearsal is None and self._waiting:
                self._in_rehearsal = self._waiting.popleft()
            if self._in_rehearsal is not None and not self._is_rehearsed(self._in_rehearsal):
                # Does nothing while the rehearsal is running. But the search may have ended it.
                self._session.certificates.begin_in_background(self._in_rehearsal.rehearsed_decisions)
            elif self._in_rehearsal is not None and self._in_measurement is None:
                choice, self._in_rehearsal = self._in_rehearsal, None
                self._begin_measurement(choice)
        except PlannerError as error:
            self._error = error

    def _is_rehearsed(self, choice: Choice) -> bool:
        decisions = choice.rehearsed_decisions
        return not decisions or self._session.certificates.is_ready(decisions)

    def _begin_measurement(self, choice: Choice) -> None:
        """Start to search for the smallest budget of a choice that has been rehearsed."""
        before = _seconds_of_children()
        try:
            graph = self._session.certificate_of(choice)
        except PlannerError:
            self._failed.append(choice)
            return
        seconds = _seconds_of_children() - before
        alternatives = choice.with_each_allocator
        child = Child(functools.partial(_smallest_total, graph, self._session.card, alternatives))
        self._in_measurement = _Measurement(choice=choice, graph=graph, child=child, seconds=seconds)
        child.in_background()

    def _finish_measurement(self, found: _Measurement) -> None:
        """Measure a plan whose smallest budget is known."""
        before, self._in_measurement = _seconds_of_children(), None
        point = self._session.certified_within(found.choice, found.graph, found.child.result())
        (self.points if point.is_as_promised else self._unchecked).append(point)
        self._seconds.append(found.seconds + _seconds_of_children() - before)

    def raise_errors(self) -> None:
        """Raise the errors that `advance` has put off, and end the search if recordings were wrong.

        Call it only inside of a search that `fitting.repeated_if_dropped` runs. That function repeats the search if
        recordings were wrong (`fitting.check_recordings`), or if a technique is left out because a step cannot be
        rehearsed with it (`fitting.certify`).

        Raises:
            PlannerError: a plan could not be certified.
        """
        if self._error is not None:
            raise self._error
        searches = self._session.searches
        while self._failed:
            choice = self._failed.pop()
            # A search of its own, such as that of `fitting.best`, may have left out meanwhile what fails here.
            is_new = searches.number_left_out == self._added[choice.rehearsed_decisions]
            if is_new or not searches.leaves_out(choice.decisions):
                fitting.certify(self._session, choice)
                self._waiting.append(choice)
        while self._unchecked:
            fitting.check_recordings(self._session, self._unchecked[-1])
            self.points.append(self._unchecked.pop())

    def wait(self, most_unfinished: int = 0) -> None:
        """Wait until few choices are unfinished. Call it inside of `watch.meanwhile(certification.advance)`.

        Args:
            most_unfinished: maximum number of choices that are unfinished when it returns.

        Raises:
            TimeIsUp: the time is up.
            PlannerError: as `raise_errors`, which it calls.
        """
        watch = self._session.watch
        self.raise_errors()
        while self._unfinished > most_unfinished:
            number = len(self._added)
            watch.stage(f"certifying plan {number - self._unfinished + 1} of {number}")
            watch.check()
            self.raise_errors()
            time.sleep(_PAUSE_SECONDS)

    def close(self) -> None:
        """End the process that searches for a smallest budget, if there is one. Rehearsals end with the session."""
        if self._in_measurement is not None:
            self._in_measurement.child.end()


def _seconds_of_children() -> float:
    """Returns the CPU time in seconds of the child processes that have ended; 0 on Windows."""
    times = os.times()
    return times.children_user + times.children_system


def _smallest_total(
    graph: StepGraph, card: DeviceProfile, alternatives: tuple[tuple[Decision, ...], ...], refuse: Refuse
) -> int:
    """Runs in a child process: returns the smallest total in bytes in which a step runs (`smallest_of`).

    Each convolution runs its fastest algorithm. `refuse` is not used.
    """
    return smallest_of(graph, card, alternatives, fastest=True)
