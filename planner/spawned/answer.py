"""Sends the answer of a forked process to its parent: the value in an anonymous file, then one byte through a pipe.

The byte says that the file is complete. A pipe alone would block a child with a large answer until its parent reads it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import tempfile
from collections.abc import Callable
from multiprocessing.connection import wait as wait_for
from typing import Any

from planner.errors import MachineError

_TOO_MANY = errno.EMFILE, errno.ENFILE
"""Numbers of the errors that the process, or the system, has too many open files."""


class AnswerChannel:
    """A channel that carries one value from a forked child to its parent.

    Call `open` before the fork. Afterwards the child calls `send`, and the parent calls `wait` and `read`. Each process
    closes its own descriptors. Children that are forked while the channel is open hold its file open until they end.
    """

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}
        """Open descriptors: 'file' (for the value), 'reader' and 'writer' (the ends of the pipe)."""
        self._identities: dict[str, tuple[int, int]] = {}
        """Device and inode of the file and of the pipe, by the name of the descriptor."""

    def open(self) -> None:
        """Opens the file and the pipe.

        Raises:
            MachineError: the system opens no file or no pipe, for example because too many files are open.
        """
        try:
            self._descriptors["file"] = _anonymous_file()
            self._descriptors["reader"], self._descriptors["writer"] = os.pipe()
            for name, number in self._descriptors.items():
                self._descriptors[name] = _above_standard_streams(number)
            self._identities = {name: _identity(number) for name, number in self._descriptors.items()}
        except OSError as error:
            self.close()
            remedy = (
                "close files, or raise the limit (`ulimit -n`)"
                if error.errno in _TOO_MANY
                else "set TMPDIR to a folder that can be written to and has free space"
            )
            raise MachineError(
                f"this process cannot open a file and a pipe for a rehearsal ({error.strerror}): {remedy}"
            ) from error

    def close(self, *names: str) -> None:
        """Closes the descriptors with these names, or all, the writing end of the pipe first.

        Does nothing for a descriptor that was closed before, also if the model's code has closed it.
        """
        for name in names or reversed([*self._descriptors]):
            number = self._descriptors.pop(name, None)  # later, the number may belong to another file
            if number is not None:
                with contextlib.suppress(OSError):  # the model's code has closed it
                    os.close(number)

    def send(self, value: Any) -> None:
        """Writes a picklable value. If it fails, it may be called again with another value.

        Raises:
            OSError: the file or the pipe cannot be written to, for example because the model's code has closed them.
            Exception: whatever pickling the value raises.
        """
        for name in ("file", "writer"):
            # If the model's code has closed it, its number may belong to another file.
            if _identity(self._descriptors[name]) != self._identities[name]:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        with os.fdopen(self._descriptors["file"], "wb", closefd=False) as file:
            file.seek(0)
            file.truncate()
            pickle.dump(value, file, protocol=pickle.HIGHEST_PROTOCOL)
        os.write(self._descriptors["writer"], b"1")

    @property
    def is_open(self) -> bool:
        """True if a descriptor is open."""
        return bool(self._descriptors)

    @property
    def is_ready(self) -> bool:
        """True if `wait` would return at once, because a value is complete or every process has closed the writing end.

        True after `close`, too.
        """
        return "reader" not in self._descriptors or bool(wait_for([self._descriptors["reader"]], timeout=0))

    def wait(self, check: Callable[[], None], seconds: float) -> bool:
        """Waits until the value is complete, or every process has closed the writing end of the pipe.

        Args:
            check: `wait` calls it first, and then after every `seconds`. An error that it raises ends the wait.
            seconds: time between two checks in seconds.

        Returns:
            True if the value is complete, False if the pipe was closed without one.
        """
        assert "reader" in self._descriptors, "the process has ended"
        check()
        while not wait_for([self._descriptors["reader"]], timeout=seconds):
            check()
        return bool(os.read(self._descriptors["reader"], 1))

    def read(self) -> Any:
        """Returns the value that the child has written. Call it after `wait` has returned True.

        Raises:
            Exception: whatever unpickling the value raises.
        """
        with os.fdopen(self._descriptors["file"], "rb", closefd=False) as file:
            file.seek(0)  # parent and child share the position
            return pickle.load(file)


def _anonymous_file() -> int:
    """Returns the descriptor of a new file without a name, which is in memory if the system allows it."""
    if hasattr(os, "memfd_create"):
        try:
            return os.memfd_create("answer")
        except OSError as error:  # a sandbox may forbid files in memory
            if error.errno in _TOO_MANY:
                raise
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _identity(descriptor: int) -> tuple[int, int]:
    """Returns the device and the inode of an open file."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _above_standard_streams(number: int) -> int:
    """Returns a descriptor above 2 for the same file, and closes the given one if it is another one.

    In a process whose standard streams are closed, a new file can get the number 0, 1 or 2, which the child would then
    use for its output.
    """
    if number > 2:
        return number
    import fcntl  # on Windows no process is forked

    moved = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(number)
    return moved
