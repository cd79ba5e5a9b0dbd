"""Read me first: planning from a workload to a plan, stage by stage.

    workload -> record -> estimate -> search -> certify -> Plan (JSON) -> rewrite -> module + training step

`plan_workload` is the pipeline. A `PlanningSession` records the training step on the virtual GPU (folder `recording`),
estimates its bytes and its time on the card (`estimate`), and lists the decisions that are possible (`space`,
`recompute`). `choose.fitting` searches for the fastest configuration inside the budget and certifies it: the rewriter
applies the decisions to the step, and the rewritten step is rehearsed. Only a certified configuration becomes a plan
(`assemble`).

This is the only file of the planner that calls the rewriter: `planner.rewrite.rehearse` rehearses a rewritten step.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator, Sequence

from planner.assemble import assemble_plan, assemble_tradeoff
from planner.choose import fitting
from planner.choose.certificates import Certificates
from planner.choose.pareto_front import front
from planner.choose.planning_session import PlanningSession
from planner.choose.relaxations import relaxations
from planner.estimate.footprint import smallest_capacity_bytes
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import Decision
from planner.plan_types.plan import Plan
from planner.plan_types.tradeoff import Tradeoff
from planner.profiles.device import DeviceProfile
from planner.recording.step_graph import StepGraph
from planner.rewrite import rehearse
from planner.workload.budget import Budget
from planner.workload.workload import Workload


def plan_workload(workload: Workload, card: DeviceProfile, *, vram_bytes: int | None, constraints: Constraints) -> Plan:
    """Return the fastest certified plan of one optimizer step whose total memory is at most `vram_bytes`.

    If no plan fits, return the smallest plan, or the fastest plan inside the budget if it is slower than allowed. Its
    `shortfall` has the number of missing bytes and the relaxations of `constraints` that would help. If `vram_bytes` is
    None, only the baseline is rehearsed, and the plan has no decisions.
    """
    began = time.perf_counter()
    budget = None if vram_bytes is None else Budget.on(card, vram_bytes, margin=constraints.margin)
    with open_session(workload, card, budget) as session:
        if budget is None:
            return assemble_plan(session, session.baseline, constraints, None, began=began)
        session.expect(constraints)
        space = session.search_space(constraints)
        certified, shortfall = fitting.best(session, space, constraints), None
        if certified is None or not session.quick_enough(certified, constraints):
            certified = fitting.nearest(session, space, constraints)
            if not certified.measured.fits or not session.quick_enough(certified, constraints):
                shortfall = fitting.shortfall(session, certified, relaxations(session, constraints))
        notes = (*budget.notes(card), *space.notes)
        return assemble_plan(session, certified, constraints, budget, shortfall=shortfall, notes=notes, began=began)


def tradeoff_workload(
    workload: Workload, card: DeviceProfile, *, vram_bytes: int | None, constraints: Constraints, seconds: float
) -> Tradeoff:
    """Return certified plans that trade memory against step time, from the fastest to the smallest allowed plan.

    Args:
        vram_bytes: the user's budget, which only marks the fastest plan inside it; None if there is no budget.
        seconds: approximate time limit. The fastest and the smallest plan are searched in any case.
    """
    began = time.perf_counter()
    budget = None if vram_bytes is None else Budget.on(card, vram_bytes, margin=constraints.margin)
    with open_session(workload, card, None) as session:
        session.expect(constraints)
        usable_bytes = None if budget is None else budget.usable_bytes
        found = front(session, constraints, vram_bytes=usable_bytes, seconds=seconds)
        return assemble_tradeoff(session, found, constraints, budget, began=began)


def largest_step(workloads: Sequence[Workload], card: DeviceProfile) -> Workload:
    """Return the workload whose step needs the most memory on the card. Each is rehearsed, unless there is only one."""
    if len(workloads) == 1:
        return workloads[0]
    return max(workloads, key=lambda workload: smallest_capacity_bytes(record_step(workload, card), card))


def record_step(workload: Workload, card: DeviceProfile, decisions: Sequence[Decision] = ()) -> StepGraph:
    """Rehearse two training steps of `workload`, and return the recording with the workspaces of the card's kernels.

    Args:
        decisions: decisions that are applied to the step first; without decisions the baseline is rehearsed.
    """
    return rehearse.certifying_graph(rehearse.with_gradient_names(workload, card), decisions, card)


@contextlib.contextmanager
def open_session(workload: Workload, card: DeviceProfile, budget: Budget | None) -> Iterator[PlanningSession]:
    """Yield a planning session. On leaving the context, rehearsals that are still running are ended."""
    with _without_garbage_collector():
        workload = rehearse.with_gradient_names(workload, card)
        session = PlanningSession(
            workload,
            card,
            budget=budget,
            start_what_if=lambda decisions, sizes: rehearse.start_rehearsal(
                workload, decisions, card, sizes=sizes, steps=1, primed=True, what_if=True
            ),
            start_forward=lambda workload, samples: rehearse.start_forward(workload, card, samples),
            start_update=lambda decisions, trained: rehearse.start_update(workload, decisions, card, trained),
            certificates=Certificates(
                lambda decisions: rehearse.start_certificate(workload, decisions, card),
                lambda graph: rehearse.finish_certificate(graph, workload, card),
            ),
        )
        with contextlib.closing(session):
            yield session


@contextlib.contextmanager
def _without_garbage_collector() -> Iterator[None]:
    """Disable Python's garbage collector within the context.

    Recordings have many objects but no reference cycles. Searching them for cycles takes a quarter of the planning
    time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
