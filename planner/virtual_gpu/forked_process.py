"""Run a function in a forked child process and hand its result back as plain data.

Registering the virtual GPU changes a process for good, so it never happens in a process that holds a user's
live work. A fork inherits the model without pickling it.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from planner.errors import PlannerError, RehearsalProcessError

_NO_BACKWARD_IN_FORK = "in combination with fork-based multiprocessing"
"""What autograd says where its threads were lost in a fork (torch/csrc/autograd/engine.cpp)."""

Refuse = Callable[[PlannerError], NoReturn]
"""Called in the child: the error is its answer, and its life ends here."""


class Child:
    """A forked process that computes `function(refuse)`. `result` waits for it, and hands its value to `receive`.

    Where an error cannot be raised (through C++ code that does not survive it), the function calls `refuse` with it.
    """

    def __init__(self, function: Callable[[Refuse], Any], receive: Callable[[Any], Any] = lambda value: value) -> None:
        self._receive = receive
        if not hasattr(os, "fork"):
            raise RehearsalProcessError(
                f"this system ({sys.platform}) cannot fork, and a rehearsal needs a child process: use Linux or macOS"
            )
        if torch.cuda.is_initialized():
            raise RehearsalProcessError(
                "CUDA is initialised in this process, which therefore cannot be forked: plan before its first use, "
                "or in a process of its own with the `plan` command"
            )
        sys.stdout.flush()
        sys.stderr.flush()
        self._reader, writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._reader)
            _serve(function, writer)
        os.close(writer)

    def end(self) -> None:
        """Stop the child; its answer is not wanted any more."""
        os.kill(self._pid, signal.SIGKILL)
        os.close(self._reader)
        os.waitpid(self._pid, 0)

    def result(self) -> Any:
        """What `receive` makes of the value. A `PlannerError` is raised here, another as `RehearsalProcessError`."""
        try:
            with os.fdopen(self._reader, "rb", closefd=False) as pipe:
                answer = pipe.read()
        except BaseException:  # an interrupt, which may have come to this process alone
            self.end()
            raise
        os.close(self._reader)
        _, status = os.waitpid(self._pid, 0)
        if not answer or os.WIFSIGNALED(status):
            raise RehearsalProcessError(f"the rehearsing process ended without an answer ({_cause(status)})")
        kind, value = pickle.loads(answer)
        if kind == "value":
            return self._receive(value)
        raise value


def run_in_child(function: Callable[[], Any]) -> Any:
    """Fork, compute `function()` there, return its value here. The value must be picklable."""
    return Child(lambda refuse: function()).result()


def _serve(function: Callable[[Refuse], Any], writer: int) -> None:
    """The child's whole life. Prints of the model go to standard error, which belongs to people."""

    def refuse(error: PlannerError) -> NoReturn:
        _send(writer, ("error", error))
        os._exit(0)

    code = 1
    try:
        os.dup2(2, 1)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        torch.set_num_threads(1)
        try:
            answer = ("value", function(refuse))
        except PlannerError as error:
            answer = ("error", error)
        except Exception as error:  # whatever it is, the parent raises it
            answer = ("error", _translated(error))
        _send(writer, answer)
        code = 0
    finally:
        os._exit(code)


def _translated(error: Exception) -> RehearsalProcessError:
    """An error that is no refusal, in one line; the traceback is a note."""
    if _NO_BACKWARD_IN_FORK in str(error):
        return RehearsalProcessError(
            "a backward has run in this process, and beside a GPU PyTorch allows none in its forks then: plan before "
            "the first backward, or in a process of its own with the `plan` command"
        )
    first_line = next(iter(str(error).strip().splitlines()), "no message")
    failed = RehearsalProcessError(f"the rehearsal failed with {type(error).__name__}: {first_line}")
    failed.add_note("".join(traceback.format_exception(error)))
    return failed


def _send(writer: int, answer: tuple[str, Any]) -> None:
    with os.fdopen(writer, "wb") as pipe:
        pickle.dump(answer, pipe, protocol=pickle.HIGHEST_PROTOCOL)


def _cause(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"exit code {os.waitstatus_to_exitcode(status)}"
    number = os.WTERMSIG(status)
    hint = ", perhaps because host memory ran out" if number == signal.SIGKILL else ""
    return f"killed by signal {number}{hint}"
