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
    if arguments is None:  # the process ends with the command
        gc.set_threshold(*_RARE_COLLECTIONS)
        if not any(":" in word or ".py" in word for word in sys.argv[1:]):
            # Python would search all objects for cycles before it exits, which takes a second. This matters only to the
            # user's own code, which may have an open file in a cycle.
            atexit.register(gc.freeze)
    try:
        from planner.cli import command

        return command.main(arguments)
    except KeyboardInterrupt:
        print("plan: interrupted", file=sys.stderr)
        return 2


__all__ = ["main"]
