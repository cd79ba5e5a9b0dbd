"""Keeps the standard streams of the command usable, whatever the shell and the model's code do to them."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast


def answered(name: str, run: Callable[[TextIO], int], could_not_run: int) -> int:
    """Run a command that writes its answer to the stream it receives, and return its exit code.

    If the answer cannot be written, because a pipe is closed or a disk is full, a line says so, and `could_not_run` is
    returned.

    Args:
        name: the name of the command, with which its messages begin.
    """
    open_missing()
    out = sys.stdout
    if out is None:
        print(f"{name}: standard output is closed, so the answer cannot be written", file=sys.stderr)
        return could_not_run
    try:
        try:
            return run(out)
        finally:
            out.flush()
    except OSError as error:  # all other errors are handled where they occur
        discard_standard_output()
        with contextlib.suppress(OSError):
            print(f"{name}: the answer cannot be written to standard output: {error.strerror}", file=sys.stderr)
        return could_not_run


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


class _Unclosable:
    """A text stream that stays open if the model's code closes it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)

    def close(self) -> None:
        self._stream.flush()


@contextlib.contextmanager
def standard_output_to_error() -> Iterator[None]:
    """Redirect standard output to standard error, also for subprocesses and C code, which write to descriptor 1.

    Both streams are as before afterwards, even if the model's code closes them or their descriptors.
    """
    sys.stdout.flush()
    output, error = os.dup(1), os.dup(2)
    os.dup2(2, 1)
    stand_in = cast(TextIO, _Unclosable(sys.stderr))
    try:
        with contextlib.redirect_stdout(stand_in), contextlib.redirect_stderr(stand_in):
            yield
    finally:
        os.dup2(output, 1)
        os.dup2(error, 2)
        os.close(output)
        os.close(error)


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
