"""Optimizer kernel: let a torch optimizer step with its fused kernel, or with its loop over single parameters.

On CUDA torch uses the foreach implementation by default, which allocates temporaries for all parameters at once (Adam:
one more copy of the parameters, Adagrad: two). `fused=True` updates in place with one kernel; `foreach=False` allocates
temporaries for one parameter at a time. The optimizer object, its groups, schedules and state are kept. Only the step
counters move, because the fused kernel reads them from the parameters' device (torch/optim/adam.py, "special device
hosting for step").

The gradient scaler unscales gradients itself and skips a step whose gradients are not finite. It leaves both to the
kernel only if the optimizer was constructed with `fused=True`, which is not the case here; the results are the same.
"""

from __future__ import annotations

import torch

from planner.errors import DecisionError
from planner.plan_types.decisions import OptimizerKernel
from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import EmittedCode
from planner.rewrite.rewriting import Change, Rewriting
from planner.workload.torch_optimizers import why_no_kernel

OPTIONS = {"fused": ("fused", True), "for-loop": ("foreach", False)}
"""Kernel of the decision -> option of torch's optimizers, in their constructors and groups, and its value."""


def optimizer_kernel(rewriting: Rewriting, decision: OptimizerKernel) -> None:
    """Set the option in all groups of the optimizer, now and after `load_state_dict`, which replaces the groups.

    Raises:
        DecisionError: if the optimizer has no such kernel, or its user has already chosen one.
    """
    optimizer = rewriting.optimizer
    why_not = why_no_kernel(decision.kernel, optimizer, rewriting.model)
    if why_not is not None:
        raise DecisionError(f"optimizer-kernel {decision.kernel} cannot be set: {why_not}; or forbid optimizer-kernel")
    option, value = OPTIONS[decision.kernel]
    before = optimizer.defaults.get(option)

    def choose(_: torch.optim.Optimizer) -> None:
        _set(optimizer, option, value)

    def restore() -> None:
        hook.remove()
        _set(optimizer, option, None)
        optimizer.defaults[option] = before

    hook = optimizer.register_load_state_dict_post_hook(choose)
    choose(optimizer)
    rewriting.changes.append(
        Change(
            place=f"{option} of {type(optimizer).__name__}",
            intact=lambda: all(group.get(option) is value for group in optimizer.param_groups),
            restore=restore,
        )
    )


def _set(optimizer: torch.optim.Optimizer, option: str, value: bool | None) -> None:
    """Set the option in the optimizer's defaults and groups. None lets torch choose."""
    optimizer.defaults[option] = value  # for groups that are added later
    for group in optimizer.param_groups:
        group[option] = value
        if option == "fused":
            _move_step_numbers(optimizer, group)


def _move_step_numbers(optimizer: torch.optim.Optimizer, group: dict) -> None:
    """Move step counters to where the group's kernel reads them: for fused the parameter's device, else the host.

    A capturable optimizer keeps them where they are, on the parameter's device.
    """
    wide = torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
    for parameter in group["params"]:
        state = optimizer.state.get(parameter, {})
        if "step" not in state:
            continue
        if group["fused"]:
            state["step"] = state["step"].to(device=parameter.device, dtype=torch.float32)
        elif not group.get("capturable"):
            state["step"] = state["step"].to(device="cpu", dtype=wide)


def optimizer_kernel_source(plan: Plan, decision: OptimizerKernel) -> EmittedCode:
    """Return the emitted counterpart of `optimizer_kernel`."""
    option, value = OPTIONS[decision.kernel]
    return EmittedCode(optimizer_options=(f"{option}={value}",))
