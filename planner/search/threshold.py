"""Finds the first point at which a monotone condition is true, with few evaluations, starting from a guess.

Exponential (galloping) search from the guess, then bisection (Bentley and Yao 1976, "An almost optimal algorithm for
unbounded searching", doi:10.1016/0020-0190(76)90071-5). It takes two evaluations if the guess is right, and about
2 log2(distance) otherwise. The result is exact if the condition is monotone.
"""

from __future__ import annotations

from collections.abc import Callable


def first_true(count: int, holds: Callable[[int], bool], *, guess: int) -> int:
    """Returns the smallest i in 0..count-1 for which `holds(i)` is true, or `count` if there is none.

    Args:
        count: number of points.
        holds: the condition. If it is true for a point, it has to be true for all larger points.
        guess: where to start; any integer.
    """
    if count == 0:
        return 0
    at = min(max(guess, 0), count - 1)
    low, high, step = -1, count, 1  # invariant: false at `low`, true at `high` (the ends count as evaluated)
    # Gallop with doubling steps, towards smaller points if the guess holds and towards larger ones if not.
    if holds(at):
        high = at
        while high > 0 and low < 0 and (at := max(high - step, 0)) >= 0:
            if holds(at):
                high, step = at, 2 * step
            else:
                low = at
    else:
        low = at
        while low < count - 1 and high == count and (at := min(low + step, count - 1)) < count:
            if holds(at):
                high = at
            else:
                low, step = at, 2 * step
    # Bisect what is left.
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high
