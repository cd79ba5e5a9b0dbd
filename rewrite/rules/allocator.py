"""Allocator: set options of CUDA's caching allocator in the environment, before PyTorch reads them.

PyTorch reads them once, when the first tensor of the process is on the card. The training step is not changed.

Source: `AcceleratorAllocatorConfig::instance` in pytorch's c10/core/AllocatorConfig.cpp.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import torch

from planner.plan_types.decision_base import ALLOCATOR_VARIABLE, Decision, allocator_conf
from planner.plan_types.decisions import Allocator
from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import EmittedCode
from planner.rewrite.rewriting import Rewriting

_FORMER_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
"""The variable that PyTorch reads if `ALLOCATOR_VARIABLE` is not set."""


def allocator(rewriting: Rewriting, decision: Allocator) -> None:
    """Set the options in this process if it has a card. Undo leaves them: PyTorch reads them only once."""
    if torch.cuda.is_available():
        set_options((decision,))


def set_options(decisions: Sequence[Decision]) -> None:
    """Set the options of the allocator in the environment of this process, and warn if it is too late for that."""
    wanted = allocator_conf(decisions)
    if not wanted:
        return
    present = os.environ.get(ALLOCATOR_VARIABLE) or os.environ.get(_FORMER_VARIABLE, "")
    if set(wanted.split(",")) <= set(present.replace(" ", "").split(",")):
        return
    if torch.cuda.is_initialized() or present:
        found = f"it is '{present}'" if present else "CUDA has started without it"
        warnings.warn(
            f"the plan was certified with {ALLOCATOR_VARIABLE}={wanted}, but {found}: the step may take more memory "
            "than promised; set the variable before the program starts",
            stacklevel=2,
        )
        return
    os.environ[ALLOCATOR_VARIABLE] = wanted


def allocator_source(plan: Plan, decision: Allocator) -> EmittedCode:
    """Return the code that does the same as `allocator` in an emitted file."""
    return EmittedCode(environment=((ALLOCATOR_VARIABLE, allocator_conf((decision,))),))
