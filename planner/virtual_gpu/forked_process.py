"""Runs a function in a child process, forked where the system can, and returns its result as plain data.

Registering the virtual GPU changes a process until it ends, so it never happens in the user's process. A forked child
has the user's model without pickling it.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from planner.errors import PlannerError, RehearsalProcessError
from planner.progress import Watch
from planner.spawned import CannotBeSentError, NewProcess, Send

_NO_BACKWARD_IN_FORK = "in combination with fork-based multiprocessing"
"""Text in the error that autograd raises in a child forked after a backward (torch/csrc/autograd/engine.cpp)."""

_SECONDS_BETWEEN_CHECKS = 0.2
"""While a child is waited for, its watch is checked so often."""

Refuse = Callable[[PlannerError], NoReturn]
"""A function that sends an error to the parent as the answer of the child, and ends the child. It does not return."""


class BackwardInForkError(RehearsalProcessError):
    """PyTorch refuses a backward in a forked process, because a backward has run in its parent."""


class Child:
    """A child process that computes `function(refuse)`. Creating the object starts it.

    The process is forked. On a system without fork it is a new process, which gets the function and what is bound to it
    with the structure of the model, but without its weights (`planner.spawned`).

    Args:
        function: computes a picklable value in the child. It must call `refuse(error)` instead of raising an error that
            would pass through C++ code which then aborts the process.
        receive: called by `result` in the parent, with the value. It returns the result.
        task: what the child does, for the log of a user who waits.

    Raises:
        RehearsalProcessError: the process cannot be forked, or the function cannot be sent to a new one.
    """

    def __init__(self, function: Callable[[Refuse], Any], receive: Callable[[Any], Any] = lambda value: value) -> None:
        self._receive = receive
        self._watch: Watch | None = None
        self._process = _Fork(function) if hasattr(os, "fork") else _new_process(function)

    def timed_by(self, watch: Watch | None) -> Child:
        """Ends the child if the watch's time is up while `result` waits for it. Returns this child."""
        self._watch = watch
        return self

    def end(self) -> None:
        """Stops the child and discards its answer."""
        self._process.end()

    def result(self) -> Any:
        """Waits for the child, and returns `receive(value)` of the value that the child has computed.

        Raises:
            PlannerError: the function raised this error in the child.
            RehearsalProcessError: the function raised another error, or the child ended without an answer.
            TimeIsUp: the time of the watch is up (`timed_by`).
        """
        return self._receive(self._process.wait(self._check, lambda kind, message: None))

    def _check(self) -> None:
        if self._watch is not None:
            self._watch.check()


class _Fork:
    """A forked process with the methods of `NewProcess`."""

    def __init__(self, function: Callable[[Refuse], Any]) -> None:
        if torch.cuda.is_initialized():
            raise RehearsalProcessError(
                "this process cannot be forked for a rehearsal, because CUDA is initialized in it: plan before the "
                "first use of CUDA, or in a separate process with the `plan` command"
            )
        sys.stdout.flush()
        sys.stderr.flush()
        self._reader, writer = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 and later warn of every fork of a process with threads, and torch's kernels start some. The
            # child uses none of them, and `planner.safe_process` looks for Python's threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            os.close(self._reader)
            _serve(function, writer)
        os.close(writer)

    def end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.close(self._reader)
        os.waitpid(self._pid, 0)

    def wait(self, check: Callable[[], None], receive: Callable[[str, Any], None]) -> Any:
        try:
            answer = b"".join(self._chunks(check))
        except BaseException:  # For example an interrupt (Ctrl-C), which the child may not have received.
            self.end()
            raise
        os.close(self._reader)
        _, status = os.waitpid(self._pid, 0)
        if not answer or os.WIFSIGNALED(status):
            raise RehearsalProcessError(
                f"the child process that rehearses the step ended without a result: {_cause(status)}"
            )
        kind, value = pickle.loads(answer)
        if kind == "value":
            return value
        raise value

    def _chunks(self, check: Callable[[], None]) -> Iterator[bytes]:
        """Yields the parts of the child's answer as they arrive."""
        while True:
            check()
            if not select.select([self._reader], [], [], _SECONDS_BETWEEN_CHECKS)[0]:
                continue
            chunk = os.read(self._reader, 1 << 20)
            if not chunk:
                return
            yield chunk


def _new_process(function: Callable[[Refuse], Any]) -> NewProcess:
    try:
        return NewProcess(functools.partial(_computed, function))
    except CannotBeSentError as error:
        raise RehearsalProcessError(
            f"a rehearsal needs a new process, because this system ({sys.platform}) cannot fork one, and {error} "
            "cannot be sent there: remove it from the model"
        ) from error


def _computed(function: Callable[[Refuse], Any], send: Send) -> Any:
    """Runs in a new process: computes the function, with errors as `Child.result` raises them."""

    def refuse(error: PlannerError) -> NoReturn:
        send("error", error)
        os._exit(0)

    torch.set_num_threads(1)
    try:
        return function(refuse)
    except PlannerError:
        raise
    except Exception as error:  # any other error of the user's code
        raise _translated(error) from error


def run_in_child(function: Callable[[], Any]) -> Any:
    """Computes `function()` in a child process and returns its value, which must be picklable."""
    return Child(lambda refuse: function()).result()


def _serve(function: Callable[[Refuse], Any], writer: int) -> None:
    """Runs in the child: computes the answer, sends it to the pipe `writer`, and ends the process.

    What the model prints goes to standard error, because a program may read the planner's standard output (`--json`).
    """

    def refuse(error: PlannerError) -> NoReturn:
        _send(writer, ("error", error))
        os._exit(0)

    code = 1
    try:
        os.dup2(2, 1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C too, and decides whether to end the child
        torch.set_num_threads(1)
        # The workers of a data loader, too, get classes that cannot be imported by name. Python 3.14 pickles them.
        multiprocessing.set_start_method("fork", force=True)
        try:
            answer = ("value", function(refuse))
        except PlannerError as error:
            answer = ("error", error)
        except Exception as error:  # Any other error of the user's code is raised in the parent.
            answer = ("error", _translated(error))
        _send(writer, answer)
        code = 0
    finally:
        os._exit(code)


def _translated(error: Exception) -> RehearsalProcessError:
    """Converts an unexpected error to one with a message of one line, and with the traceback as a note."""
    if _NO_BACKWARD_IN_FORK in str(error):
        return BackwardInForkError(
            "a backward has run in this process, and on a machine with a GPU PyTorch then allows no backward in a "
            "forked process: plan before the first backward, or in a separate process with the `plan` command"
        )
    first_line = next(iter(str(error).strip().splitlines()), "no message")
    failed = RehearsalProcessError(f"the rehearsal failed with {type(error).__name__}: {first_line}")
    failed.add_note("".join(traceback.format_exception(error)))
    return failed


def _send(writer: int, answer: tuple[str, Any]) -> None:
    """Writes the answer of the child to the pipe and closes it."""
    with os.fdopen(writer, "wb") as pipe:
        pickle.dump(answer, pipe, protocol=pickle.HIGHEST_PROTOCOL)


def _cause(status: int) -> str:
    """Returns text for an error message that says why a process ended. `status` is from `waitpid`."""
    if not os.WIFSIGNALED(status):
        return f"exit code {os.waitstatus_to_exitcode(status)}"
    number = os.WTERMSIG(status)
    hint = (
        ", perhaps because host memory ran out: close other programs, or plan on a machine with more memory"
        if number == signal.SIGKILL
        else ""
    )
    return f"killed by signal {number}{hint}"
