"""Allocator: set options of CUDA's caching allocator in the environment, before PyTorch reads them.

PyTorch reads them once, when the first tensor of the process is on the card. The training step is not changed. The
options that the user had set when the plan was made (`Plan.alloc_conf`) are set, too.

Source: `AcceleratorAllocatorConfig::instance` in pytorch's c10/core/AllocatorConfig.cpp.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import torch

from planner.plan_types.decision_base import (
    ALLOCATOR_VARIABLE,
    FORMER_ALLOCATOR_VARIABLE,
    Decision,
    allocator_conf,
    allocator_variable_in,
    options_in,
)
from planner.plan_types.decisions import Allocator
from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import EmittedCode
from planner.rewrite.rewriting import Rewriting


def allocator(rewriting: Rewriting, decision: Allocator) -> None:
    """Set the options in this process if it has a card. Undo leaves them: PyTorch reads them only once."""
    if torch.cuda.is_available():
        set_options((decision,))


def set_options(decisions: Sequence[Decision], given: str = "") -> None:
    """Set the options of the allocator in the environment of this process, and warn if it is too late for that.

    Args:
        given: the options that the user had set when the plan was made.
    """
    wanted = allocator_conf(decisions, given)
    name, present = allocator_variable_in(os.environ)
    if options_in(wanted).items() <= options_in(present).items():
        return
    if torch.cuda.is_initialized() or present:
        found = f"{name} is '{present}'" if present else "CUDA has started without it"
        warnings.warn(
            f"the plan was certified with {ALLOCATOR_VARIABLE}={wanted}, but {found}: the step may take more memory "
            "than promised; set the variable before the program starts",
            stacklevel=2,
        )
        return
    os.environ[name] = wanted


def allocator_source(plan: Plan, decision: Allocator) -> EmittedCode:
    """Return the code that does the same as `allocator` in an emitted file."""
    return EmittedCode(environment=environment_of(plan))


def environment_of(plan: Plan) -> tuple[tuple[str, str | None], ...]:
    """Return the environment variables with which PyTorch has the plan's options; None unsets a variable."""
    conf = allocator_conf(plan.decisions, plan.alloc_conf)
    return ((FORMER_ALLOCATOR_VARIABLE, None), (ALLOCATOR_VARIABLE, conf)) if conf else ()
