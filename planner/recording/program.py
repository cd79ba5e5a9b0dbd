"""Rehearse any program on the virtual GPU, from an empty card: model creation, loops, whatever it allocates.

`planner.recording.rehearsal` takes one training step apart; this only writes down the stream of allocations.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from planner.recording.rehearsal import on_virtual_gpu
from planner.recording.step_graph import StepGraph
from planner.virtual_gpu import backend
from planner.virtual_gpu.forked_process import Child, Refuse

Program = Callable[[torch.device], object]
"""Given the device; what it makes on other devices is not counted."""


def rehearse_program(program: Program, target: backend.Target) -> StepGraph:
    """Run `program` in a child process and return what it allocated, plainly recorded as one step.

    Raises:
        RehearsalError: an op that the virtual GPU cannot run, with its line.
    """
    return Child(lambda refuse: _run(program, target, refuse)).result()


def _run(program: Program, target: backend.Target, refuse: Refuse) -> StepGraph:
    with on_virtual_gpu(target, refuse, what_if=False) as recorder, recorder:
        recorder.setup_ends()
        program(torch.device(backend.NAME))
        return recorder.finish(steps=1, primed=False, micro_batch_sizes=())
