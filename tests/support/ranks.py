"""Runs a function in several processes that belong together, such as the ranks of a training.

If one process fails, the others could wait for it until a timeout. So they are ended as soon as one has failed.
"""

from __future__ import annotations

import datetime
import faulthandler
import sys
import tempfile
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from planner.progress import Watch
from planner.virtual_gpu.forked_process import Child

T = TypeVar("T")

SECONDS = 200.0
"""The processes are ended if they have not all finished after this many seconds."""


def in_processes(count: int, run: Callable[[int], T]) -> list[T]:
    """Runs `run(rank)` for each rank in a process of its own, and returns the results in the order of the ranks.

    Raises:
        PlannerError: a process failed, see `Child.result`.
        TimeIsUp: the processes took longer than the time limit.
    """

    def of_rank(rank: int) -> T:
        # 10 seconds before the limit, each process that still runs prints the stacks of its threads. A process that
        # `run` forks must end with `os._exit`: it has no thread of this timer, for which a normal exit would wait.
        faulthandler.dump_traceback_later(SECONDS - 10, file=sys.__stderr__)
        return run(rank)

    watch, results = Watch(seconds=SECONDS), {}
    running = {rank: Child(lambda _, rank=rank: of_rank(rank)).timed_by(watch) for rank in range(count)}
    try:
        while running:
            ready = [rank for rank, child in running.items() if child.is_ready]
            for rank in ready:
                results[rank] = running.pop(rank).result()
            watch.check()
            time.sleep(0.0 if ready else 0.01)
    finally:
        for child in running.values():
            child.end()
    return [results[rank] for rank in range(count)]


def in_group(count: int, run: Callable[[int], T]) -> list[T]:
    """Returns `run(rank)` of each rank, computed in the processes of a group of `torch.distributed`, on the CPU."""

    def of_rank(rank: int, folder: str) -> T:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count,
            timeout=datetime.timedelta(seconds=SECONDS),
        )  # fmt: skip
        return run(rank)

    with tempfile.TemporaryDirectory() as folder:
        return in_processes(count, lambda rank: of_rank(rank, folder))
