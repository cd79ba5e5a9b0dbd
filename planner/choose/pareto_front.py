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

import contextlib
import dataclasses
import itertools

from planner.choose import fitting
from planner.choose.choice import Choice
from planner.choose.planning_session import Certified, PlanningSession
from planner.errors import DecisionError
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import Role
from planner.progress import TimeIsUp
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


@dataclasses.dataclass(kw_only=True)
class _Found:
    """The plans that the search for the front has found so far."""

    answers: dict[int, Choice | None] = dataclasses.field(default_factory=dict)
    """By searched budget in bytes of tensors, the fastest choice; None if no plan fits."""
    points: list[Certified] = dataclasses.field(default_factory=list)
    """Certified plans, each measured under a budget in which it runs."""

    def add(self, point: Certified | None) -> None:
        """Add a certified plan, which is also the answer for the budget of its own size."""
        if point is not None:
            self.points.append(point)
            self.answers[point.choice.peak_bytes] = point.choice


def front(session: PlanningSession, constraints: Constraints, *, vram_bytes: int | None) -> Front:
    """Returns the front of the plans that the constraints allow.

    The largest budget that is searched is the baseline's total, or the user's budget if that is larger. The search ends
    when the time of the session's watch is up.

    Args:
        session: a session without a budget.
        vram_bytes: the user's budget, at which a plan is searched too; None if there is none.

    Raises:
        DecisionError: freezing is forced. Frozen prefixes are searched at the user's budget only, as a last resort.
        TimeIsUp: the time was up before any plan was certified.
    """
    if constraints.force(Role.FREEZING):
        raise DecisionError(
            "the trade-off of memory against time cannot be computed with freeze forced, because each frozen prefix of "
            "the model has a trade-off of its own: do not force freeze"
        )
    total_bytes(session.baseline)  # recorded before the time for the search is shared out
    found = _Found()
    is_complete = fitting.repeated_if_dropped(session, lambda: _search(session, constraints, vram_bytes, found))
    if not is_complete and not constraints.forced:
        found.points.append(session.baseline)
    points = _undominated([point for point in found.points if session.quick_enough(point, constraints)])
    if not points and not is_complete:
        raise TimeIsUp
    return Front(points=points, complete=is_complete)


def _search(session: PlanningSession, constraints: Constraints, vram_bytes: int | None, found: _Found) -> bool:
    """Search budgets and certify what was found. Returns True if the time was enough for both."""
    found.answers.clear()
    is_complete, seconds = False, session.watch.left_seconds
    with contextlib.suppress(TimeIsUp), session.watch.at_most(_SEARCHING * seconds):
        is_complete = _search_budgets(session, constraints, vram_bytes, found, _DESCENDING * seconds)
    try:
        _certify(session, found)
    except TimeIsUp:
        return False
    return is_complete


def _search_budgets(
    session: PlanningSession, constraints: Constraints, vram_bytes: int | None, found: _Found, descending: float
) -> bool:
    """Search the two ends of the front, the user's budget, and then budgets between the two ends.

    Args:
        found: receives the plans, also if the time is up.
        descending: time in seconds after which the smallest plan found so far is accepted.

    Returns:
        True if no budget is left to search.
    """
    largest_bytes = max(total_bytes(session.baseline), vram_bytes or 0)
    answers = found.answers
    answers[session.with_budget(largest_bytes).budget.tensor_bytes] = _fastest(session, constraints, largest_bytes)
    if vram_bytes is not None:
        budgeted = session.with_budget(vram_bytes)
        try:
            found.add(fitting.best(budgeted, budgeted.search_space(constraints), constraints))
        except TimeIsUp:
            found.add(budgeted.best_known(constraints))
            raise
    smallest, is_smallest = _smallest(session, constraints, seconds=descending)
    if smallest is None or not is_smallest:
        answers[0] = None  # smaller budgets are searched, too
    found.add(smallest)
    # Rectangle elimination. More memory is never slower: if the answer for a smaller budget is faster, it counts here.
    peaks = [choice.peak_bytes for choice in answers.values() if choice is not None]
    narrow_bytes = _STEP * (max(peaks, default=0) - min(answers))
    while (asked_bytes := _widest(answers, narrow_bytes)) is not None:
        session.watch.check()
        session.watch.stage(f"searching between budgets, {len(answers)} searched")
        below = answers.get(max((size for size in answers if size < asked_bytes), default=0))
        answers[asked_bytes] = _faster(_fastest(session, constraints, asked_bytes + session.card.context_bytes), below)
    # Search the smallest total again: with slack, another plan may be the fastest there.
    if smallest is not None:
        found.points.append(_no_larger(session, constraints, smallest))
    return is_smallest


def total_bytes(point: Certified) -> int:
    """Returns the total memory of the plan's process in bytes, as `nvidia-smi` shows it."""
    return point.measured.footprint.total_bytes


def _fastest(session: PlanningSession, constraints: Constraints, vram_bytes: int) -> Choice | None:
    """Returns the choice that promises the shortest step time under a budget; None if no promise fits."""
    budgeted = session.with_budget(vram_bytes)
    chooser = budgeted.chooser(budgeted.search_space(constraints), constraints)
    return chooser.fastest(budgeted.budget.allocator_bytes)


def _smallest(session: PlanningSession, constraints: Constraints, *, seconds: float) -> tuple[Certified | None, bool]:
    """Returns the smallest plan without a frozen prefix, and False if the search for it took longer than `seconds`.

    If it is slower than the constraints allow, a faster plan that is no larger is tried first. The plan is None if it
    is too slow, too, or if none was certified in time.
    """
    space = session.with_budget(total_bytes(session.baseline)).search_space(constraints)
    budgeted = session.with_budget(_least_bytes(session, space))
    is_smallest = True
    try:
        with session.watch.at_most(seconds):
            smallest = fitting.smallest(budgeted, budgeted.search_space(constraints), constraints)
    except TimeIsUp:
        smallest, is_smallest = budgeted.smallest_known(), False
    if not session.quick_enough(smallest, constraints):
        smallest = _no_larger(session, constraints, smallest)
    is_allowed = bool(smallest.choice.decisions) or not constraints.forced
    return smallest if is_allowed and session.quick_enough(smallest, constraints) else None, is_smallest


def _no_larger(session: PlanningSession, constraints: Constraints, plan: Certified) -> Certified:
    """Returns the fastest plan that was found among plans that are no larger than `plan`.

    The plan with the smallest promise may be much slower than a plan for which the allocator reserves as much memory.
    """
    if not session.card.allocator:
        return plan
    budgeted = session.with_budget(total_bytes(plan))
    faster = fitting.fastest(budgeted, budgeted.search_space(constraints), constraints)
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


def _certify(session: PlanningSession, found: _Found) -> None:
    """Certifies the choices, each under the smallest budget in which it runs, and adds them to the points."""
    wanted = list({choice.decisions: choice for choice in found.answers.values() if choice is not None}.values())
    for number, (choice, following) in enumerate(itertools.zip_longest(wanted, wanted[1:])):
        session.watch.stage(f"certifying plan {number + 1} of {len(wanted)}")
        certified = fitting.certify(session, choice, then=following)
        fitting.check_recordings(session, certified)
        certified = session.with_budget(session.smallest_budget_bytes(certified)).certify(choice)
        found.points.append(certified)


def _undominated(points: list[Certified]) -> tuple[Certified, ...]:
    """Returns the points to which no other point is equal or better in both memory and time, the fastest first."""
    kept: list[Certified] = []
    for point in sorted(points, key=lambda point: (total_bytes(point), _step_ns(point))):
        if not kept or _step_ns(point) < _step_ns(kept[-1]):
            kept.append(point)
    return tuple(reversed(kept))


def _step_ns(point: Certified) -> int:
    return point.measured.footprint.step_ns
