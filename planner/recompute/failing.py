"""Finds the technique and the module because of which a rewritten step cannot be rehearsed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.errors import StepError
from planner.plan_types.decision_base import Decision, Role, has_role, with_roles
from planner.plan_types.recompute_decisions import Recomputing

Setting = tuple[tuple[Decision, ...], bool]
"""Decisions about precision, and True if the batch is split into micro-batches: a technique may fail only then."""
Excluded = tuple[Setting, type[Decision], str]
"""A setting, a technique, and the path of a module to which it must not be applied then."""
ErrorWith = Callable[[Sequence[Recomputing]], StepError | None]
"""Rehearses the step with some of its decisions that recompute or offload. Returns its error; None if it runs."""


def setting_of(decisions: Sequence[Decision]) -> Setting:
    """Returns the setting of a step with these decisions."""
    return with_roles(decisions, Role.PRECISION), has_role(decisions, Role.MICRO_BATCHING)


def failing(used: Sequence[Recomputing], error_with: ErrorWith, error: StepError) -> dict[Recomputing, StepError]:
    """Returns decisions because of which a step fails, each with its error; empty if `used` is empty.

    Each technique is rehearsed without the others. If each works without the others, they fail together, and the one is
    returned whose absence lets the step run. A technique that fails without the others is returned with one module only
    if it fails with this module alone.

    Args:
        used: the decisions of the step that recompute or offload.
        error: the error of the step with all of them.
    """
    if len(used) == 1:
        return dict([_with_one_module(used[0], error_with, error)])
    alone = {decision: found for decision in used if (found := error_with([decision])) is not None}
    if alone or not used:
        return dict(_with_one_module(decision, error_with, found) for decision, found in alone.items())
    working = (d for d in used if error_with([other for other in used if other is not d]) is None)
    return {next(working, used[0]): error}


def _with_one_module(decision: Recomputing, error_with: ErrorWith, error: StepError) -> tuple[Recomputing, StepError]:
    """Returns a decision with a single module with which the step fails, and its error, found by bisection.

    If the step fails only with several modules, the result is the decision and the error that were given.
    """
    modules, whole = list(dict.fromkeys(decision.modules)), (decision, error)
    while len(modules) > 1:
        first = modules[: len(modules) // 2]
        found = error_with([decision.of_modules(first)])
        modules = modules[len(first) :] if found is None else first
    part = decision.of_modules(modules)
    if part == decision:
        return whole
    found = error_with([part])
    return whole if found is None else (part, found)
