"""Rehearse training steps of a model on the virtual GPU, in a child process."""

from __future__ import annotations

import dataclasses
import gc
import logging
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from planner import virtual_gpu
from planner.child import Child
from planner.errors import PlannerError, WorkloadError
from planner.in_place import InPlaceRule
from planner.recorder import Recorder
from planner.source_lines import is_model_code
from planner.step_graph import Category, StepGraph
from planner.workload import map_tensors, tensors_of

Prepare = Callable[[torch.nn.Module], tuple[Callable[[Any], Any], torch.optim.Optimizer]]
"""From a model to its training step (`step(batch)`) and optimizer; called in the child, on the virtual model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What to rehearse."""

    model: torch.nn.Module
    batch: Any
    batch_size: int
    """Dimension 0 of the batch's tensors; tensors without it are left as they are."""
    prepare: Prepare
    target: virtual_gpu.Target
    micro_batch_sizes: tuple[int, ...]
    """The step is given a batch of their sum; `prepare` decides how it is split."""
    steps: int
    primed: bool
    """Whether the optimizer's state exists before the first recorded step."""
    what_if: bool

    def start(self) -> Child:
        """Begin in a child process; `.result()` is a `StepGraph`."""
        return Child(lambda: _rehearse(self))


def rehearse(rehearsal: Rehearsal) -> StepGraph:
    """Rehearse in a child process.

    Raises:
        RehearsalError: an op that the virtual GPU cannot run, with its module and line.
        WorkloadError: the model refused the batch.
    """
    return rehearsal.start().result()


def _rehearse(rehearsal: Rehearsal) -> StepGraph:
    gc.freeze()
    gc.disable()
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # what fails is told in one line
    autocast = virtual_gpu.install(rehearsal.target)
    mode = virtual_gpu.VirtualGpuMode(allow_non_fake_inputs=True)
    with mode:
        in_place = InPlaceRule(virtual_gpu.NAME)
    recorder = Recorder(what_if=rehearsal.what_if, in_place=in_place)
    autocast.on_cast = lambda tensor: recorder.mark(tensor, Category.AUTOCAST)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.set_multithreading_enabled(False),
        mode,
        recorder,
    ):
        model = rehearsal.model
        make_virtual(model)
        for tensor in (*model.parameters(), *model.buffers()):
            recorder.mark(tensor, Category.PARAMETER)
        batch = virtual_batch(rehearsal.batch, rehearsal.batch_size, sum(rehearsal.micro_batch_sizes))
        for _, tensor in tensors_of(batch):
            recorder.mark(tensor, Category.INPUT)
        step, optimizer = rehearsal.prepare(model)
        with recorder.watching(model, optimizer):
            if rehearsal.primed:
                _prime(model, optimizer)
            recorder.setup_ends()
            for number in range(rehearsal.steps):
                recorder.starts_step(number)
                _run_step(step, batch, model)
                gc.collect()
        return recorder.finish(
            steps=rehearsal.steps, primed=rehearsal.primed, micro_batch_sizes=rehearsal.micro_batch_sizes
        )


def _run_step(step: Callable[[Any], Any], batch: Any, model: torch.nn.Module) -> None:
    try:
        step(batch)
    except PlannerError:
        raise
    except (Exception, SystemExit) as error:
        message = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
        raise WorkloadError(
            f"the model refused the batch: {type(error).__name__}: {message} ({_place(error, model)})"
        ) from error


def _place(error: BaseException, model: torch.nn.Module) -> str:
    """Innermost module and line of model code in a traceback."""
    names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
    module, line = "", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        module = names.get(id(frame.f_locals.get("self")), module)
        if is_model_code(frame.f_code.co_filename):
            line = f"{frame.f_code.co_filename}:{number}"
    return f"in '{module or 'the step'}' at {line or 'unknown line'}"


def _prime(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer make its state, as if a step had been taken before."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def make_virtual(model: torch.nn.Module) -> None:
    """Replace parameters and buffers by fakes on the virtual GPU, in place; shared ones stay shared.

    In the order in which `torch.nn.Module.to` moves them: those of children before a module's own.
    """
    memo: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in memo:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=virtual_gpu.NAME)
            if isinstance(tensor, torch.nn.Parameter):
                empty = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
                vars(empty).update(vars(tensor))
            memo[id(tensor)] = empty
        return memo[id(tensor)]

    for module in dict.fromkeys(_children_first(model)):
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is not None:
                    registry[name] = fake(tensor)
        if isinstance(module, torch.nn.RNNBase):
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def _children_first(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def virtual_batch(batch: Any, batch_size: int, wanted_size: int) -> Any:
    """The same structure with tensors on the virtual GPU; those with `batch_size` samples get `wanted_size`."""

    def fake(leaf: torch.Tensor) -> torch.Tensor:
        shape = list(leaf.shape)
        if shape and shape[0] == batch_size:
            shape[0] = wanted_size
        return torch.empty(shape, dtype=leaf.dtype, device=virtual_gpu.NAME, requires_grad=leaf.requires_grad)

    return map_tensors(fake, batch)
