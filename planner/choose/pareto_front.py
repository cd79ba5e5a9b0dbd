"""The Pareto front: for every amount of memory, how fast one training step can be.

The chooser is asked for the fastest plan under one budget after another. A plan that promises a peak of `p` is the
answer for every budget from `p` to the budget of its search. For budgets between this plan and the next one the answer
is not known: they form an unknown rectangle of bytes x ratio of step times. The next search is in the middle of the
rectangle with the largest area, until all rectangles are narrow or time runs out (rectangle elimination: Payne and
Polak 1980, IEEE Transactions on Automatic Control 25, 3). So the front is rough early and fine later. Then every plan
is certified, and measured under the smallest budget in which it runs.

Where it is not exact: promises are about tensors, and the allocator's slack may make a chosen plan larger than another
one. A point is always a certified plan, but between two points a better plan may exist. At the user's budget the point
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
"""Width of a flat rectangle, as a fraction of the front's width in bytes, below which it is narrow."""
_STEEPEST = 4
"""Maximum ratio of times by which a steep rectangle may be narrower than a flat one before it is narrow."""
_ALIKE = 1.01
"""Factor between step times below which no plan is searched between two plans."""
_SEARCHING = 0.6
"""Fraction of the time for searching; the rest is for certificates."""
_DESCENDING = 0.3
"""Fraction of the time after which the search for an even smaller plan stops."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Front:
    """Certified plans, from the fastest to the smallest. No plan is both as small and as fast as another."""

    points: tuple[Certified, ...]
    """Plans in order, each measured under the smallest budget in which it runs."""
    complete: bool
    """False if time ran out: other plans may exist between the plans in `points`."""


def front(session: PlanningSession, constraints: Constraints, *, vram_bytes: int | None, seconds: float) -> Front:
    """Returns the front of the plans that the constraints allow, up to the larger of the baseline's total and the
    budget.

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
            "a trade-off does not search frozen prefixes, since each prefix has its own front: do not force freeze"
        )
    began = time.perf_counter()
    until = began + _SEARCHING * seconds
    # The two ends, and the plan at the user's budget: what is asked for later lies between them.
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
    # Rectangle elimination. A plan with less memory is never faster: where promises disagree, the better one counts.
    narrow_bytes = _STEP * (max(peaks, default=0) - min(answers))
    while (asked_bytes := _widest(answers, narrow_bytes)) is not None and time.perf_counter() < until:
        below = answers.get(max((size for size in answers if size < asked_bytes), default=0))
        answers[asked_bytes] = _faster(_fastest(session, constraints, asked_bytes + session.card.context_bytes), below)
    # Certify what the promises found; the ends again, since slack may favor other plans than the promises do.
    points = _certified(session, [choice for choice in answers.values() if choice is not None], constraints)
    if smallest is not None and time.perf_counter() < until:
        points.append(_no_larger(session, constraints, smallest, until=until))
    in_time = time.perf_counter() < until
    if at_budget is not None and session.quick_enough(at_budget, constraints):
        points.append(at_budget)  # it is known to run there; the smallest budgets are rounded up
    return Front(points=_undominated(points), complete=asked_bytes is None and in_time)


def total_bytes(point: Certified) -> int:
    """Total memory of the process, as `nvidia-smi` shows it."""
    return point.measured.footprint.total_bytes


def _fastest(session: PlanningSession, constraints: Constraints, vram_bytes: int) -> Choice | None:
    """The choice with the shortest promised step time under a budget; None if there is none. It is not certified."""
    budgeted = session.with_budget(vram_bytes)
    chooser = budgeted.chooser(budgeted.search_space(constraints), constraints)
    return chooser.fastest(budgeted.budget.allocator_bytes)


def _at_budget(session: PlanningSession, constraints: Constraints, vram_bytes: int) -> Certified | None:
    """Returns the fastest certified plan inside the user's budget; None if none was found."""
    budgeted = session.with_budget(vram_bytes)
    return fitting.best(budgeted, budgeted.search_space(constraints), constraints)


def _smallest(session: PlanningSession, constraints: Constraints, *, until: float) -> Certified | None:
    """The smallest plan without a frozen prefix; None if it is slower than allowed."""
    space = session.with_budget(total_bytes(session.baseline)).search_space(constraints)
    budgeted = session.with_budget(_least_bytes(session, space))
    smallest = fitting.smallest(budgeted, budgeted.search_space(constraints), constraints, until=until)
    if not session.quick_enough(smallest, constraints):
        smallest = _no_larger(session, constraints, smallest)
    return smallest if session.quick_enough(smallest, constraints) else None


def _no_larger(
    session: PlanningSession, constraints: Constraints, plan: Certified, *, until: float = math.inf
) -> Certified:
    """Returns the fastest plan whose total is no larger than that of `plan`.

    The plan with the smallest promise may be much slower than others for which the allocator reserves no more segments.
    """
    if not session.card.allocator:
        return plan
    budgeted = session.with_budget(total_bytes(plan))
    faster = fitting.fastest(budgeted, budgeted.search_space(constraints), constraints, until=until)
    return min((plan, faster or plan), key=_step_ns)


def _least_bytes(session: PlanningSession, space: SearchSpace) -> int:
    """Lower bound of the total of every plan."""
    configs = ((*optimizer, *update) for optimizer, update in itertools.product(space.optimizers, space.updates))
    return min(session.lower_bound_bytes(config) for config in configs) + session.card.context_bytes


def _faster(first: Choice | None, second: Choice | None) -> Choice | None:
    """The faster choice; the first if both take equally long."""
    if first is None or second is None:
        return first or second
    return min(first, second, key=lambda choice: choice.step_ns)


def _widest(answers: dict[int, Choice | None], narrow_bytes: float) -> int | None:
    """Budget in bytes in the middle of the largest unknown rectangle; None if all rectangles are narrow."""
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
    """Certifies each choice, and measures it under the smallest budget in which it runs."""
    wanted = list({choice.decisions: choice for choice in choices}.values())
    certificates = []
    for choice, following in itertools.zip_longest(wanted, wanted[1:]):
        certified = session.certify(choice, then=following)
        certified = session.with_budget(session.smallest_budget_bytes(certified)).certify(choice)
        if session.quick_enough(certified, constraints):
            certificates.append(certified)
    return certificates


def _undominated(points: list[Certified]) -> tuple[Certified, ...]:
    """The points that no other point beats in both memory and time, from the fastest to the smallest."""
    kept: list[Certified] = []
    for point in sorted(points, key=lambda point: (total_bytes(point), _step_ns(point))):
        if not kept or _step_ns(point) < _step_ns(kept[-1]):
            kept.append(point)
    return tuple(reversed(kept))


def _step_ns(point: Certified) -> int:
    return point.measured.footprint.step_ns
