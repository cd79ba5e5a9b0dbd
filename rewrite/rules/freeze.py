"""Freeze: exclude modules from training, by setting `requires_grad` of their parameters to False."""

from __future__ import annotations

import functools

import torch

from planner.errors import DecisionError
from planner.plan_types.decisions import Freeze
from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import EmittedCode, assignment
from planner.rewrite.rewriting import Change, Rewriting


def freeze(rewriting: Rewriting, decision: Freeze) -> None:
    """Set `requires_grad` to False on every parameter of the planned modules.

    Raises:
        DecisionError: if one of these parameters has a gradient, because the optimizer would still update it.
    """
    for name in decision.modules:
        for suffix, parameter in rewriting.module(name, decision.kind).named_parameters():
            if not parameter.requires_grad:
                continue
            full_name = f"{name}.{suffix}".lstrip(".")
            if parameter.grad is not None:
                raise DecisionError(
                    f"'{full_name}' is to be frozen, but it already has a gradient, so the optimizer would still "
                    "update it: call optimizer.zero_grad() before the plan is applied"
                )
            parameter.requires_grad_(False)
            rewriting.changes.append(
                Change(
                    place=f"requires_grad of '{full_name}'",
                    intact=lambda: True,
                    restore=functools.partial(_train_again, parameter),
                )
            )


def _train_again(parameter: torch.nn.Parameter) -> None:
    parameter.requires_grad_(True)


def freeze_source(plan: Plan, decision: Freeze) -> EmittedCode:
    """Return the code that does the same as `freeze` in an emitted file."""
    return EmittedCode(
        constants=(assignment("FROZEN", decision.modules),),
        rewriting=(
            """\
for name in FROZEN:
    model.get_submodule(name).requires_grad_(False)
""",
        ),
    )
