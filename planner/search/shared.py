"""Shared conditions: their truth, which of them are needed, and their units written out.

A shared condition refers to the earlier condition that it contains, and stores only what it adds. So a chain of
conditions takes no more memory than its last condition written out (`problem.SharedCondition`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from planner.search.problem import SharedCondition

Condition = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]
"""The condition of a hold: its `unless` and its `when`."""


def written_out(condition: Condition, number: int | None, shared: Sequence[SharedCondition]) -> Condition:
    """Returns the condition "`condition`, or the shared condition `number`" with all its sets and units."""
    unless, when = set(condition[0]), set(condition[1])
    while number is not None:
        one = shared[number]
        unless.update(one.unless)
        when.update(one.when)
        number = one.before
    return tuple(sorted(unless)), tuple(sorted(when))


def needed(numbers: Iterable[int], shared: Sequence[SharedCondition]) -> dict[int, int]:
    """Returns the conditions with these numbers and those that they contain, each with its place among them."""
    found: set[int] = set()
    for number in numbers:
        at: int | None = number
        while at is not None and at not in found:
            found.add(at)
            at = shared[at].before
    return {number: place for place, number in enumerate(sorted(found))}


class Containing:
    """Passes values on from each condition to the conditions that contain it.

    It takes a logarithmic number of passes: over the conditions 1, 2, 4, 8 ... steps earlier.
    """

    def __init__(self, shared: Sequence[SharedCondition]) -> None:
        none = len(shared)
        earlier = np.array([none if one.before is None else one.before for one in shared] + [none], np.int64)
        self._earlier: list[np.ndarray] = []
        while np.any(earlier != none):
            self._earlier.append(earlier)
            earlier = earlier[earlier]

    def largest(self, values: np.ndarray) -> np.ndarray:
        """Returns, for each condition, the largest of its value and those of all conditions that it contains."""
        largest = np.append(values, np.zeros(1, values.dtype))
        for earlier in self._earlier:
            largest = np.maximum(largest, largest[earlier])
        return largest[:-1]
