"""Where a condition that is false up to some point becomes true, when asking costs much and a guess is at hand.

Galloping from the guess, then bisection (Bentley and Yao 1976, doi:10.1016/0020-0190(76)90071-5): two questions if the
guess is right, about 2 log2(distance) otherwise.
"""

from __future__ import annotations

from collections.abc import Callable


def first_true(count: int, holds: Callable[[int], bool], *, guess: int) -> int:
    """Smallest i in 0..count-1 with `holds(i)`; `count` if there is none. Where it holds it must hold from there on."""
    if count == 0:
        return 0
    at = min(max(guess, 0), count - 1)
    low, high, step = -1, count, 1  # false at low, true at high, as far as is known
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
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high
