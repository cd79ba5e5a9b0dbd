"""Brute force: tries every selection of a tiny problem, directly from the definitions in `problem`.

The bytes of a hold h are alive under a selection X of units if

    any(S and X have no unit in common, for S in unless_h)  or  any(u in X, for u in when_h)

or if this is true of a shared condition that h contains.

This module shares no code with `curve` and `milp`, uses only loops, and takes 2^units evaluations. The search is tested
against it, and it is the shortest definition of what the search computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator

from planner.search.problem import CheckpointProblem, Hold, Selection


def solve(problem: CheckpointProblem, budget_bytes: int) -> Selection | None:
    """Returns the cheapest selection whose peak fits the budget; None if none fits.

    Of equally cheap selections, it is one with the fewest units.
    """
    fitting = [s for s in every_selection(problem) if s.peak_bytes <= budget_bytes]
    return min(fitting, key=lambda s: (s.cost_ns, len(s.units), s.units), default=None)


def smallest_peak(problem: CheckpointProblem) -> Selection:
    """Returns the selection with the smallest peak; among equal peaks the cheapest, then the one with fewest units."""
    return min(every_selection(problem), key=lambda s: (s.peak_bytes, s.cost_ns, len(s.units), s.units))


def every_selection(problem: CheckpointProblem) -> Iterator[Selection]:
    """Yields all selections with at most one unit of each path, the empty selection first."""
    every_unit = range(len(problem.cost_ns))
    for count in range(len(problem.cost_ns) + 1):
        for units in itertools.combinations(every_unit, count):
            if all(len(set(path) & set(units)) <= 1 for path in problem.paths):
                yield Selection(
                    units=units,
                    peak_bytes=peak(problem, units),
                    cost_ns=sum(problem.cost_ns[unit] for unit in units),
                    status="optimal",
                    gap=0.0,
                    seconds=0.0,
                )


def curve(problem: CheckpointProblem, units: Collection[int]) -> list[int]:
    """Returns the bytes alive at each event when `units` are selected, without the extra bytes of recomputes."""
    return [
        int(fixed_bytes)
        + sum(
            hold.size_bytes for hold in problem.holds if hold.start <= event < hold.stop and alive(problem, hold, units)
        )
        for event, fixed_bytes in enumerate(problem.fixed_bytes)
    ]


def alive(problem: CheckpointProblem, hold: Hold, units: Collection[int]) -> bool:
    """True if the condition of `hold` is true when `units` are selected."""
    if _is_true(hold.unless, hold.when, units):
        return True
    shared = hold.shared
    while shared is not None:
        condition = problem.shared[shared]
        if _is_true(condition.unless, condition.when, units):
            return True
        shared = condition.before
    return False


def _is_true(unless: tuple[tuple[int, ...], ...], when: tuple[int, ...], units: Collection[int]) -> bool:
    for members in unless:
        if not any(unit in units for unit in members):
            return True
    return any(unit in units for unit in when)


def peak(problem: CheckpointProblem, units: Collection[int]) -> int:
    """Returns the largest value of the curve, including the extra bytes of the recomputes of selected units."""
    alive_bytes = curve(problem, units)
    largest_bytes = 0
    for bytes_here in alive_bytes:
        largest_bytes = max(largest_bytes, bytes_here)
    for recompute in problem.recomputes:
        if recompute.unit in units:
            largest_bytes = max(largest_bytes, alive_bytes[recompute.at] + recompute.extra_bytes)
    return largest_bytes
