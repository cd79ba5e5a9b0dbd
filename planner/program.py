"""Rehearse any program on the virtual GPU, from an empty card: model creation, loops, whatever it allocates.

`planner.rehearsal` takes one training step apart; this only writes down the stream of allocations.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from planner import virtual_gpu
from planner.child import Child
from planner.in_place import InPlaceRule
from planner.recorder import Recorder
from planner.step_graph import Category, StepGraph

Program = Callable[[torch.device], object]
"""Given the device; what it makes on other devices is not counted."""


def rehearse_program(program: Program, target: virtual_gpu.Target) -> StepGraph:
    """Run `program` in a child process and return what it allocated, plainly recorded as one step.

    Raises:
        RehearsalError: an op that the virtual GPU cannot run, with its line.
    """
    return Child(lambda: _run(program, target)).result()


def _run(program: Program, target: virtual_gpu.Target) -> StepGraph:
    gc.freeze()
    gc.disable()
    autocast = virtual_gpu.install(target)
    mode = virtual_gpu.VirtualGpuMode(allow_non_fake_inputs=True)
    with mode:
        in_place = InPlaceRule(virtual_gpu.NAME)
    recorder = Recorder(what_if=False, in_place=in_place)
    autocast.on_cast = lambda tensor: recorder.mark(tensor, Category.AUTOCAST)
    with torch.autograd.set_multithreading_enabled(False), mode, recorder:
        recorder.setup_ends()
        program(torch.device(virtual_gpu.NAME))
        return recorder.finish(steps=1, primed=False, micro_batch_sizes=())
