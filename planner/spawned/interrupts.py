"""Delays the effect of signals while processes are started and ended."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Handlers = dict[int, Callable[[int, Any], Any]]
"""Handlers in Python, by the number of their signal."""


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[Handlers]:
    """Delays the effect of Ctrl-C, and of other signals that have a handler in Python, until the context ends.

    Outside of the main thread the context does nothing, because handlers run in the main thread only.

    Before and after a fork, Python calls registered functions (`os.register_at_fork`). If a handler raises an exception
    in one of them, the exception is lost, and a lock of `logging` may stay locked. If a handler raises an exception in
    the child, it reaches the user's program, which then runs in two processes.

    Yields:
        The handlers whose effect is delayed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    of_signals = [(int(number), signal.getsignal(number)) for number in signal.valid_signals()]
    of_signals.sort(key=lambda found: found[0] != signal.SIGINT)  # restored last, because its handler raises an error
    handlers: Handlers = {number: handler for number, handler in of_signals if callable(handler)}
    noted: dict[int, None] = {}

    def note(number: int, frame: object) -> None:
        noted[number] = None

    with contextlib.ExitStack() as at_end:  # it calls all functions, also if one of them raises an error
        at_end.callback(_raise_all, noted)
        for number, handler in handlers.items():
            at_end.callback(signal.signal, number, handler)
            signal.signal(number, note)
        yield handlers


def _raise_all(numbers: Iterable[int]) -> None:
    """Sends signals to this process. The handlers of all of them run, also if one of them raises an error."""
    with contextlib.ExitStack() as at_end:
        for number in numbers:
            at_end.callback(signal.raise_signal, number)
