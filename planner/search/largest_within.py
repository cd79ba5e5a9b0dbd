"""Finds the largest number of samples whose memory is within a limit, with few calls of a slow function."""

from __future__ import annotations

from collections.abc import Callable, Iterable

_EXACT_TO = 64
"""The answer is exact below twice this number of samples. Above it, the relative error is at most 1/64."""


def largest_within(
    smallest_budget_bytes: Callable[[int], int], *, limit_bytes: int, least: int = 1, first: Iterable[int], most: int
) -> tuple[int, int]:
    """Finds the largest number of samples whose smallest budget is within a limit.

    This is an interpolation search (regula falsi): bytes are nearly affine in the number of samples. So the next number
    is where the line through the two known points nearest to the limit reaches the limit; after two answers on the same
    side of the limit, it is the middle of the interval. As long as no number is known to exceed the limit, the minimum
    step doubles with each number that is within it. Without this, the search would go on in steps of one where many
    numbers need the same bytes.

    Args:
        smallest_budget_bytes: function that takes a number of samples and returns the bytes that it needs. The result
            is right only if a larger number never needs fewer bytes.
        limit_bytes: the limit.
        least: the smallest number to try.
        first: other numbers to try at the beginning, at least one.
        most: the largest number to try.

    Returns:
        A number within the limit, and a larger number that is not. They differ by 1 below twice `_EXACT_TO`, and by at
        most 1/64 above. The result is (least - 1, least) if no number is within the limit, and (most, most + 1) if all
        are.
    """
    known = {number: smallest_budget_bytes(number) for number in (least, *first)}
    sides: list[bool] = []
    while True:
        low = max((number for number, need in known.items() if need <= limit_bytes), default=least - 1)
        too_many = (number for number, need in known.items() if need > limit_bytes and number > low)
        high = min(too_many, default=most + 1)
        if high - low <= max(1, low // _EXACT_TO):
            return low, high
        nearest, second = sorted(known, key=lambda number: abs(known[number] - limit_bytes))[:2]
        if high > most and (known[nearest] - known[second]) * (nearest - second) <= 0:
            # The bytes do not grow between these two numbers: take the two ends instead.
            nearest, second = max(known), min(known)
        slope = (known[nearest] - known[second]) / (nearest - second)
        if slope <= 0 or (len(sides) > 1 and sides[-1] == sides[-2] and high <= most):
            guess = (low + high) // 2 if high <= most else 2 * low  # allocator segments make steps
        else:
            guess = nearest + int((limit_bytes - known[nearest]) // slope)
        if high > most:  # no number is known to exceed the limit
            successes = next((number for number, fits in enumerate(reversed(sides)) if not fits), len(sides))
            guess = max(guess, low + (max(1, low // _EXACT_TO) << successes))
        asked = min(max(guess, low + 1), high - 1)
        known[asked] = smallest_budget_bytes(asked)
        sides.append(known[asked] <= limit_bytes)
