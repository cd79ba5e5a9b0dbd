"""Finds the fastest plan that fits, if there is one, and certifies plans with decisions that are known to fit."""

from __future__ import annotations

import dataclasses
import time

from planner import pipeline
from planner.assemble import assemble_plan
from planner.choose import fitting
from planner.choose.choice import Certified, Choice
from planner.choose.planning_session import PlanningSession
from planner.errors import BudgetError
from planner.estimate.smallest_total import approximate_smallest_of
from planner.plan_types.constraints import Constraints
from planner.plan_types.plan import Plan
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.space.search_space import SearchSpace
from planner.workload.budget import Budget
from planner.workload.workload import Workload

_FOR_A_SMALL_PEAK = (
    "this plan uses decisions that were chosen for a small peak, at this or another batch size, and it is certified to "
    "fit; a faster plan may exist"
)


def plan_that_fits(
    workload: Workload,
    card: DeviceProfile,
    *,
    vram_bytes: int,
    constraints: Constraints,
    watch: Watch | None = None,
    known: Choice | None = None,
) -> Plan | None:
    """Return the fastest plan that fits; None if none is found.

    Unlike `plan_workload`, this function does not search for the smallest plan if nothing fits.

    Args:
        known: decisions with which a rehearsal has shown that the step fits; None if no such decisions are known. If
            the search finds no plan, a plan with these decisions is certified, and returned if it fits and is not too
            slow.
    """
    began = time.perf_counter()
    budget = Budget.on(card, vram_bytes, margin=constraints.margin)
    try:
        budget.refuse_if_hopeless(workload.model, card, sharding=workload.sharding)
    except BudgetError:
        return None
    with pipeline.open_session(workload, card, budget, watch) as session:
        session.expect(constraints)
        space = session.search_space(constraints)
        certified, early = pipeline.fastest_in_time(session, space, constraints)
        notes = (*early, *budget.notes(card), *space.notes)
        if certified is None and known is not None:
            certified = _certified_known(session, space, constraints, known)
            notes = ("the search for the fastest plan found no plan that fits the budget", _FOR_A_SMALL_PEAK, *notes)
        if certified is None:
            return None
        return assemble_plan(session, certified, constraints, budget, notes=notes, is_early=bool(early), began=began)


def plan_by(
    known: Choice,
    workload: Workload,
    card: DeviceProfile,
    *,
    vram_bytes: int,
    constraints: Constraints,
    watch: Watch,
) -> Plan | None:
    """Certify and return the plan with known decisions, without a search for a faster one; None if it does not fit."""
    began = time.perf_counter()
    budget = Budget.on(card, vram_bytes, margin=constraints.margin)
    with pipeline.open_session(workload, card, budget, watch) as session:
        session.certificates.begin(known.rehearsed_decisions)
        certified = session.with_slower_algorithms().certify(known)
        if not certified.measured.fits:
            return None
        notes = (_FOR_A_SMALL_PEAK, *budget.notes(card))
        promised = certified.with_measured_promise(gap=1.0)
        return assemble_plan(session, promised, constraints, budget, notes=notes, is_early=True, began=began)


def _certified_known(
    session: PlanningSession, space: SearchSpace, constraints: Constraints, known: Choice
) -> Certified | None:
    """Return a plan with known decisions, which were not searched for; None if it does not fit or is too slow.

    Its gap is the fraction of its step time by which the fastest plan that promises to fit is faster; 1 if no plan
    promises to fit.
    """
    slower = session.with_slower_algorithms()
    plan = slower.certify(known)
    if not (plan.measured.fits and session.quick_enough(plan, constraints)):
        return None
    fastest = slower.chooser(space, constraints).fastest(slower.budget.allocator_bytes)
    if fastest is None:
        return plan.with_measured_promise(gap=1.0)
    fastest = fastest.passed_over or fastest
    least_ns = fastest.step_ns * (1 - fastest.gap)
    return plan.with_measured_promise(gap=max(0.0, 1 - least_ns / max(plan.measured.footprint.step_ns, 1)))


def smallest_configuration(
    workload: Workload, card: DeviceProfile, *, vram_bytes: int, constraints: Constraints, watch: Watch | None = None
) -> tuple[int, Choice]:
    """Find the configuration with the smallest predicted peak of tensors, without frozen layers.

    This is faster than searching for the smallest plan, which also tries to reduce the allocator's slack.

    Returns:
        A total in bytes in which the step runs with this configuration, near the smallest one
        (`approximate_smallest_of`), and the plan as a choice.
    """
    with pipeline.open_session(
        workload, card, Budget.on(card, vram_bytes, margin=constraints.margin), watch
    ) as session:
        space = session.search_space(constraints)
        certified = fitting.certify_found(session, lambda: session.chooser(space, constraints).smallest())
        choice, usable_bytes = certified.choice, session.budget.usable_bytes
        return approximate_smallest_of(
            certified.graph, card, choice.with_each_allocator, vram_bytes=usable_bytes
        ), choice


def noted(plan: Plan, note: str) -> Plan:
    """Returns the plan with `note` as its first note."""
    return dataclasses.replace(plan, notes=(note, *plan.notes))
