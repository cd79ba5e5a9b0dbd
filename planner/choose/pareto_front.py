"""The Pareto front: for every amount of memory, how fast one training step can be.

The chooser is asked for the fastest plan under one budget after another. A plan that promises a peak of `p` is the
answer for every budget from `p` to the budget of its search. For budgets from the next smaller searched budget to `p`
the answer is not known: there is an unknown rectangle, as wide as these budgets (in bytes) and as high as the ratio of
the step times at its two sides. The next search is in the middle of the rectangle with the largest area, until all
rectangles are narrow or time runs out (rectangle elimination: Payne and Polak 1980, IEEE Transactions on Automatic
Control 25, 3). So the front is rough early and fine later.

The smaller the budget, the longer a search takes. So the budgets are first searched down to the smallest plan of one
configuration without micro-batches, which is quickly found, and then down to the smallest plan of all. While the
search goes on, the plans that it has found are certified in other processes, and each of them is measured under the
smallest budget in which it runs.

Where it is not exact: a promise leaves out the allocator's slack, with which a chosen plan may be larger than another
plan. A point is always a certified plan, but between two points a better plan may exist. At the user's budget the point
is the plan of `fitting.best`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math

from planner.choose import fitting
from planner.choose.background_certification import BackgroundCertification
from planner.choose.choice import Certified, Choice
from planner.choose.planning_session import PlanningSession
from planner.errors import DecisionError, PlannerError
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import Role
from planner.progress import TimeIsUp
from planner.space.configurations import Configurations

_STEP = 1 / 12
"""A rectangle is narrow, and not searched, if its width is at most this fraction of the front's width (in bytes).

The fraction is divided by the rectangle's ratio of step times: where times differ more, the front is searched finer.
"""
_STEEPEST = 4
"""Maximum ratio of step times of a rectangle: larger ratios count as this one."""
_ALIKE = 1.01
"""Two plans whose step times have at most this ratio count as equally fast: the smaller one is enough."""
_MOST_UNFINISHED = 3
"""Maximum number of plans that are being certified, or wait for it, when a search under another budget begins."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Front:
    """Certified plans, from the fastest to the smallest: each plan is slower and smaller than the one before it."""

    points: tuple[Certified, ...]
    """The plans in this order, each measured under the smallest budget in which it runs, if there was time for it."""
    complete: bool
    """False if time ran out: faster plans of the same size, and smaller plans, may exist."""


def refuse_forced_freezing(constraints: Constraints) -> None:
    """Raise `DecisionError` if freezing is forced. `front` searches frozen prefixes at the user's budget only."""
    if constraints.force(Role.FREEZING):
        raise DecisionError(
            "the trade-off of memory against time cannot be computed with freeze forced, because each frozen prefix of "
            "the model has a trade-off of its own: do not force freeze"
        )


def front(
    session: PlanningSession,
    constraints: Constraints,
    *,
    vram_bytes: int | None,
    rehearsal_seconds: float = 0.0,
    assembly_seconds: float = 0.0,
) -> Front:
    """Returns the front of the plans that the constraints allow.

    The largest budget that is searched is the baseline's total, or the user's budget if that is larger. The search ends
    when the time of the session's watch is up.

    Args:
        session: a session without a budget.
        vram_bytes: the user's budget, at which a plan is searched too; None if there is none.
        rehearsal_seconds: time in seconds that the rehearsal of the baseline took.
        assembly_seconds: time in seconds that the caller needs to assemble one plan. The search ends early enough for
            all plans; 0 reserves no time.

    Raises:
        TimeIsUp: the time was up before any plan was certified.
    """
    points: list[Certified] = []

    def search() -> bool:
        if session.recordings.is_dropped:  # plans from wrong recordings may recompute a module that must not run twice
            points.clear()
        # The search for the smallest budget of a plan takes about as long as its rehearsal.
        certification = BackgroundCertification(session, 2 * rehearsal_seconds)

        def seconds_to_assemble() -> float:
            plans = len(points) + len(certification.points) + 1  # and the baseline, which is added if the time is up
            return assembly_seconds * plans

        with session.watch.leaving(seconds_to_assemble):
            return _search(session, constraints, vram_bytes, certification, points)

    is_complete = fitting.repeated_if_dropped(session, search)
    if not is_complete:
        points.append(session.baseline)
    kept = _undominated([point for point in points if _is_allowed(session, constraints, point)])
    if not kept and not is_complete:
        raise TimeIsUp
    return Front(points=kept, complete=is_complete)


def _search(
    session: PlanningSession,
    constraints: Constraints,
    vram_bytes: int | None,
    certification: BackgroundCertification,
    points: list[Certified],
) -> bool:
    """Search budgets and certify what is found. Returns True if the time was enough for both.

    Args:
        certification: certifies the plans that are found.
        points: receives the certified plans, also if the time is up.
    """
    is_complete, watch = False, session.watch
    with contextlib.closing(certification), watch.meanwhile(certification.advance):
        try:
            with contextlib.suppress(TimeIsUp), watch.leaving(lambda: certification.needed_seconds):
                _search_budgets(session, constraints, vram_bytes, certification, points)
                is_complete = True
            certification.wait()
        except TimeIsUp:
            is_complete = False
        finally:
            points += certification.points
    return is_complete


def _search_budgets(
    session: PlanningSession,
    constraints: Constraints,
    vram_bytes: int | None,
    certification: BackgroundCertification,
    points: list[Certified],
) -> None:
    """Search the largest budget, the user's budget, and then smaller budgets until the smallest plan is found.

    Args:
        certification: receives the choices that are found.
        points: receives the plans that `fitting.best` and `fitting.smallest` certify.

    Raises:
        TimeIsUp: the time is up.
    """
    answers = _Answers(session, constraints, certification)
    largest_bytes = max(total_bytes(session.baseline), vram_bytes or 0)
    answers.search(session.with_budget(largest_bytes).budget.allocator_bytes)
    if vram_bytes is not None:
        budgeted = session.with_budget(vram_bytes)
        try:
            point = fitting.best(budgeted, budgeted.search_space(constraints), constraints)
        except TimeIsUp:
            points += filter(None, [budgeted.best_known(constraints)])
            raise
        if point is not None:
            points.append(point)
            answers.add(point.choice)
    budgeted = _with_smallest_budget(session, constraints)
    space = budgeted.search_space(constraints)
    # A small plan that is quickly found: with one configuration in the fastest precision, and with the whole batch.
    part = dataclasses.replace(space, precisions=space.precisions[-1:], splits=space.splits[:1])
    least = min(Configurations(part).that_may_recompute(), key=session.lower_bound_bytes, default=None)
    with contextlib.suppress(PlannerError):  # the search in the whole space raises it, unless other plans are possible
        if least is not None:
            answers.add(budgeted.chooser(part.restricted_to(least), constraints).smallest())
    answers.search_between()
    answers.search(min(answers.fastest))  # in the whole space, a faster plan may be as small
    session.watch.stage("searching for the smallest plan")
    answers.add(fitting.choice_with_smallest_promise(budgeted, space, constraints))
    answers.search_between()
    # With slack, the plan with the smallest promise may be neither the smallest nor the fastest one of its size.
    try:
        with session.watch.leaving(lambda: session.seconds_to_measure_smallest):
            smallest = fitting.smallest(budgeted, space, constraints)
    except TimeIsUp:
        with session.watch.after_end():
            points.append(budgeted.smallest_known())
        raise
    points.append(smallest)
    points.append(_no_larger(session, constraints, smallest))
    certification.add(points[-1].choice)


class _Answers:
    """Searches for the fastest plans under several budgets.

    Budgets are the bytes that the allocator may reserve, without the CUDA context. As in promises, fragmentation counts
    as 0.
    """

    def __init__(
        self, session: PlanningSession, constraints: Constraints, certification: BackgroundCertification
    ) -> None:
        """
        Args:
            certification: certifies the plans that are found.
        """
        self._session, self._constraints, self._certification = session, constraints, certification
        self.fastest: dict[int, Choice | None] = {}
        """By budget in bytes, the fastest choice so far; None if no allowed plan is known to fit."""

    def search(self, budget_bytes: int) -> None:
        """Search for the fastest plan under a budget in bytes."""
        session, constraints = self._session, self._constraints
        session.watch.check()
        self._certification.wait(_MOST_UNFINISHED)
        session.watch.stage(f"searching for plans under other budgets, {len(self.fastest)} searched")
        budgeted = session.with_budget(budget_bytes + session.card.outside_bytes)
        chooser = budgeted.chooser(budgeted.search_space(constraints), constraints)
        # More memory is never slower: the answer for a smaller budget counts here, unless a faster plan is found.
        smaller = [choice for choice in self.fastest.values() if choice and choice.peak_bytes <= budget_bytes]
        known = min(smaller, key=lambda choice: choice.step_ns, default=None)
        faster = chooser.fastest(budget_bytes, below_ns=known.step_ns / _ALIKE if known else math.inf)
        self.fastest[budget_bytes] = answer = faster or known
        self._certification.add(answer)

    def add(self, choice: Choice) -> None:
        """Add a choice as the answer for a budget of its promised peak.

        The answer is None if the choice is slower than the constraints allow, or if it is the baseline and a technique
        is forced.
        """
        slowest_ns = self._session.slowest_ns(self._constraints)
        is_allowed = choice.step_ns <= slowest_ns and (choice.decisions or not self._constraints.forced)
        self.fastest[choice.peak_bytes] = answer = choice if is_allowed else None
        self._certification.add(answer)

    def search_between(self) -> None:
        """Search under budgets between the known ones until all unknown rectangles are narrow."""
        peaks = [choice.peak_bytes for choice in self.fastest.values() if choice is not None]
        narrow_bytes = _STEP * (max(peaks, default=0) - min(self.fastest))
        while (budget_bytes := _widest(self.fastest, narrow_bytes)) is not None:
            self.search(budget_bytes)


def total_bytes(point: Certified) -> int:
    """Returns the total memory of the plan's process in bytes, as `nvidia-smi` shows it."""
    return point.measured.footprint.total_bytes


def _is_allowed(session: PlanningSession, constraints: Constraints, plan: Certified) -> bool:
    """True if a plan is not slower than the constraints allow, and not the baseline although a technique is forced."""
    return session.quick_enough(plan, constraints) and bool(plan.choice.decisions or not constraints.forced)


def _no_larger(session: PlanningSession, constraints: Constraints, plan: Certified) -> Certified:
    """Returns the fastest plan that was found among plans that are no larger than `plan`.

    The plan with the smallest promise may be much slower than a plan for which the allocator reserves as much memory.
    """
    if not session.card.allocator:
        return plan
    budgeted = session.with_budget(total_bytes(plan))
    faster = fitting.fastest(budgeted, budgeted.search_space(constraints), constraints)
    return min((plan, faster or plan), key=_step_ns)


def _with_smallest_budget(session: PlanningSession, constraints: Constraints) -> PlanningSession:
    """Returns a session whose budget is a lower bound on the total of every plan."""
    space = session.with_budget(total_bytes(session.baseline)).search_space(constraints)
    configs = ((*optimizer, *update) for optimizer, update in itertools.product(space.optimizers, space.updates))
    least_bytes = min(session.lower_bound_bytes(config) for config in configs)
    return session.with_budget(least_bytes + session.card.context_bytes)


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


def _undominated(points: list[Certified]) -> tuple[Certified, ...]:
    """Returns the points to which no other point is equal or better in both memory and time, the fastest first."""
    kept: list[Certified] = []
    for point in sorted(points, key=lambda point: (total_bytes(point), _step_ns(point))):
        if not kept or _step_ns(point) < _step_ns(kept[-1]):
            kept.append(point)
    return tuple(reversed(kept))


def _step_ns(point: Certified) -> int:
    return point.measured.footprint.step_ns
