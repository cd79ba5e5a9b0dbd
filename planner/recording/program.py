"""Rehearses any program on the virtual GPU, starting from an empty card: model creation, loops, and so on.

`planner.recording.rehearsal` records training steps with their phases and modules; this records only the ops and the
storages that a program allocates.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from planner.recording.rehearsal import on_virtual_gpu
from planner.recording.step_graph import StepGraph
from planner.virtual_gpu import backend
from planner.virtual_gpu.forked_process import Child, Refuse

Program = Callable[[torch.device], object]
"""A function that takes the device and runs the program. Memory on other devices is not counted."""


def rehearse_program(program: Program, target: backend.Target) -> StepGraph:
    """Runs `program` in a child process and returns a plain recording of it as one step.

    Raises:
        RehearsalError: the virtual GPU cannot run an op; the message names its line.
    """
    return Child(lambda refuse: _run(program, target, refuse)).result()


def _run(program: Program, target: backend.Target, refuse: Refuse) -> StepGraph:
    with on_virtual_gpu(target, refuse, what_if=False) as recorder, recorder:
        recorder.setup_ends()
        program(torch.device(backend.NAME))
        return recorder.finish(steps=1, primed=False, micro_batch_sizes=())
