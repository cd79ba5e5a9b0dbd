"""What would open a budget that no plan fits: each technique and each fidelity that is not allowed, with its price."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

from planner.choose import fitting
from planner.choose.chooser import fidelity_of
from planner.choose.planning_session import Certified, PlanningSession
from planner.errors import PlannerError
from planner.plan_types.constraints import Constraints
from planner.plan_types.decisions import KINDS, Accumulation, Checkpoint, Decision, Fidelity, Freeze, Offload, Replay
from planner.plan_types.plan import NextStep, Relaxation
from planner.space.outer_choices import SearchSpace

_SECONDS = 10
"""After so long no further relaxation is looked at, if there is one already that opens the budget."""


def relaxations(session: PlanningSession, constraints: Constraints) -> tuple[Relaxation, ...]:
    """Every single relaxation of rules under which nothing fits. Recordings are shared with what was tried before.

    The plan for a technique that is newly allowed must use it, or it would have been found already: only such plans are
    looked for. With a frozen prefix any plan will do, not the fastest.
    """
    until = time.perf_counter() + _SECONDS
    found: list[Relaxation] = []
    for words, kind, relaxed in _single(constraints):
        if relaxed.fidelity > constraints.fidelity + 1 and any(one.opens for one in found):
            break  # what is less faithful still is not asked for where something nearer fits
        if time.perf_counter() > until and any(one.opens for one in found):
            found.append(_closed(words, None, "not looked at: it would take too long"))
        else:
            found.append(_tried(session, words, kind, relaxed, before=constraints))
    return tuple(found)


def _single(constraints: Constraints) -> Iterator[tuple[str, type[Decision] | None, Constraints]]:
    """In words, with the technique if it is one, and the rules then."""
    for kind in KINDS.values():
        if kind.kind in constraints.forbidden and kind.fidelity <= constraints.fidelity:
            forbidden = tuple(name for name in constraints.forbidden if name != kind.kind)
            yield f"allow {kind.kind}", kind, dataclasses.replace(constraints, forbidden=forbidden)
    for fidelity in Fidelity:
        if fidelity > constraints.fidelity:
            yield f"--fidelity {fidelity.name.lower()}", None, dataclasses.replace(constraints, fidelity=fidelity)


def _tried(
    session: PlanningSession, words: str, kind: type[Decision] | None, relaxed: Constraints, *, before: Constraints
) -> Relaxation:
    try:
        offered = session.offer(relaxed)
        if kind is not None and (offered := _using(offered, kind)) is None:
            return _closed(words, False, "it cannot be used here")
        certified = _found(session, offered, kind, relaxed, before)
    except PlannerError as error:
        return _closed(words, False, str(error))
    if certified is None:
        return _closed(words, False, "not enough by itself")
    return _open(session, words, certified)


def _found(
    session: PlanningSession,
    offered: SearchSpace,
    kind: type[Decision] | None,
    relaxed: Constraints,
    before: Constraints,
) -> Certified | None:
    certified = None
    freezes = relaxed.allow(Freeze) and not before.allow(Freeze)
    if kind is not Freeze and not (freezes and before.fidelity + 1 == relaxed.fidelity):
        certified = fitting.roughly_fastest(session, offered, relaxed)
    if certified is None and relaxed.allow(Freeze):
        certified = fitting.with_prefix(session, offered, relaxed, roughly=True)
    return certified


def _using(offered: SearchSpace, kind: type[Decision]) -> SearchSpace | None:
    """Only what makes use of a technique; None if nothing does. What to recompute or freeze is chosen later."""
    if kind in (Checkpoint, Replay, Offload, Freeze):
        return offered
    if kind is Accumulation:
        splits = tuple(split for split in offered.splits if split.micro_batches > 1)
        return dataclasses.replace(offered, splits=splits) if splits else None
    for name in ("precisions", "optimizers", "losses", "updates"):
        using = tuple(choice for choice in getattr(offered, name) if any(isinstance(one, kind) for one in choice))
        if using:
            return dataclasses.replace(offered, **{name: using})
    return None


def _closed(words: str, opens: bool | None, why: str) -> Relaxation:
    return Relaxation(relax=words, opens=opens, why=why, fidelity=None, next_step=None)


def _open(session: PlanningSession, words: str, certified: Certified) -> Relaxation:
    footprint, before = certified.measured.footprint, session.baseline.measured.footprint
    step = NextStep(
        relax=words,
        decisions=certified.choice.decisions,
        total_bytes=footprint.total_bytes,
        slowdown=footprint.step_ns / max(before.step_ns, 1),
    )
    fidelity = Fidelity(fidelity_of(certified.choice.decisions)).name.lower()
    return Relaxation(relax=words, opens=True, why="", fidelity=fidelity, next_step=step)
