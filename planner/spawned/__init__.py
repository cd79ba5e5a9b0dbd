"""Computes a function in a new Python process, which gets the structure of a model without its weights (`structure`).

The new process imports what it needs itself, and sends messages back while it works (`serve`).
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import pathlib
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from planner.errors import MachineError, RehearsalProcessError

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from planner.spawned.serve import main; "
    "main(int(sys.argv[2]))"
)
_SECONDS_BETWEEN_CHECKS = 0.2
_MORE_NICENESS = 5
"""Number by which the niceness of a process is raised to lower its priority. On Linux, such a process gets about a
quarter of a core that it shares with a process of normal priority."""
_FROM_OUTSIDE = {
    getattr(signal, name, None) for name in ("SIGHUP", "SIGINT", "SIGKILL", "SIGQUIT", "SIGTERM", "SIGXCPU")
}
"""Signals by which the system or the user ends a process. A fault in its own code raises others, such as SIGSEGV."""

Send = Callable[[str, Any], None]
"""A function that sends a message, of a kind and a picklable value, from the new process."""


class CannotBeSentError(Exception):
    """An object cannot be sent to another process. The text names the object, its place and the reason."""


class NewProcess:
    """A new process that computes `function(send)`. Creating the object starts it.

    Args:
        function: a function with everything it needs bound to it. It is called with a function that sends messages.

    Raises:
        CannotBeSentError: the function, or something that is bound to it, cannot be sent.
    """

    def __init__(self, function: Callable[[Send], Any]) -> None:
        from planner.spawned.structure import send  # only needed here, and cloudpickle takes time to import

        payload = pickle.dumps(_sources()) + send(function)
        path = [os.path.abspath(entry) for entry in sys.path]
        package = str(pathlib.Path(__file__).parents[2])
        self._messages: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(path if package in path else [package, *path]), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal reaches this process only, which decides
        )
        threading.Thread(target=self._talk, args=(payload,), daemon=True).start()

    def wait(self, check: Callable[[], None], receive: Callable[[str, Any], None]) -> Any:
        """Waits for the function, and returns its value. Ends the process.

        Args:
            check: called several times a second. It may raise an error, which ends the wait.
            receive: called with each message of the function.

        Raises:
            RehearsalProcessError: the process ended without an answer.
            MachineError: the process was ended from outside, for example because memory ran out.
        """
        try:
            while True:
                check()
                try:
                    kind, value = self._messages.get(timeout=_SECONDS_BETWEEN_CHECKS)
                except queue.Empty:
                    continue
                if kind == "value":
                    return value
                if kind == "error":
                    raise value
                if kind == "end":
                    code = self._process.wait()
                    if (why := ended_from_outside(-code)) is not None:
                        raise MachineError(f"the new process for planning was ended: {why}")
                    raise RehearsalProcessError(
                        f"the new process for planning ended without an answer (exit code {code})"
                    )
                receive(kind, value)
        finally:
            self.end()

    def in_background(self) -> None:
        """Lowers the priority of the process (`lower_priority`)."""
        lower_priority(self._process.pid)

    @property
    def is_ready(self) -> bool:
        """True if the process has sent a message that nobody has read: its result, or the end of its output."""
        return not self._messages.empty()

    def end(self) -> None:
        """Ends the process, and those that it has forked."""
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError):  # the process has ended
                os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()
        self._process.wait()

    def _talk(self, payload: bytes) -> None:
        """Writes the payload, and puts what the process sends into the queue, with ('end', None) at the end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            with self._process.stdin as pipe:
                pipe.write(payload)
            with self._process.stdout as pipe:
                while True:
                    self._messages.put(pickle.load(pipe))
        except (OSError, EOFError, pickle.UnpicklingError):  # the process has ended, or was ended
            self._messages.put(("end", None))
        except Exception as error:  # to unpickle an answer runs code of its class, which may fail
            why = f"the answer of the new process cannot be read: {type(error).__name__}: {error}"
            self._messages.put(("error", RehearsalProcessError(why)))


def lower_priority(pid: int) -> None:
    """Lowers the priority of a process, so that it takes little time from others.

    Does nothing on Windows, or if the system does not allow it.
    """
    if hasattr(os, "setpriority"):
        with contextlib.suppress(OSError):  # the process has ended, or a sandbox does not allow it
            os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid) + _MORE_NICENESS)


def ended_from_outside(number: int) -> str | None:
    """Returns how a process was ended by a signal that does not come from its own code; None for other signals.

    Args:
        number: number of the signal that ended the process.
    """
    if number not in _FROM_OUTSIDE:
        return None
    name = signal.Signals(number).name
    if name != "SIGKILL":
        return f"it got the signal {name}"
    return f"{name}, perhaps because host memory ran out; close other programs, or plan on a machine with more memory"


def _sources() -> tuple[str | None, dict[str, Any]]:
    """Returns the file of the user's script, and the source text of code that is in no file (cells of a notebook)."""
    texts = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and not os.path.exists(name)}
    return getattr(sys.modules["__main__"], "__file__", None), texts
