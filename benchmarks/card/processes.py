"""Processes that a driver starts, each with those that it starts itself: they are ended together."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
from typing import BinaryIO

ROOT = pathlib.Path(__file__).parents[2]


class Processes:
    """Cases in processes of their own, each with those that it started: they are ended together."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen] = set()

    def run(self, command: list[str], *, output: BinaryIO, seconds: float) -> int | None:
        """The exit code; None: it took longer and was ended."""
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
        for process in tuple(self._running):
            self._end(process)

    def _end(self, process: subprocess.Popen) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself just now
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


PROCESSES = Processes()


def end_with_this_process() -> None:
    """Asked to end, this process ends all that it started: nothing may stay on the card."""
    signal.signal(signal.SIGTERM, _give_up)


def _give_up(*_: object) -> None:
    PROCESSES.end_all()
    os._exit(128 + signal.SIGTERM)
