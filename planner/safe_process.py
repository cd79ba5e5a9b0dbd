"""Runs planning in a process of its own where this process cannot be forked safely.

Rehearsals run in forked processes, which have the model without copying it. A fork is not possible once CUDA is
initialized, and it is not safe while other threads run: the child has their locks and not the threads that would
release them. Then planning runs in one new process, which forks its rehearsals itself. On a system without fork,
planning runs in this process, and each rehearsal in a new one (`forked_process.Child`).

The environment variable PLANNER_START_METHOD overrides the choice: 'fork' or 'spawn'; the default is 'auto'.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from planner.errors import RehearsalProcessError, TimeLimitError
from planner.progress import TimeIsUp, Watch
from planner.spawned import CannotBeSentError, NewProcess, Send
from planner.spawned.surroundings import default_card, set_aside
from planner.virtual_gpu.forked_process import BackwardInForkError

T = TypeVar("T")

_GRACE_SECONDS = 10.0
"""Time after the limit in which the new process may still send its answer."""
_REMEDY = (
    "plan before the first use of CUDA, or put a function that returns the model into a file and run `plan "
    "path/file.py:function`"
)


def in_safe_process(function: Callable[[Watch], T], watch: Watch) -> T:
    """Returns `function(watch)`, computed in this process if it can be forked safely, else in a new process.

    Args:
        function: a function that forks rehearsals, with everything it needs bound to it. It runs without the contexts
            that the caller has entered (`planner.spawned.surroundings`).
        watch: limits the time, and receives progress, also that of the new process.

    Raises:
        PlannerError: `function` raised it.
        RehearsalProcessError: the function cannot be sent to a new process, or that process ended without an answer.
        TimeIsUp: the time was up.
    """
    device = default_card()
    with set_aside():
        return _in_safe_process(functools.partial(_with_device, function, device), watch)


def _with_device(function: Callable[[Watch], T], device: str | None, watch: Watch) -> T:
    """Calls the function with the caller's default device, which a new process does not have."""
    with contextlib.nullcontext() if device is None or default_card() is not None else torch.device(device):
        return function(watch)


def _in_safe_process(function: Callable[[Watch], T], watch: Watch) -> T:
    method = os.environ.get("PLANNER_START_METHOD", "auto")
    if method == "fork" or not hasattr(os, "fork"):
        return function(watch)
    if method == "spawn":
        return _spawned_or_why_not(function, watch, "PLANNER_START_METHOD is 'spawn'")
    if torch.cuda.is_initialized():
        return _spawned_or_why_not(function, watch, "CUDA is initialized in this process")
    if threads := other_threads():
        try:
            return _spawned(function, watch)
        except CannotBeSentError:  # a fork while threads run is a small risk, and better than no plan
            watch.stage(f"rehearsing in forks of a process with {len(threads)} other threads")
    try:
        return function(watch)
    except BackwardInForkError:
        reason = "a backward has run in this process, and PyTorch then allows no backward in its forks"
        return _spawned_or_why_not(function, watch, reason)


def other_threads() -> list[threading.Thread]:
    """Returns Python's threads in this process, without the one that asks."""
    return [thread for thread in threading.enumerate() if thread is not threading.current_thread()]


def _spawned_or_why_not(function: Callable[[Watch], T], watch: Watch, reason: str) -> T:
    """Computes the function in a new process. If it cannot be sent there, raises an error that says why it has to."""
    try:
        return _spawned(function, watch)
    except CannotBeSentError as error:
        raise RehearsalProcessError(
            f"planning needs a process of its own, because {reason}, and {error} cannot be sent there: {_REMEDY}"
        ) from error


def _spawned(function: Callable[[Watch], T], watch: Watch) -> T:
    """Computes the function in a new process. Raises `CannotBeSentError` if it cannot be sent there."""
    began = time.time() - watch.elapsed_seconds
    process = NewProcess(functools.partial(_with_watch, function, watch.limit_seconds, began))
    watch.stage("starting a process for planning")

    def check() -> None:
        if watch.overrun_seconds > _GRACE_SECONDS:
            raise TimeIsUp

    return process.wait(check, lambda kind, progress: watch.relay(progress))


def _with_watch(function: Callable[[Watch], T], seconds: float | None, began: float, send: Send) -> T:
    """Runs in the new process: calls the function with a watch that sends its progress back.

    Args:
        began: `time.time()` when planning began.
    """

    def report(progress: Any) -> None:
        send("progress", progress)

    try:
        return function(Watch(seconds=seconds, elapsed_seconds=time.time() - began, report=report))
    except TimeIsUp:
        raise TimeLimitError("planning ended before any plan was certified: give more time") from None
