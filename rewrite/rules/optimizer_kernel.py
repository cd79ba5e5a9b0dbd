"""Optimizer kernel: torch's own optimizer steps by its fused kernel, or by its loop over single parameters.

On CUDA torch takes foreach, which makes temporaries of all parameters at once (Adam: one more copy of them, Adagrad:
two). `fused=True` is one kernel in place; `foreach=False` makes temporaries of one parameter at a time. The optimizer
stays one object: groups, schedules and state are what they were, but for the step numbers, which the fused kernel
reads from the parameters' device (torch/optim/adam.py, "special device hosting for step").

A gradient scaler goes on to unscale the gradients itself, and to skip a step in which one is not finite: only an
optimizer that was made with `fused=True` tells it to leave that to the kernel. Both give the same.
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
"""By kernel: what torch's optimizers call it, in their groups and when they are made."""


def optimizer_kernel(rewriting: Rewriting, decision: OptimizerKernel) -> None:
    """Set the option in all groups of the optimizer, now and after `load_state_dict`, whose groups replace them.

    Raises:
        DecisionError: for an optimizer that cannot step so, or for which its user chose already.
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
    """None lets torch choose, as it does without a decision."""
    optimizer.defaults[option] = value  # for groups that are added later
    for group in optimizer.param_groups:
        group[option] = value
        if option == "fused":
            _move_step_numbers(optimizer, group)


def _move_step_numbers(optimizer: torch.optim.Optimizer, group: dict) -> None:
    """To where this group's kernel reads them: the parameter's device for fused and capturable, else the host."""
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
    option, value = OPTIONS[decision.kernel]
    return EmittedCode(optimizer_options=(f"{option}={value}",))
