"""If no plan fits: try each technique and fidelity that is not allowed, and report its price."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

from planner.choose import fitting
from planner.choose.planning_session import Certified, PlanningSession
from planner.errors import PlannerError
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import Decision, Fidelity, Role, fidelity_of
from planner.plan_types.plan import NextStep, Relaxation
from planner.plan_types.techniques import KINDS
from planner.space.search_space import SearchSpace

_SECONDS = 10
"""Time limit in seconds. After it, no more relaxations are tried if one that makes training fit is known."""


def relaxations(session: PlanningSession, constraints: Constraints) -> tuple[Relaxation, ...]:
    """Try every single relaxation of constraints under which nothing fits. Recordings are shared with earlier searches.

    Only plans that use the newly allowed technique are searched, because all others have been searched before. With a
    frozen prefix any plan that fits is enough, not the fastest.
    """
    until = time.perf_counter() + _SECONDS
    tried: list[Relaxation] = []
    for label, technique, relaxed in _single_relaxations(constraints):
        if relaxed.fidelity > constraints.fidelity + 1 and any(relaxation.opens for relaxation in tried):
            break  # a lower fidelity is not tried if a higher one fits
        if time.perf_counter() > until and any(relaxation.opens for relaxation in tried):
            tried.append(_closed(label, None, "not looked at: it would take too long"))
        else:
            tried.append(_try(session, label, technique, relaxed, before=constraints))
    return tuple(tried)


def _single_relaxations(constraints: Constraints) -> Iterator[tuple[str, type[Decision] | None, Constraints]]:
    """The label of each relaxation, its technique (None for a fidelity), and the relaxed constraints."""
    for technique in KINDS.values():
        if technique.kind in constraints.forbidden and technique.fidelity <= constraints.fidelity:
            forbidden = tuple(name for name in constraints.forbidden if name != technique.kind)
            yield f"allow {technique.kind}", technique, dataclasses.replace(constraints, forbidden=forbidden)
    for fidelity in Fidelity:
        if fidelity > constraints.fidelity:
            yield f"--fidelity {fidelity.name.lower()}", None, dataclasses.replace(constraints, fidelity=fidelity)


def _try(
    session: PlanningSession,
    label: str,
    technique: type[Decision] | None,
    relaxed: Constraints,
    *,
    before: Constraints,
) -> Relaxation:
    try:
        space = session.search_space(relaxed)
        narrow = space if technique is None else space.using(technique)
        if narrow is None:
            return _closed(label, False, "it cannot be used here")
        certified = _plan_within(session, narrow, technique, relaxed, before)
    except PlannerError as error:
        return _closed(label, False, str(error))
    if certified is None:
        return _closed(label, False, "not enough on its own")
    return _open(session, label, certified)


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
    if not is_freezing and not (freezing_is_new and before.fidelity + 1 == relaxed.fidelity):
        certified = fitting.roughly_fastest(session, space, relaxed)
    if certified is None and relaxed.allow(Role.FREEZING):
        certified = fitting.with_prefix(session, space, relaxed, roughly=True)
    return certified


def _closed(label: str, opens: bool | None, why: str) -> Relaxation:
    """A relaxation under which nothing fits, or that was not tried (`opens` is None)."""
    return Relaxation(relax=label, opens=opens, why=why, fidelity=None, next_step=None)


def _open(session: PlanningSession, label: str, certified: Certified) -> Relaxation:
    """A relaxation under which this plan fits."""
    footprint, baseline = certified.measured.footprint, session.baseline.measured.footprint
    step = NextStep(
        relax=label,
        decisions=certified.choice.decisions,
        total_bytes=footprint.total_bytes,
        slowdown=footprint.step_ns / max(baseline.step_ns, 1),
    )
    fidelity = Fidelity(fidelity_of(certified.choice.decisions)).name.lower()
    return Relaxation(relax=label, opens=True, why="", fidelity=fidelity, next_step=step)
