"""The `plan` command and its reports."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code. Ctrl-C while its modules are imported gives one line as well."""
    if arguments is None:  # the process ends with the command: do not search its objects for cycles before
        atexit.register(gc.freeze)
    try:
        from planner.cli import command

        return command.main(arguments)
    except KeyboardInterrupt:
        print("plan: interrupted", file=sys.stderr)
        return 2


__all__ = ["main"]
