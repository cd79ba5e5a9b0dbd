"""Rehearse any program on the virtual GPU, from an empty card: model creation, loops, whatever it allocates.

`planner.rehearsal` takes one training step apart; this only writes down the stream of allocations.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from planner import virtual_gpu
from planner.child import Child, Refuse
from planner.rehearsal import on_virtual_gpu
from planner.step_graph import StepGraph

Program = Callable[[torch.device], object]
"""Given the device; what it makes on other devices is not counted."""


def rehearse_program(program: Program, target: virtual_gpu.Target) -> StepGraph:
    """Run `program` in a child process and return what it allocated, plainly recorded as one step.

    Raises:
        RehearsalError: an op that the virtual GPU cannot run, with its line.
    """
    return Child(lambda refuse: _run(program, target, refuse)).result()


def _run(program: Program, target: virtual_gpu.Target, refuse: Refuse) -> StepGraph:
    with on_virtual_gpu(target, refuse, what_if=False) as recorder, recorder:
        recorder.setup_ends()
        program(torch.device(virtual_gpu.NAME))
        return recorder.finish(steps=1, primed=False, micro_batch_sizes=())
