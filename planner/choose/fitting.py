"""Finds the best plan whose certificate fits the budget, and explains what is missing if there is none.

The chooser promises a peak of tensors, and the allocator needs some more. So a plan is found by *choose, certify, and
choose again with a smaller budget for promises* until a certificate fits (`budget_search`). Around this loop:

- `best` is the answer for a user: the fastest plan, with a frozen prefix only if nothing else fits, and then with the
  shortest prefix that is enough (binary search over prefixes, guessed from the bytes that freezing saves).
- `smallest` is the answer to "how little memory is possible", where the allocator's slack matters most.
- `nearest` and `shortfall` say what is missing if nothing fits.

Where it is not exact: the slack is not monotonic in the promise, and the number of certificates is limited, so that a
faster plan may exist. A plan that is returned as fitting always has a certificate that fits.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

from planner.allocator.settings import SMALL_SEGMENT_BYTES
from planner.choose.budget_search import PromiseBudgets, search
from planner.choose.choice import Choice
from planner.choose.chooser import TIE
from planner.choose.planning_session import Certified, PlanningSession
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import Decision, Role, has_role, with_roles
from planner.plan_types.plan import Relaxation, Shortfall
from planner.recording.step_graph import Category
from planner.search.threshold import first_true
from planner.space.frozen_prefixes import prefixes
from planner.space.search_space import SearchSpace

_ATTEMPTS, _FEW_ATTEMPTS = 10, 4
"""Maximum number of plans that are certified in a search: for the fastest plan, and for any plan that fits."""
_HOPELESS = 6
"""Maximum number of plans that fail before the first one that fits."""
_FINEST_STEP = 512
"""Minimum step by which the budget for promises is lowered: the budget divided by this number."""
_LARGE_SLACK = 0.05
"""Minimum fraction of the total that the allocator's slack takes for another search for a smaller plan."""
_DESCENTS = 2
"""Maximum number of searches for an even smaller plan. Each search lowers the total by one segment of small blocks."""


def best(session: PlanningSession, space: SearchSpace, constraints: Constraints) -> Certified | None:
    """The fastest certified plan of a search space; None if nothing fits."""
    if not constraints.force(Role.FREEZING):
        certified = fastest_in_chunks(session, space, constraints)
        if certified is not None or not constraints.allow(Role.FREEZING):
            return certified
    return with_prefix(session, space, constraints)


def with_prefix(
    session: PlanningSession, space: SearchSpace, constraints: Constraints, *, roughly: bool = False
) -> Certified | None:
    """The fastest certified plan with the shortest frozen prefix for which any plan fits; None if no plan fits.

    Args:
        roughly: True if any plan that fits is sufficient, instead of the fastest one.
    """
    space = space.with_most_chunks() or space
    candidates = frozen_prefixes(session)
    # Only the configuration with the smallest peak decides how short a prefix may be: this saves recordings.
    smallest_choice = session.chooser(space, constraints).smallest()
    narrow = space.restricted_to(smallest_choice.config)

    def promises(number: int) -> bool:
        chooser = session.chooser(narrow.with_frozen(candidates[number]), constraints)
        return chooser.fastest(session.budget.tensor_bytes) is not None

    def holds(number: int) -> bool:
        return fastest(session, narrow.with_frozen(candidates[number]), constraints) is not None

    # Three answers, each the guess for the next: by bytes that freezing saves, by promises, by certificates.
    guess = _guessed_prefix(session, candidates, smallest_choice)
    guess = first_true(len(candidates), promises, guess=guess)
    shortest = first_true(len(candidates), holds, guess=guess)
    if shortest == len(candidates):
        return None
    return fastest(session, (narrow if roughly else space).with_frozen(candidates[shortest]), constraints)


def fastest_in_chunks(
    session: PlanningSession, space: SearchSpace, constraints: Constraints, *, attempts: int = _ATTEMPTS
) -> Certified | None:
    """The fastest plan with as many chunks of the loss as the budget asks for, or with the maximum if nothing fits."""
    certified = fastest(session, space, constraints, attempts=attempts)
    if certified is None and (finer := space.with_most_chunks()) is not None:
        return fastest(session, finer, constraints, attempts=_FEW_ATTEMPTS)
    return certified


def roughly_fastest(session: PlanningSession, space: SearchSpace, constraints: Constraints) -> Certified | None:
    """Returns the fastest of a few plans that were tried and fit; None if none of them fits."""
    return fastest_in_chunks(session, space, constraints, attempts=_FEW_ATTEMPTS)


def fastest(
    session: PlanningSession,
    space: SearchSpace,
    constraints: Constraints,
    *,
    attempts: int = _ATTEMPTS,
    until: float = math.inf,
) -> Certified | None:
    """The fastest certified plan, found by `budget_search`; None if none fits.

    Args:
        attempts: maximum number of plans that are certified.
        until: value of `time.perf_counter()` at which the search stops with the best plan so far.
    """
    return _search(session, space, constraints, attempts=attempts, until=until)[0]


def _search(
    session: PlanningSession, space: SearchSpace, constraints: Constraints, *, attempts: int, until: float
) -> tuple[Certified | None, tuple[Certified, ...]]:
    """The fastest plan that fits, and every plan that was certified on the way."""
    chooser, budget_bytes = session.chooser(space, constraints), session.budget.tensor_bytes
    if chooser.fastest(budget_bytes) is None:
        budget_bytes = session.budget.allocator_bytes  # the slack may be less than the first guess of it
    tried: dict[Choice, Certified] = {}

    def short_bytes_of(choice: Choice) -> int:
        tried[choice] = certified = session.certify(choice)
        return (
            0
            if certified.measured.fits
            else max(session.smallest_budget_bytes(certified) - session.budget.usable_bytes, 1)
        )

    choice = search(
        lambda budget_of, below_ns: chooser.fastest(budget_of, below_ns=below_ns),
        short_bytes_of,
        budgets=PromiseBudgets(budget_bytes, finest_bytes=session.budget.tensor_bytes // _FINEST_STEP, tie=TIE),
        tie=TIE,
        attempts=attempts,
        hopeless=_HOPELESS,
        is_over=lambda: time.perf_counter() > until,
    )
    return None if choice is None else tried[choice], tuple(tried.values())


def smallest(
    session: PlanningSession, space: SearchSpace, constraints: Constraints, *, until: float = math.inf
) -> Certified:
    """A fast plan among those that run in the smallest total that was found. It may fit the budget.

    Args:
        until: value of `time.perf_counter()` after which no more searches start.
    """
    smallest = session.measure_at_smallest_budget(session.certify(_smallest_promise(session, space, constraints)))
    # Where slack is a large part of the total, faster plans with a larger promise may need no more, or even less: first
    # search at this total, then at totals that are a segment smaller.
    for less_bytes in (0, *[SMALL_SEGMENT_BYTES] * _DESCENTS):
        slack_bytes = smallest.measured.footprint.reserved_bytes - smallest.choice.peak_bytes
        total_bytes = smallest.measured.footprint.total_bytes
        if smallest.measured.fits or slack_bytes <= _LARGE_SLACK * total_bytes or time.perf_counter() > until:
            return smallest
        at_total = session.with_budget(total_bytes - less_bytes)
        certified, tried = _search(at_total, space, constraints, attempts=_FEW_ATTEMPTS, until=until)
        if certified is None and less_bytes:
            break
        if tried:
            least = min(tried, key=lambda plan: (plan.measured.footprint.total_bytes, plan.choice.step_ns))
            smallest = min(
                (session.measure_at_smallest_budget(least), smallest),
                key=lambda plan: plan.measured.footprint.total_bytes,
            )
    return smallest


def _smallest_promise(session: PlanningSession, space: SearchSpace, constraints: Constraints) -> Choice:
    """The choice with the smallest promise. Among equal promises, the one with the number of chunks for the budget."""
    choice, finer = session.chooser(space, constraints).smallest(), space.with_most_chunks()
    if finer is None or not has_role(choice.decisions, Role.LOSS):
        return choice
    narrow = dataclasses.replace(
        space.restricted_to(choice.config), losses=tuple(filter(None, finer.losses)), chunks=finer.chunks
    )
    return min(choice, session.chooser(narrow, constraints).smallest(), key=lambda choice: choice.peak_bytes)


def nearest(session: PlanningSession, space: SearchSpace, constraints: Constraints) -> Certified:
    """The plan to report if no plan is allowed: the fastest plan that fits but is too slow, else the smallest plan."""
    if constraints.max_slowdown is not None:
        slower = dataclasses.replace(constraints, max_slowdown=None)
        if (certified := best(session, space, slower)) is not None:
            return certified
    return smallest(session, space, constraints)


def shortfall(session: PlanningSession, smallest: Certified, relaxations: Sequence[Relaxation]) -> Shortfall:
    """How many bytes the smallest plan lacks, and what takes most of its peak.

    Args:
        smallest: the smallest plan, measured under the smallest budget in which it runs. There the allocator frees its
        cache.
    """
    parts = {
        category: size for category, size in smallest.measured.footprint.breakdown.items() if category != Category.SLACK
    }
    binding = max(parts, key=lambda category: parts[category])
    open_steps = [relaxation.next_step for relaxation in relaxations if relaxation.next_step is not None]
    return Shortfall(
        missing_bytes=max(smallest.measured.footprint.total_bytes - session.budget.usable_bytes, 0),
        binding=str(binding),
        binding_bytes=parts[binding],
        next_step=min(open_steps, key=lambda step: step.slowdown, default=None),
        relaxations=tuple(relaxations),
    )


def frozen_prefixes(session: PlanningSession) -> tuple[Decision, ...]:
    """Prefixes of the model that can be frozen, from short to long."""
    starts = [(call.module, call.start) for call in session.baseline_graph.calls]
    modules = session.workload.model.named_modules()
    owners = [name for name, module in modules if any(True for _ in module.parameters(recurse=False))]
    return prefixes(starts, owners)


def _guessed_prefix(session: PlanningSession, candidates: tuple[Decision, ...], chosen: Choice) -> int:
    """Index of the shortest prefix that would be sufficient if freezing saved only gradients and optimizer state."""
    config = with_roles(chosen.decisions, Role.PRECISION, Role.OPTIMIZER, Role.UPDATE_TIME)
    missing = chosen.peak_bytes - session.budget.tensor_bytes
    saved = [session.lower_bound_bytes(config) - session.lower_bound_bytes((frozen, *config)) for frozen in candidates]
    return next((number for number, size in enumerate(saved) if size >= missing), len(candidates))
