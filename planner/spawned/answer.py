"""The answer of a forked process: a file without a name, and a pipe that shows when the file is complete.

A child that wrote a large answer to a pipe would have to wait until its parent reads the answer.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from multiprocessing.connection import wait as wait_for
from typing import Any

from planner.errors import MachineError


class Answer:
    """Carries a value from a child to its parent. It is opened before the fork, and both use their copy of it."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        """Descriptors of the file, of the reading end of the pipe, and of its writing end, while they are open."""

    def open(self) -> None:
        """Opens the file and the pipe. Raises `MachineError` if the process may open no further files."""
        try:
            self._open["file"] = _file_without_name()
            self._open["reader"], self._open["writer"] = os.pipe()
            for name, number in self._open.items():
                self._open[name] = _above_standard_streams(number)
        except OSError as error:
            self.close()
            raise MachineError(
                f"this process cannot open a file and a pipe for a rehearsal ({error.strerror}): close files, or raise "
                "the limit (`ulimit -n`)"
            ) from error

    def close(self, *names: str) -> None:
        """Closes descriptors that are still open: 'file', 'reader' or 'writer', or all if no name is given."""
        for name in names or tuple(self._open):
            number = self._open.pop(name, None)  # later, the number may belong to another file
            if number is not None:
                os.close(number)

    def send(self, value: Any) -> None:
        """Writes a picklable value. Called by the child, once."""
        with os.fdopen(self._open["file"], "wb", closefd=False) as file:
            pickle.dump(value, file, protocol=pickle.HIGHEST_PROTOCOL)
        os.write(self._open["writer"], b"1")

    @property
    def is_ready(self) -> bool:
        """True if the child has written its answer, if it has closed the pipe, or if nothing is open."""
        return "reader" not in self._open or bool(wait_for([self._open["reader"]], timeout=0))

    def wait(self, check: Callable[[], None], seconds: float) -> bool:
        """Waits until the child has written its answer, or has closed the pipe. Returns True if there is an answer.

        Args:
            check: called at once, and then each time `seconds` have passed.
        """
        check()
        while not wait_for([self._open["reader"]], timeout=seconds):
            check()
        return bool(os.read(self._open["reader"], 1))

    def read(self) -> Any:
        """Returns the value that the child has written."""
        with os.fdopen(self._open["file"], "rb", closefd=False) as file:
            file.seek(0)  # parent and child share the position
            return pickle.load(file)


def _file_without_name() -> int:
    """Returns the descriptor of a new file, which is in memory if the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("answer")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _above_standard_streams(number: int) -> int:
    """Returns a descriptor above 2. A process without standard streams gives their numbers to other files."""
    if number > 2:
        return number
    import fcntl  # on Windows no process is forked

    moved = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(number)
    return moved
