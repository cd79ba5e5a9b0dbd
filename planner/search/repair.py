"""A greedy heuristic that looks for a selection within the budget, for when a proof takes too long.

This is a local search with a list of visited selections. It starts from a selection and looks at the highest point of
its curve (an event or a recompute). For the most promising units that would free bytes there, it evaluates exactly the
selection with that unit and without the units that exclude it. It moves to the selection with the lowest peak, even if
that is no improvement. It stops when the peak fits, or after a number of moves. It proves nothing if no selection fits.
"""

from __future__ import annotations

import time
from collections.abc import Collection

import numpy as np

from planner.search.curve import CompiledProblem
from planner.search.presolve import ReducedProblem

_TRIED_PER_MOVE = 6
"""Maximum number of neighbors of the current selection that are evaluated; the best of them is the next one."""

_MOST_CONDITIONS = 2000
"""Maximum number of conditions that are looked at for a move. Those with the most bytes come first."""

_SECONDS = 3.0
"""Maximum time of a search. A move of a model with a thousand layers can take longer than this."""


def descend(
    compiled: CompiledProblem, reduced: ReducedProblem, units: Collection[int], budget_bytes: int, *, moves: int = 100
) -> tuple[int, ...]:
    """Returns the selection with the lowest peak that the search finds. The search stops when a selection fits.

    Args:
        compiled: `reduced.problem`, compiled.
        reduced: the problem. It lacks bytes at events below its floor, so peaks below the floor are not exact.
        units: the selection to start from.
        budget_bytes: the largest peak that fits.
        moves: maximum number of moves.
    """
    cost_ns = reduced.problem.cost_ns

    def rank(option: frozenset[int]) -> tuple[int, int, list[int]]:
        """Returns a sort key: lowest peak first, then lowest cost; the list of units makes the order unique."""
        return compiled.peak(option), sum(cost_ns[unit] for unit in option), sorted(option)

    current = lowest = frozenset(units)
    seen = {current}
    deadline = time.monotonic() + _SECONDS
    for _ in range(moves):
        if compiled.peak(lowest) <= budget_bytes or time.monotonic() > deadline:
            break
        options = [move for move in _moves(compiled, reduced, current) if move not in seen][:_TRIED_PER_MOVE]
        if not options:
            break
        current = min(options, key=rank)
        lowest = min(lowest, current, key=rank)
        seen.add(current)
    return tuple(sorted(lowest))


def _moves(compiled: CompiledProblem, reduced: ReducedProblem, current: frozenset[int]) -> list[frozenset[int]]:
    """Returns the neighbors of `current`: selections that differ in one unit and in the units that exclude it.

    Those that free the most bytes at the highest point of the curve, per nanosecond of recompute, come first.
    """
    # The highest point. If it is a recompute, not recomputing that unit is the first neighbour.
    curve = compiled.curve(current)
    event = int(curve.argmax())
    moves: list[frozenset[int]] = []
    peaks = compiled.recompute_peaks(current, curve)
    if peaks.size and int(peaks.max()) > int(curve[event]):
        highest = int(peaks.argmax())
        event = int(compiled.recompute_at[highest])
        moves.append(current - {int(compiled.recompute_unit[highest])})
    # Bytes that each unit would free or add there, conditions being taken one at a time.
    held_bytes = compiled.condition_bytes(event)
    freed_bytes = np.zeros(compiled.unit_count, np.int64)
    heaviest = np.argsort(-held_bytes, kind="stable")[:_MOST_CONDITIONS]
    for number in heaviest[held_bytes[heaviest] > 0].tolist():
        unless, when = compiled.written_out(number)
        for members in unless:
            if not current.intersection(members):
                freed_bytes[list(members)] += held_bytes[number]
        for unit in when:
            freed_bytes[unit] -= held_bytes[number] if not current.intersection(when) else 0
    ratio = freed_bytes / (np.array(reduced.problem.cost_ns) + 1.0)
    order = np.lexsort((np.arange(len(ratio)), -ratio))
    for unit in order[freed_bytes[order] > 0].tolist():
        moves.append((current - reduced.exclusive[unit]) | {unit})
        if len(moves) >= 4 * _TRIED_PER_MOVE:
            break
    return moves
