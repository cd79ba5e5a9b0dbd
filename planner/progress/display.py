"""Shows progress: in a live line on a terminal, in the cell of a notebook, and else in a line every ten seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from planner.progress import Progress, Report

_SECONDS_BETWEEN_LINES = 10.0


@contextlib.contextmanager
def shown(progress: bool | Report | None) -> Iterator[Report | None]:
    """Yield a function that shows the progress that it receives; None if nothing is to be shown.

    Args:
        progress: True to show progress, False not to. A function gets each record and shows nothing. None shows it in
            a notebook only, where nothing else on the page says that a cell is still at work; a script's standard
            error belongs to the script.
    """
    if callable(progress):
        yield progress
    elif progress is False or (progress is None and not _in_notebook()):
        yield None
    elif _in_notebook():
        with _in_cell() as report:
            yield report
    elif sys.stderr.isatty():
        with _live_line() as report:
            yield report
    else:
        yield Lines(sys.stderr)


class Lines:
    """Writes a line every ten seconds, for logs. Planning that takes less time writes none."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last_seconds = 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.elapsed_seconds >= self._last_seconds + _SECONDS_BETWEEN_LINES:
            self._last_seconds = progress.elapsed_seconds
            print(f"plan: {progress}", file=self._out, flush=True)


class _LiveLine:
    """The text of the live line, whose time goes on between two records."""

    def __init__(self) -> None:
        from rich.spinner import Spinner

        self._spinner = Spinner("dots")
        self._latest: tuple[Progress, float] | None = None

    def __call__(self, progress: Progress) -> None:
        self._latest = progress, time.monotonic()

    def __rich__(self) -> Any:
        if self._latest is not None:
            progress, received = self._latest
            elapsed_seconds = progress.elapsed_seconds + time.monotonic() - received
            self._spinner.update(text=str(_at(progress, elapsed_seconds)))
        return self._spinner


def _at(progress: Progress, elapsed_seconds: float) -> Progress:
    import dataclasses

    return dataclasses.replace(progress, elapsed_seconds=elapsed_seconds)


@contextlib.contextmanager
def _live_line() -> Iterator[Report]:
    """Yield a function that shows progress in one line of the terminal, which is cleared at the end."""
    from rich.live import Live

    from planner.progress.terminal import console

    line = _LiveLine()
    # Streams are not redirected: forked processes write to them, and must not wait for a lock of this process's thread.
    with Live(
        line, console=console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False,
        refresh_per_second=8,
    ):  # fmt: skip
        yield line


def _in_notebook() -> bool:
    """True in a process of Jupyter that can change what a cell shows."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


@contextlib.contextmanager
def _in_cell() -> Iterator[Report]:
    """Yield a function that shows progress below the cell of a notebook, in one output, which is cleared at the end."""
    from IPython.display import display

    handle = display(_Text(""), display_id=True)
    try:
        yield lambda progress: handle.update(_Text(str(progress)))
    finally:
        handle.update(_Text(""))


class _Text:
    """Plain text that a notebook shows without quotes."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text
