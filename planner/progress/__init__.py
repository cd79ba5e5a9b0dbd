"""Time and progress of planning: the time limit, and records that say what planning does at the moment.

A `Watch` is made when planning begins, and is passed down to everything that may take long. Long work calls `check`,
which raises `TimeIsUp` after the time limit; waiting for a rehearsal does so several times a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from planner.plan_types.sizes import format_size
from planner.progress.threads import in_thread

T = TypeVar("T")

_HEARTBEAT_SECONDS = 1.0
"""Minimum time between two records of which neither the stage nor the best plan differs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """One moment of planning: the present stage, the time, and the best plan that has been certified so far.

    `str(progress)` is one line, such as "searching: best so far 5.31 GiB at 1.12 x, 14 s".
    """

    stage: str
    """The present stage, such as "rehearsing the step" or "searching"."""
    elapsed_seconds: float
    """Time in seconds since planning began."""
    best_total_bytes: int | None
    """Total memory of the best certified plan so far, in bytes; None if none inside the budget is known yet."""
    best_slowdown: float | None
    """Step time of that plan, divided by the step time of the baseline; None if there is no such plan yet."""

    def __str__(self) -> str:
        best = ""
        if self.best_total_bytes is not None and self.best_slowdown is not None:
            best = f": best so far {format_size(self.best_total_bytes)} at {self.best_slowdown:.2f} x"
        return f"{self.stage}{best}, {self.elapsed_seconds:.0f} s"


Report = Callable[[Progress], object]
"""A function that receives progress. Its result is ignored; an error that it raises ends planning."""


class TimeIsUp(Exception):
    """The time limit is over, or the user ended the search.

    It is not a `PlannerError`, so that no code takes it for the error of a rehearsal.
    """


class Watch:
    """Measures the time of planning, ends it after a time limit, and reports its progress."""

    def __init__(
        self, *, seconds: float | None = None, report: Report | None = None, elapsed_seconds: float = 0.0
    ) -> None:
        """
        Args:
            seconds: the time limit; None for none.
            report: is called when the stage changes, when a better plan is known, and about once a second.
            elapsed_seconds: time since planning began, if it began before now.
        """
        self.limit_seconds, self._report = seconds, report
        self._reported = time.monotonic()
        self._began = self._reported - elapsed_seconds
        self._deadlines = [math.inf if seconds is None else self._began + seconds]
        self._until_found: float | None = None
        self._reserved: Callable[[], float] = lambda: 0.0
        """Returns the time in seconds to leave for what follows the present part (`leaving`)."""
        self._stage = self._sent = "starting"
        """The present stage, and that of the latest record with its prefix."""
        self._prefix: Callable[[], str] | None = None
        """Returns the words that stand before the stage in progress records (`apart`); None for none."""
        self._best: tuple[int, float] | None = None
        self._is_ended = self._goes_on = False
        self._ended_seconds: float | None = None
        """Time in seconds at which the user ended the search; None if the user did not."""
        self._work: Callable[[], object] | None = None
        self._is_working = False
        self.recalled = 0
        """Number of recordings that earlier calls have made."""
        self.is_checked = False
        """True as soon as the time limit has been checked: from then on `end` has an effect."""

    @property
    def elapsed_seconds(self) -> float:
        """Time in seconds since the watch was made."""
        return time.monotonic() - self._began

    @property
    def _deadline(self) -> float:
        """The earliest moment at which a present limit is over, minus the time that `leaving` reserves."""
        until = min(self._deadlines if self._until_found is None else (*self._deadlines, self._until_found))
        return until - self._reserved()

    @property
    def left_seconds(self) -> float:
        """Time in seconds until the present limit; infinite if there is none, and never negative."""
        return 0.0 if self._is_ended and not self._goes_on else max(self._deadline - time.monotonic(), 0.0)

    @property
    def overrun_seconds(self) -> float:
        """Time in seconds since the present limit; negative before it, and minus infinity if there is none."""
        return time.monotonic() - self._deadline

    @property
    def doing(self) -> str:
        """The present stage, in words such as 'loading the model', with the words of `apart` before it."""
        return self._prefixed_stage

    @property
    def is_ended(self) -> bool:
        """True if the user ended the search (`end`)."""
        return self._is_ended

    @property
    def cause(self) -> str:
        """The reason why planning ends early, in words: 'after the time limit of 30 s' or 'by Ctrl-C after 12 s'."""
        if self._is_ended or self.limit_seconds is None:
            return f"by Ctrl-C after {self._ended_seconds or self.elapsed_seconds:.0f} s"
        return f"after the time limit of {self.limit_seconds:g} s"

    def end(self) -> None:
        """End planning with the best plan so far, as if the time limit were over. May be called by a signal handler."""
        self._ended_seconds = self._ended_seconds or self.elapsed_seconds
        self._is_ended = True

    def check(self) -> None:
        """Report progress if the last report is a second old, and call the function that was given to `meanwhile`.

        Raises `TimeIsUp` if a limit is over. A check inside of that function does nothing, so that the time
        limit does not end it.
        """
        self.is_checked = True
        if self._is_working:
            return
        if self.left_seconds <= 0:
            raise TimeIsUp
        if time.monotonic() - self._reported >= _HEARTBEAT_SECONDS:
            self._send()
        if self._work is not None:
            self._is_working = True
            try:
                self._work()
            finally:
                self._is_working = False

    def checking(self, items: Iterable[T], *, every: int = 1) -> Iterator[T]:
        """Yield the items. Call `check` before the first item, and again after every `every` items.

        Raises:
            TimeIsUp: a limit is over.
        """
        for number, item in enumerate(items):
            if number % every == 0:
                self.check()
            yield item

    def stage(self, name: str) -> None:
        """Enter a stage. Does not check the time limit."""
        self._stage = name
        if self._prefixed_stage != self._sent:
            self._send()

    @property
    def _prefixed_stage(self) -> str:
        prefix = None if self._prefix is None else self._prefix()
        return ": ".join(filter(None, (prefix, self._stage)))

    @contextlib.contextmanager
    def apart(self, words: Callable[[], str]) -> Iterator[None]:
        """Report searches whose plans are not the answer, for example for several batch sizes.

        Progress records have words before the stage, such as 'at least 64 samples fit', and no best plan.

        Args:
            words: returns the words. It is called for each record, so that its result may change.
        """
        previous = self._prefix, self._stage
        self._prefix, self._stage = words, ""
        self._send()
        try:
            yield
        finally:
            self._prefix, self._stage = previous

    def found(self, total_bytes: int, slowdown: float) -> None:
        """Note a certified plan inside the budget. It is reported if it is faster than the best one so far.

        Inside of `apart`, it is not reported.
        """
        self._until_found = None
        if self._prefix is not None:
            return
        if self._best is None or slowdown < self._best[1]:
            self._best = total_bytes, slowdown
            self._send()

    @contextlib.contextmanager
    def at_most(self, seconds: float) -> Iterator[None]:
        """Limit the time of a part of planning, from now on. The time limit of the whole stays valid inside it."""
        self._deadlines.append(time.monotonic() + seconds)
        try:
            yield
        finally:
            self._deadlines.pop()

    @contextlib.contextmanager
    def leaving(self, seconds: Callable[[], float]) -> Iterator[None]:
        """End a part of planning early enough that time is left for what follows it.

        These contexts may be nested: the sum of their times is left.

        Args:
            seconds: returns the time in seconds to leave. It is called at each check, so that its result may change.
        """
        previous = self._reserved
        self._reserved = lambda: previous() + seconds()
        try:
            yield
        finally:
            self._reserved = previous

    @contextlib.contextmanager
    def until_found(self, share: float) -> Iterator[None]:
        """Limit the time of a part of planning to a share of what is left, until a plan inside the budget is found.

        Then only the other limits count. It may not be used inside itself.
        """
        self._until_found = time.monotonic() + share * self.left_seconds
        try:
            yield
        finally:
            self._until_found = None

    @contextlib.contextmanager
    def after_end(self) -> Iterator[None]:
        """Let a last piece of work go on after the user has ended the search. The time limit stays valid inside it."""
        self._goes_on = True
        try:
            yield
        finally:
            self._goes_on = False

    @contextlib.contextmanager
    def meanwhile(self, work: Callable[[], object]) -> Iterator[None]:
        """Call `work` at each check inside the context, unless the time is up.

        The work should be short and must not wait, since checks occur while the result of a rehearsal is waited for. An
        error that it raises is raised by `check`.
        """
        previous, self._work = self._work, work
        try:
            yield
        finally:
            self._work = previous

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Report progress about once a second from another thread, while this one waits for something else."""

        def report(is_over: threading.Event) -> None:
            while not is_over.wait(_HEARTBEAT_SECONDS):
                self._send()

        with in_thread(report):
            yield

    def relay(self, progress: Progress) -> None:
        """Report what another process reported about the same planning."""
        if self._report is not None:
            self._report(dataclasses.replace(progress, elapsed_seconds=self.elapsed_seconds))

    def _send(self) -> None:
        self._reported, self._sent = time.monotonic(), self._prefixed_stage
        if self._report is None:
            return
        total_bytes, slowdown = self._best if self._best and self._prefix is None else (None, None)
        self._report(
            Progress(
                stage=self._prefixed_stage,
                elapsed_seconds=self.elapsed_seconds,
                best_total_bytes=total_bytes,
                best_slowdown=slowdown,
            )
        )
