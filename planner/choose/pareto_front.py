"""The front: for every amount of memory, how fast one training step can be.

The search is asked for the fastest plan under one budget after the other. A plan that promises a peak of `p` answers
every budget from `p` to the one it was asked for; what lies between that and the next plan is unknown. The unknown
rectangle (bytes x ratio of times) with the largest area is asked in its middle, until all are narrow or time runs out
(rectangle elimination: Payne and Polak 1980, IEEE Transactions on Automatic Control 25, 3). So the front is rough early
and fine later. Then every plan is rehearsed, and measured under the smallest total in which it gets through.

Promises are of tensors; the allocator's slack may make a plan that was chosen larger than another one. So a point is
always a certified plan, but between two points a better one may exist. At the budget given it is the plan of
`fitting.best`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time

from planner.choose import fitting
from planner.choose.chooser import Choice
from planner.choose.planning_session import Certified, PlanningSession
from planner.errors import DecisionError
from planner.plan_types.constraints import Constraints
from planner.plan_types.decisions import Freeze
from planner.space.outer_choices import SearchSpace

_STEP = 1 / 12
"""Share of the front's width in bytes below which it is not looked at more closely, where it is flat."""
_STEEPEST = 4
"""Where times differ by this factor or more, it is looked at so many times as closely."""
_ALIKE = 1.01
"""Between plans whose times are closer than this factor nothing is looked for."""
_SEARCHING = 0.6
"""Share of the time for searching; the rest is for rehearsals."""
_DESCENDING = 0.3
"""Share of the time after which the smallest end is left as it is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Front:
    """Certified plans of which none is both as small and as fast as another, from the fastest to the smallest."""

    points: tuple[Certified, ...]
    """Each measured under the smallest total in which it gets through."""
    complete: bool
    """False: time ran out, and plans between these points may be missing."""


def front(session: PlanningSession, constraints: Constraints, *, vram_bytes: int | None, seconds: float) -> Front:
    """The front of what the rules allow, in totals up to that of the step as it is, or the budget if that is more.

    Args:
        trials: without a budget.
        vram_bytes: a budget at which to ask too.
        seconds: after about so many no more questions are asked; the ends and the budget always are.

    Raises:
        DecisionError: freezing is forced. Frozen prefixes are looked for at the budget alone, as a last resort.
    """
    if constraints.force(Freeze):
        raise DecisionError("a trade-off asks for many plans, and each frozen prefix makes others: do not force freeze")
    began = time.perf_counter()
    until = began + _SEARCHING * seconds
    largest_bytes = max(total_bytes(session.baseline), vram_bytes or 0)
    answers = {session.under(largest_bytes).budget_bytes: _fastest(session, constraints, largest_bytes)}
    at_budget = None if vram_bytes is None else _at_budget(session, constraints, vram_bytes)
    smallest = _smallest(session, constraints, until=began + _DESCENDING * seconds)
    if smallest is None:
        answers[0] = None
    for known in (at_budget, smallest):
        if known is not None:
            answers[known.choice.peak_bytes] = known.choice
    peaks = [choice.peak_bytes for choice in answers.values() if choice is not None]
    narrow_bytes = _STEP * (max(peaks, default=0) - min(answers))
    while (asked_bytes := _widest(answers, narrow_bytes)) is not None and time.perf_counter() < until:
        below = answers.get(max((size for size in answers if size < asked_bytes), default=0))
        answers[asked_bytes] = _quicker(_fastest(session, constraints, asked_bytes + session.card.context_bytes), below)
    points = _certified(session, [choice for choice in answers.values() if choice is not None], constraints)
    if smallest is not None and time.perf_counter() < until:
        points.append(_no_larger(session, constraints, smallest, until=until))
    in_time = time.perf_counter() < until
    if at_budget is not None and session.quick_enough(at_budget, constraints):
        points.append(at_budget)  # it is known to get through there; the smallest totals are rounded up
    return Front(points=_undominated(points), complete=asked_bytes is None and in_time)


def total_bytes(point: Certified) -> int:
    """What `nvidia-smi` shows for the process."""
    return point.measured.footprint.total_bytes


def _fastest(session: PlanningSession, constraints: Constraints, vram_bytes: int) -> Choice | None:
    """By promise alone."""
    under = session.under(vram_bytes)
    return under.chooser(under.offer(constraints), constraints).fastest(vram_bytes - session.card.context_bytes)


def _at_budget(session: PlanningSession, constraints: Constraints, vram_bytes: int) -> Certified | None:
    under = session.under(vram_bytes)
    return fitting.best(under, under.offer(constraints), constraints)


def _smallest(session: PlanningSession, constraints: Constraints, *, until: float) -> Certified | None:
    """The smallest plan, frozen prefixes apart; None if it is slower than allowed."""
    under = session.under(_least_bytes(session, session.under(total_bytes(session.baseline)).offer(constraints)))
    found = fitting.smallest(under, under.offer(constraints), constraints, until=until)
    if not session.quick_enough(found, constraints):
        found = _no_larger(session, constraints, found)
    return found if session.quick_enough(found, constraints) else None


def _no_larger(
    session: PlanningSession, constraints: Constraints, found: Certified, *, until: float = math.inf
) -> Certified:
    """The fastest in the total of this one.

    The smallest promise may be much slower than others that the allocator gives as many segments.
    """
    if not session.card.allocator:
        return found
    under = session.under(total_bytes(found))
    quicker = fitting.fastest(under, under.offer(constraints), constraints, until=until)
    return min((found, quicker or found), key=_step_ns)


def _least_bytes(session: PlanningSession, offered: SearchSpace) -> int:
    """A total that no plan goes below."""
    outers = ((*optimizer, *update) for optimizer, update in itertools.product(offered.optimizers, offered.updates))
    return min(session.lower_bound_bytes(outer) for outer in outers) + session.card.context_bytes


def _quicker(one: Choice | None, other: Choice | None) -> Choice | None:
    """At equal times the first."""
    if one is None or other is None:
        return one or other
    return min(one, other, key=lambda choice: choice.step_ns)


def _widest(answers: dict[int, Choice | None], narrow_bytes: float) -> int | None:
    """The middle of the largest unknown rectangle; None if all are narrow."""
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
    """Each choice rehearsed, and measured under the smallest total in which it gets through."""
    wanted = list({choice.decisions: choice for choice in choices}.values())
    found = []
    for choice, following in itertools.zip_longest(wanted, wanted[1:]):
        certified = session.certify(choice, then=following)
        certified = session.under(session.smallest_budget_bytes(certified)).certify(choice)
        if session.quick_enough(certified, constraints):
            found.append(certified)
    return found


def _undominated(points: list[Certified]) -> tuple[Certified, ...]:
    kept: list[Certified] = []
    for point in sorted(points, key=lambda point: (total_bytes(point), _step_ns(point))):
        if not kept or _step_ns(point) < _step_ns(kept[-1]):
            kept.append(point)
    return tuple(reversed(kept))


def _step_ns(point: Certified) -> int:
    return point.measured.footprint.step_ns
