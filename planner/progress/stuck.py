"""Notices that the time limit is over while nobody checks it, because the model's own code does not return."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from planner.progress import Watch
from planner.progress.threads import in_thread

_SECONDS_BETWEEN_CHECKS = 0.5
_GRACE_SECONDS = 3.0
"""Time after the limit in which code that is slow may still return."""


@contextlib.contextmanager
def ended_if_stuck(watch: Watch, end: Callable[[], None]) -> Iterator[None]:
    """Call `end` from another thread if the time limit is over and `watch` has never been checked in this context.

    It is checked as soon as the step is rehearsed. Until then code of the user runs in this process, which may sleep or
    loop for ever, in Python or in C. Without a time limit, nothing is done.

    Args:
        end: ends the process.
    """
    if watch.limit_seconds is None:
        yield
        return

    def look(is_over: threading.Event) -> None:
        while not is_over.wait(_SECONDS_BETWEEN_CHECKS) and not watch.is_checked:
            if watch.overrun_seconds > _GRACE_SECONDS:
                end()
                return

    with in_thread(look):
        yield
