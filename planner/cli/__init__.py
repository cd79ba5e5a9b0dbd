"""The `plan` command and its reports."""

from __future__ import annotations

import atexit
import gc
import pathlib
import sys
import sysconfig
from collections.abc import Sequence

RARE_COLLECTIONS = (100_000, 50, 50)
"""Thresholds with which Python's garbage collector runs rarely. Imports create about a million objects that stay alive,
so that searching them for cycles frees almost nothing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code. Ctrl-C while its modules are imported gives one line as well."""
    if arguments is None:  # the process ends with the command
        gc.set_threshold(*RARE_COLLECTIONS)
        atexit.register(_skip_last_collection)
    try:
        from planner.cli import command

        return command.main(arguments)
    except KeyboardInterrupt:
        print("plan: interrupted", file=sys.stderr)
        return 2


def _skip_last_collection() -> None:
    """Keeps Python from searching all objects for cycles before it exits, which takes a second.

    If a module of the user's own was imported, Python searches as usual. The module may hold an open file in a cycle,
    and Python writes the end of that file only in this search.
    """
    folders = *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), str(pathlib.Path(__file__).parents[1])
    known = "__main__", "__mp_main__", "torch"  # some modules of torch have no path
    files = [
        getattr(module, "__file__", None) or folders[0]
        for name, module in sys.modules.items()
        if name.partition(".")[0] not in known
    ]
    if ":" not in "".join(sys.argv[1:]) and all(file.startswith(folders) for file in files):
        gc.freeze()


def keep_imports() -> None:
    """Keeps Python from searching the objects of the modules that are imported for cycles, if the command is a process.

    Call it before the user's code is imported: the objects of that code are searched when the process exits.
    """
    if gc.get_threshold() == RARE_COLLECTIONS:  # `main` sets these thresholds only for a process that ends with it
        gc.freeze()


__all__ = ["keep_imports", "main"]
