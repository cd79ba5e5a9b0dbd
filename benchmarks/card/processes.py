"""Runs commands in process groups, so that each process ends together with its own children."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
from typing import BinaryIO

ROOT = pathlib.Path(__file__).parents[2]


class Processes:
    """The running process groups of a driver."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen] = set()

    def run(self, command: list[str], *, output: BinaryIO, seconds: float) -> int | None:
        """Run a command and return its exit code; None if it took longer than `seconds` and was killed."""
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT, start_new_session=True)
        self._running.add(process)
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._end(process)
            return None
        finally:
            self._running.discard(process)

    def end_all(self) -> None:
        """End all running groups."""
        for process in tuple(self._running):
            self._end(process)

    def _end(self, process: subprocess.Popen) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has already ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


PROCESSES = Processes()


def end_with_this_process() -> None:
    """Install signal handlers that end all started processes too, so that none stays on the card."""
    signal.signal(signal.SIGTERM, _give_up)


def _give_up(*_: object) -> None:
    PROCESSES.end_all()
    os._exit(128 + signal.SIGTERM)
