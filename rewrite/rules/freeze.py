"""Freeze: do not train the named modules."""

from __future__ import annotations

from planner.errors import DecisionError
from planner.plan_types.decisions import Freeze
from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import EmittedCode, assignment
from planner.rewrite.rewriting import Change, Rewriting


def freeze(rewriting: Rewriting, decision: Freeze) -> None:
    """Clear `requires_grad` on every parameter of the modules; gradients and values stay as they are."""
    for name in decision.modules:
        for suffix, parameter in rewriting.module(name, decision.kind).named_parameters():
            if not parameter.requires_grad:
                continue
            place = f"{name}.{suffix}".lstrip(".")
            if parameter.grad is not None:
                raise DecisionError(
                    f"freeze would leave the gradient of '{place}' to the optimizer: call optimizer.zero_grad() first"
                )
            parameter.requires_grad_(False)
            rewriting.changes.append(
                Change(
                    place=f"requires_grad of '{place}'",
                    intact=lambda: True,
                    restore=lambda parameter=parameter: parameter.requires_grad_(True),
                )
            )


def freeze_source(plan: Plan, decision: Freeze) -> EmittedCode:
    return EmittedCode(
        constants=(assignment("FROZEN", decision.modules),),
        rewriting=(
            """\
for name in FROZEN:
    model.get_submodule(name).requires_grad_(False)
""",
        ),
    )
