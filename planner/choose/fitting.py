"""The best plan that holds on the card, and what to say when there is none.

The search promises bytes of tensors; the allocator needs some more. So choose, certify, and where the certificate does
not fit, choose again with less. A frozen prefix is the last resort: only if nothing else fits, as short as possible.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

from planner.allocator.settings import SMALL_SEGMENT_BYTES
from planner.choose.budget_search import PromiseBudgets, search
from planner.choose.chooser import TIE, Choice
from planner.choose.planning_session import Certified, PlanningSession
from planner.plan_types.constraints import Constraints
from planner.plan_types.decisions import ChunkedLoss, Freeze, Optimizer, OptimizerKernel, Precision, StepInBackward
from planner.plan_types.plan import Relaxation, Shortfall
from planner.recording.step_graph import Category
from planner.search.threshold import first_true
from planner.space.frozen_prefixes import prefixes
from planner.space.outer_choices import SearchSpace, finest_offer, frozen_offer, only

_ATTEMPTS, _FEW_ATTEMPTS = 10, 4
"""Plans that are certified until the allocator's slack is paid for: the few where any that fits will do."""
_HOPELESS = 6
"""So many that do not fit, and none is taken to."""
_FINEST_STEP = 512
"""The budget for tensors goes down by at least its share of one in this, and by twice as much each round."""
_LARGE_SLACK = 0.05
"""Share of the total from which on the allocator's slack is worth another look for the smallest plan."""
_DESCENTS = 2
"""So many times something smaller is looked for, by one segment of small blocks each."""


def best(session: PlanningSession, offered: SearchSpace, constraints: Constraints) -> Certified | None:
    """The fastest certified plan among what is offered; None if nothing fits."""
    if not constraints.force(Freeze):
        found = fastest_in_chunks(session, offered, constraints)
        if found is not None or not constraints.allow(Freeze):
            return found
    return with_prefix(session, offered, constraints)


def with_prefix(
    session: PlanningSession, offered: SearchSpace, constraints: Constraints, *, roughly: bool = False
) -> Certified | None:
    """The fastest certified plan with the shortest frozen prefix for which anything fits; None if nothing does.

    Args:
        roughly: the plan need not be the fastest, only one that fits.
    """
    offered = finest_offer(offered) or offered
    candidates = frozen_prefixes(session)
    smallest_choice = session.chooser(offered, constraints).smallest()
    narrow = only(offered, smallest_choice.outer)  # how short a prefix may be is asked of the smallest way alone

    def promises(number: int) -> bool:
        chooser = session.chooser(frozen_offer(narrow, candidates[number]), constraints)
        return chooser.fastest(session.budget_bytes) is not None

    def holds(number: int) -> bool:
        return fastest(session, frozen_offer(narrow, candidates[number]), constraints) is not None

    guess = _guessed_prefix(session, candidates, smallest_choice)
    guess = first_true(len(candidates), promises, guess=guess)
    shortest = first_true(len(candidates), holds, guess=guess)  # the same, unless the allocator's slack asks for more
    if shortest == len(candidates):
        return None
    return fastest(session, frozen_offer(narrow if roughly else offered, candidates[shortest]), constraints)


def fastest_in_chunks(
    session: PlanningSession, offered: SearchSpace, constraints: Constraints, *, attempts: int = _ATTEMPTS
) -> Certified | None:
    """The fastest, with the loss in as many chunks as the budget asks for; where nothing fits so, as many as can be."""
    found = fastest(session, offered, constraints, attempts=attempts)
    if found is None and (finer := finest_offer(offered)) is not None:
        return fastest(session, finer, constraints, attempts=_FEW_ATTEMPTS)
    return found


def roughly_fastest(session: PlanningSession, offered: SearchSpace, constraints: Constraints) -> Certified | None:
    """One that fits, and a fast one among the first of those; None if nothing fits."""
    return fastest_in_chunks(session, offered, constraints, attempts=_FEW_ATTEMPTS)


def fastest(
    session: PlanningSession,
    offered: SearchSpace,
    constraints: Constraints,
    *,
    attempts: int = _ATTEMPTS,
    until: float = math.inf,
) -> Certified | None:
    """Choose, certify, and choose again with less where the allocator's slack did not fit (`choose.budget_search`).

    Args:
        attempts: so many plans are certified at most.
        until: when to stop at what is found by then (`time.perf_counter`).
    """
    return _settled(session, offered, constraints, attempts=attempts, until=until)[0]


def _settled(
    session: PlanningSession, offered: SearchSpace, constraints: Constraints, *, attempts: int, until: float
) -> tuple[Certified | None, tuple[Certified, ...]]:
    """The fastest, and everything that was certified on the way."""
    chooser, budget_bytes = session.chooser(offered, constraints), session.budget_bytes
    if chooser.fastest(budget_bytes) is None:
        budget_bytes = session.capacity_bytes  # the slack may be less than the first guess of it
    tried: dict[Choice, Certified] = {}

    def short_bytes_of(choice: Choice) -> int:
        tried[choice] = certified = session.certify(choice)
        return 0 if certified.measured.fits else max(session.smallest_budget_bytes(certified) - session.vram_bytes, 1)

    found = search(
        lambda budget, below_ns: chooser.fastest(budget, below_ns=below_ns),
        short_bytes_of,
        descent=PromiseBudgets(budget_bytes, finest_bytes=session.budget_bytes // _FINEST_STEP, tie=TIE),
        tie=TIE,
        attempts=attempts,
        hopeless=_HOPELESS,
        is_over=lambda: time.perf_counter() > until,
    )
    return None if found is None else tried[found], tuple(tried.values())


def smallest(
    session: PlanningSession, offered: SearchSpace, constraints: Constraints, *, until: float = math.inf
) -> Certified:
    """The plan that gets through in the smallest total that was found, and a fast one among those.

    It begins with the smallest promise. Where the allocator's slack is a large part of it, quicker plans may need no
    more, or even less: these are looked for `until` then (`time.perf_counter`). What comes back may fit after all.
    """
    found = session.measure_at_smallest_budget(session.certify(_smallest_promise(session, offered, constraints)))
    for less_bytes in (0, *[SMALL_SEGMENT_BYTES] * _DESCENTS):
        slack_bytes = found.measured.footprint.reserved_bytes - found.choice.peak_bytes
        total_bytes = found.measured.footprint.total_bytes
        if found.measured.fits or slack_bytes <= _LARGE_SLACK * total_bytes or time.perf_counter() > until:
            return found
        under = session.under(total_bytes - less_bytes)
        again, tried = _settled(under, offered, constraints, attempts=_FEW_ATTEMPTS, until=until)
        if again is None and less_bytes:
            break
        if tried:
            least = min(tried, key=lambda one: (one.measured.footprint.total_bytes, one.choice.step_ns))
            found = min(
                (session.measure_at_smallest_budget(least), found), key=lambda one: one.measured.footprint.total_bytes
            )
    return found


def _smallest_promise(session: PlanningSession, offered: SearchSpace, constraints: Constraints) -> Choice:
    """Among equals the one whose loss is in no more chunks than the budget asks for."""
    choice, finer = session.chooser(offered, constraints).smallest(), finest_offer(offered)
    if finer is None or not any(isinstance(decision, ChunkedLoss) for decision in choice.decisions):
        return choice
    narrow = dataclasses.replace(
        only(offered, choice.outer), losses=tuple(filter(None, finer.losses)), chunks=finer.chunks
    )
    return min(choice, session.chooser(narrow, constraints).smallest(), key=lambda choice: choice.peak_bytes)


def nearest(session: PlanningSession, offered: SearchSpace, constraints: Constraints) -> Certified:
    """Where nothing fits as fast as is allowed: the fastest plan that is too slow, or else the smallest plan."""
    if constraints.max_slowdown is not None:
        slower = dataclasses.replace(constraints, max_slowdown=None)
        if (found := best(session, offered, slower)) is not None:
            return found
    return smallest(session, offered, constraints)


def shortfall(session: PlanningSession, smallest: Certified, relaxations: Sequence[Relaxation]) -> Shortfall:
    """By how much the smallest plan misses the budget, and what binds there.

    Its footprint is measured under the smallest budget in which it gets through, where the allocator frees its cache.
    """
    parts = {
        category: size for category, size in smallest.measured.footprint.breakdown.items() if category != Category.SLACK
    }
    binding = max(parts, key=lambda category: parts[category])
    open_steps = [relaxation.next_step for relaxation in relaxations if relaxation.next_step is not None]
    return Shortfall(
        missing_bytes=max(smallest.measured.footprint.total_bytes - session.vram_bytes, 0),
        binding=str(binding),
        binding_bytes=parts[binding],
        next_step=min(open_steps, key=lambda step: step.slowdown, default=None),
        relaxations=tuple(relaxations),
    )


def frozen_prefixes(session: PlanningSession) -> tuple[Freeze, ...]:
    """Prefixes of the model that may be frozen, short to long."""
    starts = [(call.module, call.start) for call in session.baseline_graph.calls]
    modules = session.work.model.named_modules()
    owners = [name for name, module in modules if any(True for _ in module.parameters(recurse=False))]
    return prefixes(starts, owners)


def _guessed_prefix(session: PlanningSession, candidates: tuple[Freeze, ...], chosen: Choice) -> int:
    """The prefix that suffices if freezing spared nothing but gradients and optimizer state."""
    kinds = (Precision, Optimizer, OptimizerKernel, StepInBackward)
    outer = tuple(decision for decision in chosen.decisions if isinstance(decision, kinds))
    missing = chosen.peak_bytes - session.budget_bytes
    spared = [session.lower_bound_bytes(outer) - session.lower_bound_bytes((frozen, *outer)) for frozen in candidates]
    return next((number for number, size in enumerate(spared) if size >= missing), len(candidates))
