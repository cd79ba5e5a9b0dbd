"""The side of the new process: computes the function that it reads, and sends messages and the answer back."""

from __future__ import annotations

import linecache
import os
import pickle
import signal
import sys
from typing import Any

from planner.spawned.lifetime import end_with


def main(parent: int) -> None:
    """Read a function from standard input, and write pairs (kind, value) to what was standard output.

    What the model prints goes to standard error.

    Args:
        parent: id of the process that started this one, which ends with it.
    """
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides what Ctrl-C ends
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    script, sources = pickle.load(sys.stdin.buffer)
    _know_sources(script, sources)

    def send(kind: str, value: Any) -> None:
        message = pickle.dumps((kind, value), protocol=pickle.HIGHEST_PROTOCOL)  # nothing is written if this fails
        answers.write(message)
        answers.flush()

    from planner.errors import PlannerError, RehearsalProcessError

    try:
        function = pickle.load(sys.stdin.buffer)
        send("value", function(send))
    except PlannerError as error:
        send("error", error)
    except Exception as error:  # the user's classes are loaded here
        text = next(iter(str(error).strip().splitlines()), "no message")
        failed = RehearsalProcessError(
            f"a new process for planning failed with {type(error).__name__}: {text}; a module that it cannot import "
            "must be in a folder of sys.path"
        )
        send("error", failed)


def _know_sources(script: str | None, sources: dict[str, Any]) -> None:
    """Make the source text of the user's script and notebook known, so that messages name its lines."""
    if script is not None:
        sys.modules["__main__"].__file__ = script
    linecache.cache.update(sources)
