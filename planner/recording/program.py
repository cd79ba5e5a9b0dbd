"""Rehearses any program on the virtual GPU, starting from an empty card: model creation, loops, and so on.

Only the ops and the storages that the program allocates are recorded. `planner.recording.rehearsal` records training
steps, with their phases and modules.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from planner.recording.rehearsal import on_virtual_gpu
from planner.recording.step_graph import StepGraph
from planner.virtual_gpu import backend
from planner.virtual_gpu.forked_process import Child, Refuse

Program = Callable[[torch.device], object]
"""A function that runs the program on the device that it gets. Memory on other devices is not counted."""


def rehearse_program(program: Program, target: backend.Target) -> StepGraph:
    """Runs `program` in a child process and returns a plain recording of it as one step.

    Args:
        program: the program.
        target: the properties of the simulated card.

    Raises:
        RehearsalError: the virtual GPU cannot run an op of the program; the message names the op and the source line.
        RehearsalProcessError: the program raised another error, or the child process ended without a result.
    """
    return Child(lambda refuse: _run(program, target, refuse)).result()


def _run(program: Program, target: backend.Target, refuse: Refuse) -> StepGraph:
    with on_virtual_gpu(target, refuse, what_if=False) as recorder, recorder:
        recorder.setup_ends()
        program(torch.device(backend.NAME))
        return recorder.finish(steps=1, primed=False, micro_batch_sizes=())
