"""If nothing fits: looks for a shorter sequence, a smaller batch or a larger card with which a plan fits.

Only what a certified plan fits is offered. `planner.adapted` offers LoRA adapters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

from planner import profiles
from planner.adapted import ADAPTERS
from planner.errors import BudgetError, StepError, TimeLimitError
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import Fidelity, fidelity_of, micro_batches_of
from planner.plan_types.plan import NextStep, Plan, Relaxation
from planner.profiles.device import DeviceProfile
from planner.progress import TimeIsUp, Watch
from planner.questions.known_plans import plan_that_fits
from planner.workload.adapters import adapted_workload
from planner.workload.budget import Budget
from planner.workload.workload import Workload

_SECONDS = 30
"""Time limit in seconds for all of it."""
_HALVINGS = 3
"""Maximum number of times that a sequence or a batch is halved."""
_SHORTEST = 64
"""Minimum number of tokens in a sample that is tried."""
_CARDS = 2
"""Maximum number of larger cards that are tried."""

Load = Callable[..., Workload]
"""Loads the workload with the keyword arguments `batch_size` and `seq_len`."""


def refuse_hopeless(workload: Workload, card: DeviceProfile, budget: Budget, constraints: Constraints) -> None:
    """Refuse a budget that cannot hold the model, whatever the plan. Nothing is rehearsed to find out.

    Raises:
        BudgetError: the CUDA context and the parameters exceed the budget, also in 4 bits if the fidelity allows that.
    """
    try:
        budget.refuse_if_hopeless(workload.model, card)
    except BudgetError as error:
        if not _holds_in_4_bits(workload, card, budget):
            raise
        if constraints.fidelity < Fidelity.ADAPTED:
            raise BudgetError(f"{error}; with 4-bit weights (--qlora) the budget holds them") from error


def _holds_in_4_bits(workload: Workload, card: DeviceProfile, budget: Budget) -> bool:
    """True if the budget holds the model with adapters on 4-bit weights."""
    if workload.adapter is not None:
        return False
    try:
        budget.refuse_if_hopeless(adapted_workload(workload, ADAPTERS[-1]).model, card)
    except StepError:
        return False
    return True


def advised(
    plan: Plan, workload: Workload, card: DeviceProfile, *, constraints: Constraints, load: Load, watch: Watch
) -> Plan:
    """Returns the plan; if it does not fit, with further changes in its shortfall with which a plan fits.

    Args:
        load: loads the workload with another batch size or sequence length.
        watch: limits the time, and receives progress.
    """
    if plan.shortfall is None or not plan.shortfall.missing_bytes or plan.vram_bytes is None:
        return plan
    found: list[Relaxation] = []
    words = "looking for changes that make a plan fit"
    with contextlib.suppress(TimeIsUp), watch.at_most(_SECONDS), watch.apart(lambda: words):
        for relaxation in _changes(plan, workload, card, constraints, load, watch):
            found.append(relaxation)
    shortfall = dataclasses.replace(
        plan.shortfall,
        next_step=plan.shortfall.next_step or next((row.next_step for row in found), None),
        relaxations=(*plan.shortfall.relaxations, *found),
    )
    return dataclasses.replace(plan, shortfall=shortfall)


def _changes(
    plan: Plan, workload: Workload, card: DeviceProfile, constraints: Constraints, load: Load, watch: Watch
) -> Iterator[Relaxation]:
    """Yields the changes with which a plan fits: at most one sequence length, one batch size and one card."""
    assert plan.vram_bytes is not None, "a plan that does not fit has a budget"
    for changes in (_shorter(workload), _smaller(workload, plan)):
        for label, sizes in changes:
            step = _plan_with(functools.partial(load, **sizes), card, plan.vram_bytes, constraints, watch)
            if step is not None:
                yield _relaxation(label, step)
                break
    for larger in _larger_cards(plan, card):
        step = _plan_with(lambda: workload, larger, larger.vram_bytes, constraints, watch)
        if step is not None:
            yield _relaxation(f"another card: --gpu {larger.name}", step)
            break


def _plan_with(
    build: Callable[[], Workload], card: DeviceProfile, vram_bytes: int, constraints: Constraints, watch: Watch
) -> Plan | None:
    """Returns a plan of a changed workload that fits; None if none was found, or the model refuses the change."""
    watch.check()
    try:
        return plan_that_fits(build(), card, vram_bytes=vram_bytes, constraints=constraints, watch=watch)
    except (StepError, TimeLimitError):
        return None


def _shorter(workload: Workload) -> Iterator[tuple[str, dict[str, int | None]]]:
    """Yields shorter sequences: the option, and the sizes to load."""
    for halvings in range(1, _HALVINGS + 1):
        tokens = (workload.seq_len or 0) >> halvings
        if tokens >= _SHORTEST:
            yield f"--seq-len {tokens}", {"batch_size": workload.batch_size, "seq_len": tokens}


def _smaller(workload: Workload, plan: Plan) -> Iterator[tuple[str, dict[str, int | None]]]:
    """Yields smaller batches. A plan that splits the batch has shown already that a smaller batch does not help."""
    for halvings in range(1, _HALVINGS + 1):
        samples = workload.batch_size >> halvings
        if samples and micro_batches_of(plan.decisions) == 1:
            yield f"--batch-size {samples}", {"batch_size": samples, "seq_len": workload.seq_len}


def _larger_cards(plan: Plan, card: DeviceProfile) -> list[DeviceProfile]:
    """Returns the smallest known cards that hold the smallest plan and have more memory than the budget."""
    if not card.allocator or plan.limit_bytes is None:
        return []
    cards = [profiles.load(name) for name in profiles.known()]
    least_bytes = max(plan.limit_bytes, plan.peak.total_bytes)
    larger = [other for other in cards if Budget.on(other, other.vram_bytes, margin=None).usable_bytes > least_bytes]
    return sorted(larger, key=lambda other: (other.vram_bytes, other.name))[:_CARDS]


def _relaxation(label: str, step: Plan) -> Relaxation:
    """Returns the entry of a change with which a plan fits. Its slowdown is relative to the changed step's baseline."""
    fidelity = Fidelity(fidelity_of(step.decisions)).name.lower()
    next_step = NextStep(
        relax=label, decisions=step.decisions, total_bytes=step.peak.total_bytes, slowdown=step.slowdown
    )
    return Relaxation(relax=label, opens=True, why="", fidelity=fidelity, next_step=next_step)
