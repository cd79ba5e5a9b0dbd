"""Keeps the standard streams of the command usable, whatever the shell and the model's code do to them."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator


def open_missing() -> None:
    """Open descriptors 0 to 2 where the shell closed them, so that no file of the command gets their numbers.

    Without standard error, messages go nowhere. Text that a terminal cannot show is written with escapes.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - it stays open as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def discard_standard_output() -> None:
    """Let everything that is still to be written to standard output go nowhere, after it could not be written."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


@contextlib.contextmanager
def standard_output_to_error() -> Iterator[None]:
    """Redirect standard output to standard error, also for subprocesses and C code, which write to descriptor 1.

    Both streams are as before afterwards, even if the model's code closes them.
    """
    sys.stdout.flush()
    output, error = os.dup(1), os.dup(2)
    stderr = sys.stderr
    os.dup2(2, 1)
    try:
        # A file of its own: to close it as sys.stdout does not close standard error.
        with (
            open(os.dup(2), "w", errors="backslashreplace", buffering=1) as stand_in,
            contextlib.redirect_stdout(stand_in),
        ):
            yield
    finally:
        os.dup2(output, 1)
        os.dup2(error, 2)
        os.close(output)
        os.close(error)
        if stderr.closed:
            stderr = open(2, "w", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = stderr


@contextlib.contextmanager
def without_sudden_exit() -> Iterator[None]:
    """Within the context, `os._exit` in this process raises `SystemExit` with its code. Children end as usual.

    Otherwise the model's code could end the command with the exit code of a plan that fits.
    """
    plain, owner = os._exit, os.getpid()

    def leave(code: int) -> None:
        if os.getpid() == owner:
            raise SystemExit(code)
        plain(code)

    os._exit = leave  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = plain


@contextlib.contextmanager
def only_in_this_process(code: int) -> Iterator[None]:
    """End a copy of this process with an exit code, if the model's code forked and lets both processes return."""
    owner = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != owner:
            os._exit(code)
