"""Creates the optimizers and the learning-rate scheduler of a rewritten step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from planner.errors import DecisionError, WorkloadError
from planner.workload.optimizer_choice import OPTIMIZERS, Optimizers, by_name

OptimizerChoice = torch.optim.Optimizer | Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] | str
"""A torch optimizer of the model; a function that takes parameters and returns an optimizer; or a name in
`OPTIMIZERS`."""

SchedulerChoice = LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler]
"""A learning-rate scheduler of the step's optimizer, or a function that takes the optimizer and returns a scheduler."""


def make_optimizer(choice: OptimizerChoice, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer over the trainable parameters of `model`. An optimizer object is returned unchanged.

    Raises:
        DecisionError: if no parameter requires a gradient.
        WorkloadError: for an unknown name, or an optimizer that holds none of this model's parameters.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise DecisionError(
            f"no parameter of {type(model).__name__} requires a gradient, so there is nothing to train: freeze fewer "
            "modules, or set requires_grad=True"
        )
    if isinstance(choice, str):
        if choice not in OPTIMIZERS:
            names = ", ".join(OPTIMIZERS)
            raise WorkloadError(
                f"optimizer '{choice}' is unknown by name: choose one of {names}, or give a torch optimizer "
                "or a function that takes parameters and returns an optimizer"
            )
        return OPTIMIZERS[choice].make(trainable)
    optimizer = choice if isinstance(choice, torch.optim.Optimizer) else choice(trainable)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise WorkloadError(
            f"the function that was given as optimizer returned a {type(optimizer).__name__}: it must return a "
            "torch.optim.Optimizer"
        )
    mine = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
        raise WorkloadError(
            f"{type(optimizer).__name__} has none of the parameters of {type(model).__name__}: create the optimizer "
            "from model.parameters(), after the model was moved or loaded"
        )
    return optimizer


def make_optimizers(choices: Optimizers, model: torch.nn.Module) -> dict[str, torch.optim.Optimizer]:
    """Returns the optimizers by name (`by_name`); a single optimizer has the name ''.

    A name or function in a dict gets the parameters of the submodule that has its key as path, or those of the whole
    model if there is no such submodule. Raises what `make_optimizer` raises.
    """
    modules = dict(model.named_modules(remove_duplicate=False)) if isinstance(choices, Mapping) else {}
    return {
        name: make_optimizer(spec, model if isinstance(spec, torch.optim.Optimizer) else modules.get(name, model))
        for name, spec in by_name(choices).items()
    }


def refuse_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise `WorkloadError` for an optimizer whose step needs a closure that runs the model again."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise WorkloadError(
            f"{type(optimizer).__name__} runs the model again inside its own step (closure), and the plan does not "
            "include that: use an optimizer whose step needs gradients only, or plan a step of your own (step=...)"
        )


def refuse_mixed_lists(model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse an optimizer that updates lists of parameters in which some are DTensors and some are not.

    PyTorch's foreach and fused implementations raise an error for such lists (torch 2.11 to 2.13).

    Raises:
        DecisionError: the message names a parameter of each kind.
    """
    from torch.distributed.tensor import DTensor

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.requires_grad]
            divided = next((p for p in trained if isinstance(p, DTensor)), None)
            plain = next((p for p in trained if not isinstance(p, DTensor)), None)
            if divided is None or plain is None or not _uses_lists(group, plain.device.type):
                continue
            kind = type(optimizer).__name__
            raise DecisionError(
                f"PyTorch's {kind} cannot update plain tensors and DTensors together, and '{names.get(id(plain))}' is "
                f"a plain tensor, '{names.get(id(divided))}' a DTensor: let your function turn all parameters into "
                "DTensors, as fully_shard and SequenceParallel do, or plan in Python with an optimizer that loops over "
                f"parameters: planner.plan(..., optimizer=lambda parameters: torch.optim.{kind}(parameters, "
                "foreach=False))"
            )


def _uses_lists(group: dict, device_type: str) -> bool:
    """True if the optimizer updates the parameters of a group by foreach or fused kernels, as it does on a card."""
    if group.get("fused") or group.get("foreach"):
        return True
    return group.get("foreach", False) is None and device_type != "cpu"


def make_scheduler(choice: SchedulerChoice, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Returns the scheduler of this optimizer. A scheduler object is returned unchanged.

    Raises:
        WorkloadError: if the scheduler was created for a different optimizer, or needs a metric to step.
    """
    scheduler = choice if isinstance(choice, LRScheduler) else choice(optimizer)
    kind = type(scheduler).__name__
    if not isinstance(scheduler, LRScheduler):
        raise WorkloadError(
            f"the function that was given as scheduler returned a {kind}: it must return a "
            "torch.optim.lr_scheduler.LRScheduler"
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise WorkloadError(
            f"{kind} needs a metric, which the training step does not have: leave scheduler out, and call "
            "scheduler.step(metric) yourself"
        )
    if scheduler.optimizer is not optimizer:
        raise WorkloadError(
            f"the {kind} was created for a different optimizer than the step's {type(optimizer).__name__}: pass a "
            "function that takes the optimizer and returns a scheduler, such as scheduler=lambda optimizer: ..."
        )
    return scheduler
