"""If no plan fits: tries each technique and fidelity that is not allowed, and reports what is missing."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence

from planner.choose import fitting
from planner.choose.choice import Certified
from planner.choose.planning_session import PlanningSession
from planner.errors import StepError
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import Decision, Fidelity, Role, fidelity_of
from planner.plan_types.plan import NextStep, Relaxation, Shortfall
from planner.plan_types.techniques import KINDS
from planner.progress import TimeIsUp
from planner.recording.step_graph import Category
from planner.space.search_space import SearchSpace

_SECONDS = 10
"""Time limit in seconds. After it, no more relaxations are tried, provided that one makes a plan fit."""


def relaxations(
    session: PlanningSession, constraints: Constraints, *, lowest: Fidelity = Fidelity.PARTIAL
) -> tuple[Relaxation, ...]:
    """Try single relaxations of constraints under which nothing fits: one more technique, or a lower fidelity.

    If the newly allowed technique is one of the configuration, only plans that use it are searched. Among plans with a
    frozen prefix any plan that fits is enough, not the fastest.

    Args:
        lowest: the lowest fidelity that is tried.

    Returns:
        One entry for each relaxation. The lowest fidelities are left out if another relaxation makes a plan fit.
    """
    until = time.perf_counter() + _SECONDS
    tried: list[Relaxation] = []
    for label, technique, relaxed in single_relaxations(constraints, lowest=lowest):
        is_opened = any(relaxation.opens for relaxation in tried)
        if is_opened and relaxed.fidelity > next(_fidelities_below(constraints), relaxed.fidelity):
            break  # a lower fidelity is not tried if a higher one fits
        if is_opened and time.perf_counter() > until:
            tried.append(_without_plan(label, None, "not tried: it would take too long"))
            continue
        with session.watch.apart(functools.partial("trying changes that could make a plan fit ({})".format, label)):
            tried.append(_try(session, label, technique, relaxed, before=constraints))
    return tuple(tried)


def single_relaxations(
    constraints: Constraints, *, lowest: Fidelity = Fidelity.PARTIAL
) -> Iterator[tuple[str, type[Decision] | None, Constraints]]:
    """Yields for each relaxation its label, the technique that it allows (None for a fidelity) and new constraints."""
    for technique in KINDS.values():
        if technique.kind in constraints.forbidden and technique.fidelity <= constraints.fidelity:
            forbidden = tuple(name for name in constraints.forbidden if name != technique.kind)
            yield f"allow {technique.kind}", technique, dataclasses.replace(constraints, forbidden=forbidden)
    for fidelity in _fidelities_below(constraints):
        if fidelity > lowest:
            return
        yield f"--fidelity {fidelity.name.lower()}", None, dataclasses.replace(constraints, fidelity=fidelity)


def _fidelities_below(constraints: Constraints) -> Iterator[Fidelity]:
    """Yields the fidelities that the constraints do not allow, from the nearest on, if techniques have them."""
    of_techniques = {technique.fidelity for technique in KINDS.values()}
    yield from (fidelity for fidelity in Fidelity if fidelity > constraints.fidelity and fidelity in of_techniques)


def _try(
    session: PlanningSession,
    label: str,
    technique: type[Decision] | None,
    relaxed: Constraints,
    *,
    before: Constraints,
) -> Relaxation:
    try:
        session.watch.check()
        space = session.search_space(relaxed)
        narrow = space if technique is None else space.using(technique)
        if narrow is None:
            return _without_plan(label, False, "the technique cannot be used for this model, batch, optimizer or card")
        certified = _plan_within(session, narrow, technique, relaxed, before)
    except StepError as error:
        return _without_plan(label, False, str(error))
    except TimeIsUp:
        return _without_plan(label, None, f"not tried: planning ended {session.watch.cause}")
    if certified is None:
        return _without_plan(label, False, "not enough on its own")
    return _with_plan(session, label, certified)


def _plan_within(
    session: PlanningSession,
    space: SearchSpace,
    technique: type[Decision] | None,
    relaxed: Constraints,
    before: Constraints,
) -> Certified | None:
    """Returns a plan that fits, without a frozen prefix if possible; None if no plan fits."""
    certified = None
    # If freezing is all that is newly allowed, plans without it have been searched before.
    freezing_is_new = relaxed.allow(Role.FREEZING) and not before.allow(Role.FREEZING)
    is_freezing = technique is not None and technique.role is Role.FREEZING
    if not is_freezing and not (freezing_is_new and relaxed.fidelity == next(_fidelities_below(before))):
        certified = fitting.roughly_fastest(session, space, relaxed)
    if certified is None and relaxed.allow(Role.FREEZING):
        certified = fitting.with_prefix(session, space, relaxed, roughly=True)
    return certified


def _without_plan(label: str, opens: bool | None, why: str) -> Relaxation:
    """Returns the entry of a relaxation under which nothing fits, or that was not tried (`opens` is None)."""
    return Relaxation(relax=label, opens=opens, why=why, fidelity=None, next_step=None)


def _with_plan(session: PlanningSession, label: str, certified: Certified) -> Relaxation:
    """Returns the entry of a relaxation under which the plan `certified` fits."""
    footprint, baseline = certified.measured.footprint, session.baseline.measured.footprint
    step = NextStep(
        relax=label,
        decisions=certified.choice.decisions,
        total_bytes=footprint.total_bytes,
        slowdown=footprint.step_ns / max(baseline.step_ns, 1),
    )
    fidelity = Fidelity(fidelity_of(certified.choice.decisions)).name.lower()
    return Relaxation(relax=label, opens=True, why="", fidelity=fidelity, next_step=step)


def shortfall_of(session: PlanningSession, smallest: Certified, tried: Sequence[Relaxation]) -> Shortfall:
    """Returns how many bytes the smallest plan lacks, what takes most of its peak, and which relaxations would help.

    Args:
        smallest: the smallest plan, measured under the smallest budget in which it runs. Under that budget the
            allocator frees cached memory, so that the cache does not count as missing bytes.
        tried: the relaxations of the constraints that were tried.
    """
    parts = {
        category: size for category, size in smallest.measured.footprint.breakdown.items() if category != Category.SLACK
    }
    binding = max(parts, key=lambda category: parts[category])
    open_steps = [relaxation.next_step for relaxation in tried if relaxation.next_step is not None]
    return Shortfall(
        missing_bytes=max(smallest.measured.footprint.total_bytes - session.budget.usable_bytes, 0),
        binding=str(binding),
        binding_bytes=parts[binding],
        next_step=min(open_steps, key=lambda step: step.slowdown, default=None),
        relaxations=tuple(tried),
    )
