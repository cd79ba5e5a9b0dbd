"""Read me first: planning from a workload to a plan, stage by stage.

    workload -> record -> estimate -> search -> certify -> Plan (JSON) -> rewrite -> module + training step

`plan_workload` is the pipeline. A `PlanningSession` records the training step on the virtual GPU (folder `recording`),
estimates its bytes and its time on the card (`estimate`), and lists the decisions that are possible (`space`,
`recompute`). `choose.fitting` searches for the fastest configuration inside the budget and certifies it: the rewriter
applies the decisions to the step, and the rewritten step is rehearsed. Only a certified configuration becomes a plan
(`assemble`).

This is the only file of the planner that rehearses rewritten steps (`planner.rewrite.rehearse`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Iterator, Sequence

from planner.assemble import assemble_plan, assemble_tradeoff, early_note
from planner.choose import fitting
from planner.choose.certificates import Certificates
from planner.choose.choice import Certified
from planner.choose.head_start import Fallback, rehearse_baseline
from planner.choose.pareto_front import front, refuse_forced_freezing
from planner.choose.planning_session import PlanningSession
from planner.choose.relaxations import relaxations, shortfall_of
from planner.errors import TimeLimitError
from planner.estimate.smallest_total import smallest_total_bytes
from planner.kept.recordings import KeptRecordings
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import Decision
from planner.plan_types.plan import Plan
from planner.plan_types.tradeoff import Tradeoff
from planner.profiles.device import DeviceProfile
from planner.progress import TimeIsUp, Watch
from planner.recording.step_graph import Schedule, StepGraph
from planner.rewrite import rehearse
from planner.space.search_space import SearchSpace
from planner.virtual_gpu.forked_process import Child
from planner.workload.budget import Budget
from planner.workload.workload import Workload


def plan_workload(
    workload: Workload,
    card: DeviceProfile,
    *,
    vram_bytes: int | None,
    constraints: Constraints,
    watch: Watch | None = None,
) -> Plan:
    """Return the fastest certified plan of one optimizer step whose total memory is at most `vram_bytes`.

    If no allowed plan fits, return the fastest plan that fits but is slower than allowed, or else the smallest plan.
    Its `shortfall` has the number of missing bytes and the relaxations of `constraints` that would help. If
    `vram_bytes` is None, only the baseline is rehearsed, and the plan has no decisions.

    Args:
        watch: limits the time of planning, and receives its progress; None for no limit. If the time is up, the best
            certified plan so far is returned, and its first note says what was not tried.

    Raises:
        TimeLimitError: the time was up before any plan was certified.
    """
    began = time.perf_counter()
    budget = None if vram_bytes is None else Budget.on(card, vram_bytes, margin=constraints.margin)
    with open_session(workload, card, budget, watch) as session:
        if budget is None:
            return assemble_plan(session, session.baseline, constraints, None, began=began)
        fallback, shortfall = Fallback(session, constraints), None
        with session.watch.meanwhile(fallback.advance):
            rehearse_baseline(session, constraints, fallback)
            if not constraints.forced:
                session.note(session.baseline, constraints)  # it may fit, and then it is the best plan so far
            space = session.search_space(constraints)
            fallback.prepare(session, space)
            certified, early = fastest_in_time(session, space, constraints)
        if certified is None:
            certified, early = _nearest(session, space, constraints)
            if not certified.measured.fits or not session.quick_enough(certified, constraints):
                shortfall = shortfall_of(session, certified, relaxations(session.with_slower_algorithms(), constraints))
        notes = (*early, *budget.notes(card), *space.notes)
        return assemble_plan(
            session,
            certified,
            constraints,
            budget,
            shortfall=shortfall,
            notes=notes,
            is_early=bool(early),
            began=began,
        )


def fastest_in_time(
    session: PlanningSession, space: SearchSpace, constraints: Constraints
) -> tuple[Certified | None, tuple[str, ...]]:
    """Return the fastest plan, None if no plan fits, and a note if the time was up before the search was complete.

    Raises:
        TimeIsUp: the time was up before any plan was certified.
    """
    try:
        certified = fitting.best_in_time(session, space, constraints)
    except TimeIsUp:
        certified = session.best_known(constraints)
        if certified is None:
            raise
        return certified, (early_note(session, constraints),)
    is_allowed = certified is not None and session.quick_enough(certified, constraints)
    return certified if is_allowed else None, ()


def _nearest(
    session: PlanningSession, space: SearchSpace, constraints: Constraints
) -> tuple[Certified, tuple[str, ...]]:
    """Return the plan to report if no plan fits, and a note if the time was up before the smallest plan was found."""
    most_seconds = session.watch.left_seconds / 2
    try:
        with session.watch.leaving(lambda: min(session.seconds_to_measure_smallest, most_seconds)):
            return fitting.nearest(session, space, constraints), ()
    except TimeIsUp:
        slower = session.best_known(dataclasses.replace(constraints, max_slowdown=None))
        if slower is not None:
            return slower, (early_note(session, constraints),)
        note = (
            f"planning ended {session.watch.cause}: no plan that fits was found. This is the smallest plan that was "
            "found; a smaller one may exist"
        )
        with session.watch.after_end():
            return session.smallest_known(), (note,)


def tradeoff_workload(
    workload: Workload,
    card: DeviceProfile,
    *,
    vram_bytes: int | None,
    constraints: Constraints,
    watch: Watch | None = None,
) -> Tradeoff:
    """Return certified plans that trade memory against step time, from the fastest to the smallest allowed plan.

    Args:
        vram_bytes: the user's budget, which only marks the fastest plan inside it; None if there is no budget.
        watch: limits the time, and receives progress; None for no limit. If the time is up, the plans that have been
            certified are returned.

    Raises:
        DecisionError: freezing is forced.
        TimeLimitError: the time was up before any plan was certified.
    """
    began = time.perf_counter()
    refuse_forced_freezing(constraints)
    budget = None if vram_bytes is None else Budget.on(card, vram_bytes, margin=constraints.margin)
    with open_session(workload, card, None, watch) as session:
        session.expect(constraints)
        usable_bytes = None if budget is None else budget.usable_bytes
        before_rehearsal = time.perf_counter()
        baseline = session.baseline
        before_assembly = time.perf_counter()
        baseline_plan = assemble_plan(session, baseline, constraints, None, began=began)
        found = front(
            session,
            constraints,
            vram_bytes=usable_bytes,
            rehearsal_seconds=before_assembly - before_rehearsal,
            assembly_seconds=time.perf_counter() - before_assembly,
        )
        return assemble_tradeoff(session, baseline_plan, found, constraints, budget, began=began)


def largest_step(workloads: Sequence[Workload], card: DeviceProfile, watch: Watch | None = None) -> Workload:
    """Return the workload whose step needs the most memory on the card. Each is rehearsed, unless there is only one.

    Raises:
        TimeLimitError: the time of `watch` is up.
    """
    if len(workloads) == 1:
        return workloads[0]
    if watch is not None:
        watch.stage(f"rehearsing {len(workloads)} batches")
    with _ended_without_plan(watch):
        return max(
            workloads, key=lambda work: smallest_total_bytes(record_step(work, card, watch=watch), card, watch=watch)
        )


def record_step(
    workload: Workload, card: DeviceProfile, decisions: Sequence[Decision] = (), *, watch: Watch | None = None
) -> StepGraph:
    """Rehearse two training steps of `workload`, and return the recording with the workspaces of the card's kernels.

    Args:
        decisions: decisions that are applied to the step first; without decisions the baseline is rehearsed.
        watch: limits the time of the rehearsal; None for no limit.

    Raises:
        TimeLimitError: the time is up.
    """
    with _ended_without_plan(watch):
        return rehearse.certifying_graph(rehearse.with_gradient_names(workload, card, watch), decisions, card, watch)


def start_steps(
    workload: Workload,
    card: DeviceProfile,
    decisions: Sequence[Decision],
    between: Sequence[rehearse.Activity] = (),
    schedule: Schedule | None = None,
) -> Child:
    """Start the rehearsal of two training steps, and twice of each function that runs between the steps of a run.

    Args:
        schedule: the calls of a step of the user's own, as another recording found them; None if there is none.

    Returns:
        A child process, whose `.result()` is a recording without workspaces.
    """
    return rehearse.start_certificate(workload, decisions, card, schedule, between)


@contextlib.contextmanager
def open_session(
    workload: Workload, card: DeviceProfile, budget: Budget | None, watch: Watch | None = None
) -> Iterator[PlanningSession]:
    """Yield a planning session. On leaving the context, rehearsals that are still running are ended.

    Raises:
        TimeLimitError: the time of `watch` was up inside the context, and nobody could use what was known then.
    """
    watch = watch or Watch()
    with _without_garbage_collector(), _ended_without_plan(watch):
        watch.stage("rehearsing the step")
        workload = rehearse.with_gradient_names(workload, card, watch)
        certifier = rehearse.Certifier(workload, card, watch)
        kept = KeptRecordings.of(workload, card, watch)
        session = PlanningSession(
            workload,
            card,
            budget=budget,
            start_what_if=lambda decisions, sizes, runs: kept.start(
                lambda: rehearse.start_rehearsal(
                    workload, decisions, card, sizes=sizes, steps=1, primed=True, what_if=True, runs=runs
                ).timed_by(watch),
                *("what-if", decisions, sizes, runs),
            ),
            start_shortened=lambda runs: kept.start(
                lambda: rehearse.start_certificate(workload, (), card, runs=runs).timed_by(watch), "shortened", runs
            ),
            start_forward=lambda workload, samples: rehearse.start_forward(workload, card, samples).timed_by(watch),
            start_update=lambda decisions, trained: kept.start(
                lambda: rehearse.start_update(workload, decisions, card, trained).timed_by(watch),
                *("update", decisions, trained),
            ),
            certificates=Certificates(
                lambda decisions: kept.start(lambda: certifier.start(decisions), "two steps", decisions),
                certifier.finish,
                start_in_background=lambda decisions: kept.start(
                    lambda: certifier.start(decisions).in_background(), "two steps", decisions
                ),
            ),
            watch=watch,
        )
        with contextlib.closing(session):
            yield session


@contextlib.contextmanager
def _ended_without_plan(watch: Watch | None) -> Iterator[None]:
    """Turn `TimeIsUp` into an error for the user: nothing was certified that could be returned."""
    try:
        yield
    except TimeIsUp as error:
        cause = "" if watch is None else f" {watch.cause}"
        more = "let it run longer or give" if watch is not None and watch.is_ended else "give more time (--time-limit),"
        raise TimeLimitError(
            f"planning ended{cause} before any plan was certified: {more} a smaller batch or a shorter sequence, or "
            "use fewer techniques (--only)"
        ) from error


@contextlib.contextmanager
def _without_garbage_collector() -> Iterator[None]:
    """Disable Python's garbage collector within the context.

    Recordings have many objects but no reference cycles. Searching them for cycles takes a quarter of the planning
    time. A session that has been closed is not part of a cycle either, so that its recordings are freed at once.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
