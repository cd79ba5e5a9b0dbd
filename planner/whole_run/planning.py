"""Plans a whole run: finds a plan with which not only the largest step fits, but every moment of the run.

The plan for the largest step comes first. Its run is simulated in the allocator: with the options of the allocator that
the plan has, then with others. If no option makes the run fit, the step is planned again with less memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from planner.adapted import plan_or_adapt
from planner.plan_types.categories import Category
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import Decision, Role, with_roles
from planner.plan_types.plan import Plan, Shortfall
from planner.plan_types.plan_parts import TRAINING_STEP
from planner.plan_types.sizes import format_size
from planner.profiles.device import DeviceProfile
from planner.progress import TimeIsUp, Watch
from planner.whole_run.simulated_run import Run, SimulatedRun

_MOST_TRIES = 3
"""Maximum number of times that the step is planned again with less memory."""
_SMALLEST_STEP_BYTES = 1 << 20


def plan_run(
    run: Run,
    card: DeviceProfile,
    *,
    vram_bytes: int | None,
    constraints: Constraints,
    watch: Watch | None = None,
    plan_step: Callable[..., Plan] = plan_or_adapt,
) -> Plan:
    """Return the plan of the largest step with which the whole run stays inside the budget, with `Plan.run`.

    If there is none, the plan does not fit, and its shortfall says by how much the run exceeds the budget.

    Args:
        watch: limits the time of planning, and receives its progress; None for no limit.
        plan_step: plans one step, as `plan_or_adapt` does.
    """
    watch = watch or Watch()
    step_bytes, first, found = vram_bytes, None, None
    preferred: tuple[Decision, ...] | None = None
    for _ in range(_MOST_TRIES):
        plan = plan_step(run.at(run.largest), card, vram_bytes=step_bytes, constraints=constraints, watch=watch)
        first = first or plan
        if not plan.fits:
            return plan if found is None else _too_large(first, found)
        try:
            simulated = SimulatedRun(run, plan, card, constraints, watch)
            plan = simulated.with_best_allocator(first.usable_bytes, preferred)
            assert plan.run is not None
            if plan.run.fits:
                return _of_first(simulated.with_changes(plan), first)
        except TimeIsUp:
            if found is not None:
                return _too_large(first, found)
            return _not_simulated(first, watch)
        found, preferred = plan, with_roles(plan.decisions, Role.ALLOCATOR)
        if plan.run.binding != TRAINING_STEP:
            break  # another plan for the step makes nothing else smaller
        assert first.usable_bytes is not None, "without a budget, everything fits"
        excess_bytes = max(plan.run.total_bytes - first.usable_bytes, _SMALLEST_STEP_BYTES)
        step_bytes = min(plan.peak.total_bytes, first.usable_bytes) - excess_bytes
        if step_bytes <= card.context_bytes:
            break
    assert found is not None and first is not None
    return _too_large(first, found)


def verify_run(
    run: Run, plan: Plan, card: DeviceProfile, *, constraints: Constraints, watch: Watch | None = None
) -> Plan:
    """Return the plan of the largest step with `Plan.run`, from a simulation of the run with the plan's decisions.

    If the step fits and the run does not, the plan does not fit.
    """
    watch = watch or Watch()
    if not plan.fits:
        return plan
    try:
        simulated = SimulatedRun(run, plan, card, constraints, watch)
        found = simulated.with_best_allocator(plan.usable_bytes, None, keeps_options=True)
        assert found.run is not None
        return simulated.with_changes(found) if found.run.fits else _too_large(plan, found)
    except TimeIsUp:
        return _not_simulated(plan, watch)


def _not_simulated(plan: Plan, watch: Watch) -> Plan:
    """Returns the plan for one step, with a note that there was no time to simulate the run."""
    note = f"planning ended {watch.cause}: the whole run was not simulated, so that the plan is for one step"
    return dataclasses.replace(plan, notes=(note, *plan.notes))


def _of_first(plan: Plan, first: Plan) -> Plan:
    """Returns a plan that was made for less memory with the budget that the user has."""
    if plan.vram_bytes == first.vram_bytes:
        return plan
    size = format_size(plan.vram_bytes or 0)
    note = f"the step was planned for {size}, because the whole run needs more memory than its largest step"
    return dataclasses.replace(
        plan,
        vram_bytes=first.vram_bytes,
        card_bytes=first.card_bytes,
        margin_bytes=first.margin_bytes,
        notes=(note, *plan.notes),
    )


def _too_large(first: Plan, found: Plan) -> Plan:
    """Returns the last plan whose run was simulated, with the bytes by which the run exceeds the budget."""
    assert found.run is not None and first.usable_bytes is not None
    breakdown = {name: size for name, size in found.peak.breakdown.items() if name != str(Category.SLACK)}
    binding = max(breakdown, key=breakdown.__getitem__)
    shortfall = Shortfall(
        missing_bytes=max(found.run.total_bytes - first.usable_bytes, 1),
        binding=binding,
        binding_bytes=breakdown[binding],
        next_step=None,
    )
    return dataclasses.replace(_of_first(found, first), fits=False, shortfall=shortfall)
