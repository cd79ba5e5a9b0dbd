"""Runs a function in a child process, forked where the system can, and returns its result as plain data.

Registering the virtual GPU changes a process until it ends, so it never happens in the user's process. A forked child
has the user's model without pickling it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Protocol

import torch

from planner.errors import MachineError, PlannerError, RehearsalProcessError
from planner.progress import Watch
from planner.spawned import CannotBeSentError, NewProcess, Send, ended_from_outside, lower_priority
from planner.spawned.answer import AnswerChannel
from planner.spawned.interrupts import Handlers, interrupts_held_back
from planner.spawned.lifetime import end_with

_NO_BACKWARD_IN_FORK = "in combination with fork-based multiprocessing"
"""Text in the error that autograd raises in a child forked after a backward (torch/csrc/autograd/engine.cpp)."""

_NO_ROOM = errno.EFBIG, errno.ENOSPC
"""Numbers of the errors that a file may not become larger, or that its disk is full."""
_STACK_BYTES = 96 << 20
"""Maximum stack of a child in bytes, if the hard limit allows it. If Python has seen the nodes of an autograd graph,
PyTorch frees the graph recursively. With 8 MiB, tens of thousands of nodes in a row end the process with signal 11.
Linux keeps at least 128 MiB free below the stack of the main thread."""
_SHORTEST_PAUSE = 0.001
"""Seconds before it is checked again whether a child that has answered has ended. Later pauses are longer."""
_SECONDS_BETWEEN_CHECKS = 0.2
"""While a child is waited for, its watch is checked so often."""

Refuse = Callable[[PlannerError], NoReturn]
"""A function that sends an error to the parent as the answer of the child, and ends the child. It does not return."""


class Running(Protocol):
    """Something that computes a value, such as a child process."""

    def result(self) -> Any:
        """Waits for the value, and returns it."""

    def end(self) -> None:
        """Stops, and discards the value."""

    @property
    def is_ready(self) -> bool:
        """True if the value is known, so that nothing is computed any more."""


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
        MachineError: the system starts no further process.
    """

    def __init__(self, function: Callable[[Refuse], Any], receive: Callable[[Any], Any] = lambda value: value) -> None:
        self._receive = receive
        self._watch: Watch | None = None
        self._process = _Fork(function) if hasattr(os, "fork") else _new_process(function)

    def timed_by(self, watch: Watch | None) -> Child:
        """Ends the child if the watch's time is up while `result` waits for it. Returns this child."""
        self._watch = watch
        return self

    def in_background(self) -> Child:
        """Lowers the priority of the child (`lower_priority`). Returns this child."""
        self._process.in_background()
        return self

    def end(self) -> None:
        """Stops the child and discards its answer."""
        self._process.end()

    @property
    def is_ready(self) -> bool:
        """True if the child has sent its answer, or has ended, so that `result` returns at once.

        It is true, too, if the model's code has closed all files of the child.
        """
        return self._process.is_ready

    def result(self) -> Any:
        """Waits for the child, and returns `receive(value)` of the value that the child has computed.

        Raises:
            PlannerError: the function raised this error in the child.
            RehearsalProcessError: the function raised another error, or the child ended without an answer.
            MachineError: the child was ended from outside, for example because memory ran out.
            TimeIsUp: the time of the watch is up (`timed_by`).
        """
        return self._receive(self._process.wait(self._check, lambda kind, message: None))

    def _check(self) -> None:
        if self._watch is not None:
            self._watch.check()


class _Fork:
    """A forked process with the methods of `NewProcess`."""

    _pid: int | None = None
    """Id of the process; None before it was forked, and after its end."""
    _parent: int | None = None
    """Id of the process that created this object; None before it can fork."""
    _status: int | None = None
    """Status of the process, as `os.waitpid` returns it; None before its end, or if the system has dropped it."""

    def __init__(self, function: Callable[[Refuse], Any]) -> None:
        if torch.cuda.is_initialized():
            raise RehearsalProcessError(
                "this process cannot be forked for a rehearsal, because CUDA is initialized in it: plan before the "
                "first use of CUDA, or in a separate process with the `plan` command"
            )
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None in a process without a console
            stream.flush()
        self._answer, self._parent = AnswerChannel(), os.getpid()
        try:
            with interrupts_held_back() as handlers:
                self._answer.open()
                self._pid = _forked(function, self._answer, handlers)
                self._answer.close("writer")
        except BaseException:
            self.end()
            raise

    def in_background(self) -> None:
        if self._pid is not None:
            lower_priority(self._pid)

    def __del__(self) -> None:
        # After an interrupt, the owner may have no reference to this object any more, so that nothing else ends it.
        if os.getpid() == self._parent and (self._pid is not None or self._answer.is_open):
            self.end()

    def end(self) -> None:
        """Ends the process. A second call does nothing, because the first one drops the process id and descriptors."""
        with interrupts_held_back():
            if self._pid is not None:
                with contextlib.suppress(ProcessLookupError):  # it has ended, and the system has dropped its status
                    os.kill(self._pid, signal.SIGKILL)
                self._reap()
            self._answer.close()

    @property
    def is_ready(self) -> bool:
        return self._answer.is_ready

    def _reap(self, options: int = 0) -> bool:
        """Waits for the end of the process. Drops its id, and stores its status, if it has ended.

        Args:
            options: as for `os.waitpid`.

        Returns:
            True if the process has ended.
        """
        assert self._pid is not None
        try:
            ended, self._status = os.waitpid(self._pid, options)
        except ChildProcessError:  # this process ignores SIGCHLD, or a handler of the user's has waited for it
            ended, self._status = self._pid, None
        if ended:
            self._pid = None
        return bool(ended)

    def wait(self, check: Callable[[], None], receive: Callable[[str, Any], None]) -> Any:
        try:
            has_answer = self._answer.wait(check, _SECONDS_BETWEEN_CHECKS)
            pause = _SHORTEST_PAUSE
            while self._pid is not None:  # the user's code may have closed the pipe, and go on
                check()
                with interrupts_held_back():
                    if self._reap(os.WNOHANG):
                        break
                time.sleep(pause)
                pause = min(2 * pause, _SECONDS_BETWEEN_CHECKS)
            status = self._status
            number = None if status is None or not os.WIFSIGNALED(status) else os.WTERMSIG(status)
            if number is not None and (why := ended_from_outside(number)) is not None:
                raise MachineError(f"the child process that rehearses the step was ended: {why}")
            if not has_answer or number is not None:
                raise RehearsalProcessError(
                    f"the child process that rehearses the step ended without a result: {_cause(status)}"
                )
            kind, value = self._read()
        finally:  # also after an interrupt (Ctrl-C), which the child may not have received
            self.end()
        if kind == "value":
            return value
        raise value

    def _read(self) -> tuple[str, Any]:
        """Returns the answer: a pair (kind, value), with the kind 'value' or 'error'."""
        try:
            return self._answer.read()
        except Exception as error:  # to unpickle an answer runs code of its class, which may fail
            raise RehearsalProcessError(
                f"the answer of the child process cannot be read: {type(error).__name__}: {error}"
            ) from error


def end_all(children: Iterable[Running]) -> None:
    """Ends several processes. An interrupt (Ctrl-C) takes effect when all have ended."""
    with interrupts_held_back():
        for child in children:
            child.end()


def _forked(function: Callable[[Refuse], Any], answer: AnswerChannel, handlers: Handlers) -> int:
    """Forks a child that computes the function and never leaves this call. Returns its process id.

    Args:
        answer: an open channel, through which the child sends its answer.
        handlers: the handlers of signals that the child gets.

    Raises:
        MachineError: the system starts no further process.
    """
    parent = os.getpid()
    try:
        with warnings.catch_warnings():
            # Python 3.12 and later warn of every fork of a process with threads, and torch's kernels start some. The
            # child uses none of them, and `planner.safe_process` looks for Python's threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            end_with(parent)
            answer.close("reader")
            for number, handler in handlers.items():
                signal.signal(number, handler)
            _serve(function, answer)
        return pid
    except OSError as error:
        raise MachineError(
            f"the system starts no further process for a rehearsal ({error.strerror}): end other processes, or raise "
            "the limit (`ulimit -u`)"
        ) from error
    finally:
        if os.getpid() != parent:  # an error in the child must not return to the user's program a second time
            os._exit(1)


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


def run_in_child(function: Callable[[], Any], watch: Watch | None = None) -> Any:
    """Computes `function()` in a child process and returns its value, which must be picklable.

    Args:
        watch: limits the time of the child; None for no limit.
    """
    return Child(lambda refuse: function()).timed_by(watch).result()


def _raise_stack_limit() -> None:
    """Raises the limit of the stack, which applies if the main thread was forked, to `_STACK_BYTES` or the hard limit.

    Does nothing if the limit is already as high.
    """
    import resource  # on Windows no process is forked

    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = _STACK_BYTES if hard == resource.RLIM_INFINITY else min(_STACK_BYTES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))


def _serve(function: Callable[[Refuse], Any], answer: AnswerChannel) -> None:
    """Runs in the child: computes a value or an error, sends it as the answer, and ends the process.

    What the model prints goes to standard error, because a program may read the planner's standard output (`--json`).
    """

    def refuse(error: PlannerError) -> NoReturn:
        answer.send(("error", error))
        os._exit(0)

    code = 1
    try:
        # If the child ends without an answer, its parent learns this only when every process has closed the pipe. So
        # processes that the model forks close it at once.
        os.register_at_fork(after_in_child=answer.close)
        _print_to_standard_error()
        _raise_stack_limit()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C too, and decides whether to end the child
        torch.set_num_threads(1)
        # The workers of a data loader, too, get classes that cannot be imported by name. Python 3.14 pickles them.
        multiprocessing.set_start_method("fork", force=True)
        try:
            result = ("value", function(refuse))
        except PlannerError as error:
            result = ("error", error)
        except Exception as error:  # Any other error of the user's code is raised in the parent.
            result = ("error", _translated(error))
        try:
            answer.send(result)
        except Exception as error:  # the value cannot be pickled or written
            answer.send(("error", _why_not_sent(error)))
        code = 0
    finally:
        os._exit(code)


def _why_not_sent(error: Exception) -> PlannerError:
    """Converts an error of `AnswerChannel.send`: of pickling the value, or of writing it."""
    if not (isinstance(error, OSError) and error.errno in _NO_ROOM):
        return _translated(error)
    return MachineError(
        f"the child process that rehearses the step cannot write its result ({os.strerror(error.errno)}): raise the "
        "limit on the size of files (`ulimit -f`), or set TMPDIR to a folder with free space"
    )


def _print_to_standard_error() -> None:
    """Makes the standard output go to standard error, or nowhere if there is none."""
    try:
        os.dup2(2, 1)
    except OSError:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            if stream != nowhere:
                os.dup2(nowhere, stream)


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


def _cause(status: int | None) -> str:
    """Returns text for an error message that says how a process ended. `status` is from `os.waitpid`."""
    if status is None:
        return "exit code unknown, because this process ignores SIGCHLD or handles it"
    return f"killed by signal {-code}" if (code := os.waitstatus_to_exitcode(status)) < 0 else f"exit code {code}"
