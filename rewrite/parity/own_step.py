"""Run a step of the user's own with rewritten and with original modules, on copies, and compare the results."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from planner.plan_types.decision_base import Decision, Role, with_roles
from planner.plan_types.plan import Plan
from planner.rewrite.application import apply_decisions
from planner.rewrite.parity.function_copy import copy_of_function
from planner.rewrite.parity.result import Row, compare
from planner.rewrite.portable.batch_slicing import map_tensors
from planner.workload.call_convention import Calling, StepFn
from planner.workload.optimizer_choice import Optimizers


def own_step_rows(
    plan: Plan,
    model: torch.nn.Module,
    batch: Any,
    *,
    step: StepFn,
    optimizer: Optimizers,
    device: torch.device,
    steps: int,
) -> list[Row]:
    """Train copies with the whole plan and without what recomputes or offloads, and return a row for each result.

    Both copies have the plan's optimizers and frozen modules, so that every bit has to be equal: parameters, buffers
    and the tensors of the optimizers after `steps` steps from the same random state.
    """
    found, expected = (
        _trained(decisions, model, batch, step=step, optimizer=optimizer, device=device, steps=steps)
        for decisions in (plan.decisions, with_roles(plan.decisions, Role.OPTIMIZER, Role.FREEZING))
    )
    return [row for kind in expected for row in compare("as planned", kind, expected[kind], found[kind], bound=0.0)]


def _trained(
    decisions: Sequence[Decision],
    model: torch.nn.Module,
    batch: Any,
    *,
    step: StepFn,
    optimizer: Optimizers,
    device: torch.device,
    steps: int,
) -> dict[str, dict[str, torch.Tensor]]:
    """Train a copy, and return its tensors on the host by kind and name.

    The state that the step function keeps is copied, too: both trainings begin with it, and it does not change.
    """
    memo: dict[int, Any] = {}
    model, optimizer = copy.deepcopy((model, optimizer), memo)
    step = copy_of_function(step, memo)
    rewritten = apply_decisions(
        decisions, model.to(device), optimizer=optimizer, calling=Calling.STEP, batch_size=1, step=step
    )
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Seems like `optimizer.step")  # of the copy of a scheduler
        for _ in range(steps):
            rewritten.step(map_tensors(lambda tensor: tensor.clone(), batch))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states = (pair for each in rewritten.optimizers for pair in each.state.items())
    results: dict[str, dict[str, Any]] = {
        "parameter": dict(model.named_parameters()),
        "buffer": dict(model.named_buffers()),
        "state": {
            f"{names.get(id(parameter))} {key}": value
            for parameter, state in states
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        },
    }
    return map_tensors(lambda tensor: tensor.detach().cpu().clone(), results)
