"""Checks the arguments that come with the user's own training step, and finds whether the user's code takes part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from planner.errors import WorkloadError
from planner.workload.call_convention import LossFn, StepFn

if TYPE_CHECKING:
    from planner.workload.workload import Workload

WITHOUT_TENSORS = (type(None), int, float, str, Mapping, list, tuple)
"""Types of a batch that may have no tensors: the step then makes its own samples."""
HAVE_OWN_CODE = ("loss_fn", "step", "parallelize", "program", "stream")
"""Fields of `Workload` that may hold the user's code. They are None if the planner made the workload from a config."""


def as_module(model: torch.nn.Module | Mapping[str, torch.nn.Module]) -> torch.nn.Module:
    """Returns the model of a step of the user's own: a module, or a dict of modules as one `torch.nn.ModuleDict`.

    Raises:
        WorkloadError: a key or a value of the dict cannot be in a `ModuleDict`.
    """
    if not isinstance(model, Mapping):
        return model
    try:
        return torch.nn.ModuleDict(model)
    except (TypeError, KeyError) as error:
        raise WorkloadError(
            f"the dict of modules cannot become a torch.nn.ModuleDict ({error.args[0]}): give modules, with "
            "names that have no dot and are not attributes of ModuleDict"
        ) from error


def refuse_with_step(step: StepFn, loss_fn: LossFn | None, *, gradients_alive: bool) -> None:
    """Raises `WorkloadError` for arguments that set what the user's own step does itself."""
    if not callable(step):
        raise WorkloadError(
            f"step is of type {type(step).__name__}: give a function that takes (model, optimizer, batch) and runs one "
            "training step"
        )
    if loss_fn is not None:
        raise WorkloadError("the step function computes the loss itself: leave loss_fn out")
    if gradients_alive:
        raise WorkloadError(
            "gradients_alive (--accumulating-loop) is not for a step of your own: write all backwards of one optimizer "
            "step into the function"
        )


def of_own_step(returned: Mapping[str, Any], reference: str) -> dict[str, Any]:
    """Returns the step and the optimizers among what a function returned as a dict."""
    required, allowed = {"model", "batch", "step"}, {"model", "batch", "step", "optimizer"}
    if not required <= returned.keys() <= allowed:
        raise WorkloadError(
            f"'{reference}' returned a dict with {', '.join(map(str, returned)) or 'nothing'}: for a step of your own "
            "return a dict with model, batch, step and optimizer, as planner.plan takes them"
        )
    return {name: returned[name] for name in ("step", "optimizer") if name in returned}


def runs_own_code(workload: Workload) -> bool:
    """True if the user's own code takes part in the step; False if the planner made the whole step from a config."""
    has_code = any(getattr(workload, name) is not None for name in HAVE_OWN_CODE)
    return workload.made_from is None or has_code or not isinstance(workload.optimizer, str)
