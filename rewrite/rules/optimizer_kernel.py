"""Optimizer kernel: make a torch optimizer use its fused kernel, or its loop over single parameters.

On CUDA, torch uses the foreach implementation by default, which allocates temporary tensors for all parameters at once
(Adam: as much memory as the parameters, Adagrad: twice as much). `fused=True` updates in place with one kernel.
`foreach=False` allocates temporary tensors for one parameter at a time. The optimizer object, its groups, schedules and
state are kept. Only the step counters move to the parameters' device, where the fused kernel reads them
(torch/optim/adam.py, "special device hosting for step").

A gradient scaler lets the fused kernel unscale the gradients and skip steps with infinite gradients, if the optimizer
was constructed with `fused=True`. Here the option is set later, so the scaler does both itself. The results are the
same.
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
"""Maps the kernel that a plan names to the option of torch's optimizers that chooses it, as (name, value)."""


def optimizer_kernel(rewriting: Rewriting, decision: OptimizerKernel) -> None:
    """Set the option for the planned kernel in all parameter groups of the optimizer.

    It is set again after each `load_state_dict`, because that replaces the groups.

    Raises:
        DecisionError: if the optimizer has no such kernel, or if its user has already chosen a kernel.
    """
    chosen = rewriting.chosen_optimizers(decision.optimizers, decision.kind).values()
    for optimizer in chosen:
        if (why_not := why_no_kernel(decision.kernel, optimizer, rewriting.model)) is not None:
            raise DecisionError(
                f"optimizer-kernel {decision.kernel} cannot be set: {why_not}; or forbid optimizer-kernel"
            )
    for optimizer in chosen:
        _choose(rewriting, optimizer, *OPTIONS[decision.kernel])


def _choose(rewriting: Rewriting, optimizer: torch.optim.Optimizer, option: str, value: bool) -> None:
    """Set an option of one optimizer, now and after each `load_state_dict`, until the rewriting is undone."""
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
    """Set an option in the defaults and the groups of an optimizer. The value None lets torch choose."""
    optimizer.defaults[option] = value  # for groups that are added later
    for group in optimizer.param_groups:
        group[option] = value
        if option == "fused":
            _move_step_numbers(optimizer, group)


def _move_step_numbers(optimizer: torch.optim.Optimizer, group: dict) -> None:
    """Move the step counters of a group to the device where its kernel reads them.

    The fused kernel reads them on the parameter's device, other kernels on the host. With `capturable=True` they stay
    on the parameter's device.
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
    """Return the code that does the same as `optimizer_kernel` in an emitted file."""
    option, value = OPTIONS[decision.kernel]
    return EmittedCode(optimizer_options=(f"{option}={value}",))
