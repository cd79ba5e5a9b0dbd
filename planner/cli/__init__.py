"""The `plan` command and its reports."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Sequence

_RARELY = (100_000, 50, 50)
"""Thresholds of Python's garbage collector. Imports create about a million objects, and nearly all of them stay."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code. Ctrl-C while its modules are imported gives one line as well."""
    if arguments is None:  # the process ends with the command: searching its objects for cycles would only take time
        gc.set_threshold(*_RARELY)
        atexit.register(gc.freeze)
    try:
        from planner.cli import command

        return command.main(arguments)
    except KeyboardInterrupt:
        print("plan: interrupted", file=sys.stderr)
        return 2


__all__ = ["main"]
