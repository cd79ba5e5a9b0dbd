"""The Pareto front: for every amount of memory, how fast one training step can be.

The chooser is asked for the fastest plan under one budget after another. A plan that promises a peak of `p` is the
answer for every budget from `p` to the budget of its search. For budgets from the next smaller searched budget to `p`
the answer is not known: there is an unknown rectangle, as wide as these budgets (in bytes) and as high as the ratio of
the step times at its two sides. The next search is in the middle of the rectangle with the largest area, until all
rectangles are narrow or time runs out (rectangle elimination: Payne and Polak 1980, IEEE Transactions on Automatic
Control 25, 3). So the front is rough early and fine later. Then every plan is certified, and measured under the
smallest budget in which it runs.

Where it is not exact: a promise leaves out the allocator's slack, with which a chosen plan may be larger than another
plan. A point is always a certified plan, but between two points a better plan may exist. At the user's budget the point
is the plan of `fitting.best`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time

from planner.choose import fitting
from planner.choose.choice import Choice
from planner.choose.planning_session import Certified, PlanningSession
from planner.errors import DecisionError
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import Role
from planner.space.search_space import SearchSpace

_STEP = 1 / 12
"""A rectangle is narrow, and not searched, if its width is at most this fraction of the front's width (in bytes).

The fraction is divided by the rectangle's ratio of step times: where times differ more, the front is searched finer.
"""
_STEEPEST = 4
"""Maximum ratio of step times of a rectangle: larger ratios count as this one."""
_ALIKE = 1.01
"""Between two plans whose step times have at most this ratio, no other plan is searched."""
_SEARCHING = 0.6
"""Fraction of the time limit for searching plans; the remaining time is for certificates."""
_DESCENDING = 0.3
"""Fraction of the time limit after which the smallest plan found so far is accepted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Front:
    """Certified plans, from the fastest to the smallest: each plan is slower and smaller than the one before it."""

    points: tuple[Certified, ...]
    """The plans in this order, each measured under the smallest budget in which it runs."""
    complete: bool
    """False if time ran out: other plans may exist between the plans in `points`."""


def front(session: PlanningSession, constraints: Constraints, *, vram_bytes: int | None, seconds: float) -> Front:
    """Returns the front of the plans that the constraints allow.

    The largest budget that is searched is the baseline's total, or the user's budget if that is larger.

    Args:
        session: a session without a budget.
        vram_bytes: the user's budget, at which a plan is searched too; None if there is none.
        seconds: time limit, kept approximately. The fastest plan, the smallest plan and the plan at the budget are
            always searched.

    Raises:
        DecisionError: freezing is forced. Frozen prefixes are searched at the user's budget only, as a last resort.
    """
    if constraints.force(Role.FREEZING):
        raise DecisionError(
            "the trade-off of memory against time cannot be computed with freeze forced, because each frozen prefix of "
            "the model has a trade-off of its own: do not force freeze"
        )
    began = time.perf_counter()
    until = began + _SEARCHING * seconds
    # Search the two ends of the front and the user's budget. All later searches are between the two ends.
    largest_bytes = max(total_bytes(session.baseline), vram_bytes or 0)
    answers = {session.with_budget(largest_bytes).budget.tensor_bytes: _fastest(session, constraints, largest_bytes)}
    at_budget = None if vram_bytes is None else _at_budget(session, constraints, vram_bytes)
    smallest = _smallest(session, constraints, until=began + _DESCENDING * seconds)
    if smallest is None:
        answers[0] = None
    for known in (at_budget, smallest):
        if known is not None:
            answers[known.choice.peak_bytes] = known.choice
    peaks = [choice.peak_bytes for choice in answers.values() if choice is not None]
    # Rectangle elimination. More memory is never slower: if the answer for a smaller budget is faster, it counts here.
    narrow_bytes = _STEP * (max(peaks, default=0) - min(answers))
    while (asked_bytes := _widest(answers, narrow_bytes)) is not None and time.perf_counter() < until:
        below = answers.get(max((size for size in answers if size < asked_bytes), default=0))
        answers[asked_bytes] = _faster(_fastest(session, constraints, asked_bytes + session.card.context_bytes), below)
    # Certify the chosen plans. Search the smallest total again: with slack, another plan may be the fastest there.
    points = _certified(session, [choice for choice in answers.values() if choice is not None], constraints)
    if smallest is not None and time.perf_counter() < until:
        points.append(_no_larger(session, constraints, smallest, until=until))
    in_time = time.perf_counter() < until
    if at_budget is not None and session.quick_enough(at_budget, constraints):
        points.append(at_budget)  # it runs in the user's budget; the smallest budgets of other plans are rounded up
    return Front(points=_undominated(points), complete=asked_bytes is None and in_time)


def total_bytes(point: Certified) -> int:
    """Returns the total memory of the plan's process in bytes, as `nvidia-smi` shows it."""
    return point.measured.footprint.total_bytes


def _fastest(session: PlanningSession, constraints: Constraints, vram_bytes: int) -> Choice | None:
    """Returns the choice that promises the shortest step time under a budget; None if no promise fits."""
    budgeted = session.with_budget(vram_bytes)
    chooser = budgeted.chooser(budgeted.search_space(constraints), constraints)
    return chooser.fastest(budgeted.budget.allocator_bytes)


def _at_budget(session: PlanningSession, constraints: Constraints, vram_bytes: int) -> Certified | None:
    """Returns the fastest certified plan inside the user's budget; None if none was found."""
    budgeted = session.with_budget(vram_bytes)
    return fitting.best(budgeted, budgeted.search_space(constraints), constraints)


def _smallest(session: PlanningSession, constraints: Constraints, *, until: float) -> Certified | None:
    """Returns the smallest plan without a frozen prefix; None if it is slower than the constraints allow.

    If it is too slow, a faster plan that is no larger is tried first.
    """
    space = session.with_budget(total_bytes(session.baseline)).search_space(constraints)
    budgeted = session.with_budget(_least_bytes(session, space))
    smallest = fitting.smallest(budgeted, budgeted.search_space(constraints), constraints, until=until)
    if not session.quick_enough(smallest, constraints):
        smallest = _no_larger(session, constraints, smallest)
    return smallest if session.quick_enough(smallest, constraints) else None


def _no_larger(
    session: PlanningSession, constraints: Constraints, plan: Certified, *, until: float = math.inf
) -> Certified:
    """Returns the fastest plan that was found among plans that are no larger than `plan`.

    The plan with the smallest promise may be much slower than a plan for which the allocator reserves as much memory.
    """
    if not session.card.allocator:
        return plan
    budgeted = session.with_budget(total_bytes(plan))
    faster = fitting.fastest(budgeted, budgeted.search_space(constraints), constraints, until=until)
    return min((plan, faster or plan), key=_step_ns)


def _least_bytes(session: PlanningSession, space: SearchSpace) -> int:
    """Returns a lower bound in bytes on the total of every plan."""
    configs = ((*optimizer, *update) for optimizer, update in itertools.product(space.optimizers, space.updates))
    return min(session.lower_bound_bytes(config) for config in configs) + session.card.context_bytes


def _faster(first: Choice | None, second: Choice | None) -> Choice | None:
    """Returns the faster of two choices, each of which may be None; `first` if both take equally long."""
    if first is None or second is None:
        return first or second
    return min(first, second, key=lambda choice: choice.step_ns)


def _widest(answers: dict[int, Choice | None], narrow_bytes: float) -> int | None:
    """Returns the budget in bytes to search next; None if all unknown rectangles are narrow.

    Args:
        answers: by searched budget in bytes, the fastest choice; None if no plan fits.
        narrow_bytes: width up to which a rectangle of equal step times would be narrow.
    """
    areas = {}
    for low_bytes, high_bytes in itertools.pairwise(sorted(answers)):
        below, above = answers[low_bytes], answers[high_bytes]
        if above is None:
            continue
        width_bytes = above.peak_bytes - low_bytes
        ratio = _STEEPEST if below is None else min(below.step_ns / above.step_ns, _STEEPEST)
        if ratio > _ALIKE and width_bytes > max(narrow_bytes / ratio, 1):
            areas[low_bytes + width_bytes // 2] = width_bytes * (ratio - 1)
    return max(areas, key=areas.__getitem__, default=None)


def _certified(session: PlanningSession, choices: list[Choice], constraints: Constraints) -> list[Certified]:
    """Certifies the choices, each under the smallest budget in which it runs, and drops choices that are too slow."""
    wanted = list({choice.decisions: choice for choice in choices}.values())
    certificates = []
    for choice, following in itertools.zip_longest(wanted, wanted[1:]):
        certified = session.certify(choice, then=following)
        certified = session.with_budget(session.smallest_budget_bytes(certified)).certify(choice)
        if session.quick_enough(certified, constraints):
            certificates.append(certified)
    return certificates


def _undominated(points: list[Certified]) -> tuple[Certified, ...]:
    """Returns the points to which no other point is equal or better in both memory and time, the fastest first."""
    kept: list[Certified] = []
    for point in sorted(points, key=lambda point: (total_bytes(point), _step_ns(point))):
        if not kept or _step_ns(point) < _step_ns(kept[-1]):
            kept.append(point)
    return tuple(reversed(kept))


def _step_ns(point: Certified) -> int:
    return point.measured.footprint.step_ns
