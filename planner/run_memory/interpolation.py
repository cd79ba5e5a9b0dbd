"""Predicts the recording of a step at any length from recordings at a few lengths.

Most numbers in a recording, such as the bytes of a storage, are polynomials in the length. Some kernels round the
length up first: the logsumexp of memory-efficient attention has 32 columns for 1 to 32 tokens. Each number is explained
by the simplest sum of such terms that agrees with all recordings, of which there are at least two more than terms. If
there is none for some number, there is no prediction.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from fractions import Fraction

from planner.estimate.extrapolate import predicted
from planner.recording.step_graph import StepGraph

RECORDINGS = 7
"""Number of recordings from which others are predicted."""
_TERMS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 0), (1, 0)),
    ((0, 0), (1, 0), (2, 0)),
    ((0, 0), (0, 1)),
    ((0, 0), (0, 1), (0, 2)),
    ((0, 0), (1, 0), (0, 1)),
    ((0, 0), (1, 0), (2, 0), (0, 1)),
    ((0, 0), (1, 0), (0, 1), (1, 1)),
    ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1)),
)
"""Sums that are tried, the simplest first. Each term has the exponents of the length and of the rounded length."""
_CHECKS = 2
"""Number of recordings, beyond the number of terms, that a sum must agree with."""
_ROUNDINGS = (8, 16, 32, 64, 128, 256)
"""Multiples to which kernels round lengths up."""


def lengths_to_record(lengths: Sequence[int]) -> list[int]:
    """Returns the lengths whose steps are recorded: all of them if they are few, else some that differ much.

    Among lengths that are near to each other, those are taken whose remainders differ, so that a rounding is noticed.
    """
    ordered = sorted(set(lengths))
    if len(ordered) <= RECORDINGS:
        return ordered
    chosen = {0, len(ordered) - 1}
    for part in range(1, RECORDINGS - 1):
        middle = part * (len(ordered) - 1) // (RECORDINGS - 1)
        near = [index for index in range(max(middle - 1, 0), middle + 2) if index not in chosen]
        remainders = {ordered[index] % max(_ROUNDINGS) for index in chosen}
        chosen.add(max(near, key=lambda index: min(abs(ordered[index] % max(_ROUNDINGS) - r) for r in remainders)))
    return [ordered[index] for index in sorted(chosen)]


def interpolate(recordings: Mapping[int, StepGraph], length: int) -> StepGraph | None:
    """Returns the predicted recording at a length, given recordings by length; None if there is no prediction."""
    lengths = tuple(recordings)

    @functools.cache
    def predict(values: tuple[int, ...]) -> int | None:
        return value_at(lengths, values, length)

    return predicted([recordings[known] for known in lengths], predict)


def value_at(lengths: Sequence[int], values: Sequence[int], length: int) -> int | None:
    """Returns the value at a length of the simplest sum of terms that agrees with all values; None if there is none.

    Args:
        lengths: lengths at which the value is known.
        values: the value at each of them.
        length: the length for which it is asked.
    """
    for terms in _TERMS:
        is_rounded = any(exponent for _, exponent in terms)
        for multiple in _ROUNDINGS if is_rounded else _ROUNDINGS[:1]:
            rows = [[_term(term, x, multiple) for term in terms] for x in lengths]
            found = _solved(rows, values)
            if found is None:
                continue
            value = sum(_term(term, length, multiple) * factor for term, factor in zip(terms, found, strict=True))
            return int(value) if value == int(value) else None
    return None


def _term(exponents: tuple[int, int], length: int, multiple: int) -> int:
    """Returns the value of a term at a length."""
    rounded = -(-length // multiple) * multiple
    return length ** exponents[0] * rounded ** exponents[1]


def _solved(rows: Sequence[Sequence[int]], values: Sequence[int]) -> list[Fraction] | None:
    """Returns the factors of the terms that solve all equations; None if there are none, or too few equations.

    Args:
        rows: values of the terms, for each equation.
        values: the sum that each equation asks for.
    """
    count = len(rows[0])
    if len(rows) < count + _CHECKS:
        return None
    system = [[Fraction(number) for number in (*row, value)] for row, value in zip(rows, values, strict=True)]
    for column in range(count):
        found = next((index for index in range(column, len(system)) if system[index][column]), None)
        if found is None:
            return None  # two terms are the same for these lengths
        pivot = system.pop(found)
        pivot = [number / pivot[column] for number in pivot]
        system.insert(column, pivot)
        for index, row in enumerate(system):
            if index != column and row[column]:
                system[index] = [a - row[column] * b for a, b in zip(row, pivot, strict=True)]
    if any(row[-1] for row in system[count:]):
        return None
    return [row[-1] for row in system[:count]]
