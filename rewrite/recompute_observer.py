"""Use `RecomputeCheck` in the training step, and write it into emitted files."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any, final

import torch

from planner.errors import DecisionError
from planner.plan_types.plan import Plan
from planner.rewrite.portable import recompute_check
from planner.rewrite.portable.module_forward import forward_function
from planner.rewrite.step_observer import StepObserver
from planner.workload.call_convention import Calling

logger = logging.getLogger(__name__)


@final
class RecomputeObserver(StepObserver):
    """Raises `DecisionError` before the update if backward computed with other values than the forward saved.

    A difference that a nondeterministic kernel explains is only logged (`nondeterminism`). With step-in-backward
    (`check.at_once`) backward itself raises, before it updates the parameters of that module.

    Args:
        check: samples and compares saved tensors.
        nondeterministic_op: `nondeterministic_op(batch)` returns the name of an op in the forward of this batch that
            gives different results for the same inputs, or None.
    """

    def __init__(self, check: recompute_check.RecomputeCheck, nondeterministic_op: Callable[[Any], str | None]) -> None:
        self._check, self._nondeterministic_op = check, nondeterministic_op
        self._is_in_step = False

    def before_forward(self, weight: torch.Tensor | float | None) -> None:
        if not self._is_in_step:  # the first micro-batch
            self._is_in_step = True
            self._check.begin_step()

    def before_update(self, batch: Any) -> None:
        self._is_in_step = False
        try:
            refuse_difference(self._check)
        except DecisionError as error:
            try:
                op = self._nondeterministic_op(batch)
            except Exception:  # the search runs the model again, whose errors must not hide the difference
                raise error from None
            if op is None:
                raise
            logger.warning(
                "recomputed values differ from those of the forward. %s is a nondeterministic kernel, which returns "
                "different results for the same inputs. Training goes on: gradients are as reproducible as those of "
                "the baseline. The difference: %s", op, error
            )  # fmt: skip

    def after_error(self) -> None:
        self._is_in_step = False
        self._check.end_step()


def refuse_difference(check: recompute_check.RecomputeCheck) -> None:
    """End a checked step. Raises `DecisionError` if backward computed with other values than the forward."""
    try:
        check.refuse_difference()
    except recompute_check.RecomputeDifference as error:
        raise DecisionError(str(error)) from None


CHECK_IMPORTS = (
    "import contextlib",
    "import functools",
    "import random",
    "import types",
    "import weakref",
)


def check_source(plan: Plan) -> tuple[str, ...]:
    """Return the text of `RECOMPUTE_CHECK` and what it needs, which follows the functions of a rule."""
    parts = (
        forward_function,
        recompute_check.RecomputeCheck,
        recompute_check.RecomputeDifference,
        recompute_check.WatchedCall,
        recompute_check.SavedSample,
        recompute_check.may_be_private,
        recompute_check.random_run,
        recompute_check.attributes_of,
    )
    is_own = plan.workload.calling == Calling.STEP.name
    at_once = "at_once=True" if is_own or any(decision.steps_in_backward for decision in plan.decisions) else ""
    return *(inspect.getsource(part) for part in parts), f"RECOMPUTE_CHECK = RecomputeCheck({at_once})\n"
