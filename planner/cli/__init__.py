"""The `plan` command and its reports."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Sequence

_RARE_COLLECTIONS = (100_000, 50, 50)
"""Thresholds with which Python's garbage collector runs rarely. Imports create about a million objects that stay alive,
so that searching them for cycles frees almost nothing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code. Ctrl-C while its modules are imported gives one line as well."""
    if arguments is None:  # the process ends with the command: searching its objects for cycles would only take time
        gc.set_threshold(*_RARE_COLLECTIONS)
        atexit.register(gc.freeze)
    try:
        from planner.cli import command

        return command.main(arguments)
    except KeyboardInterrupt:
        print("plan: interrupted", file=sys.stderr)
        return 2


__all__ = ["main"]
