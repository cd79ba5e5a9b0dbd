"""Predicts the recording of a step for a batch of any shape from recordings for a few shapes.

Most numbers in a recording, such as the bytes of a storage, are polynomials in the samples and the length of the batch.
Some kernels round the length up first: the logsumexp of memory-efficient attention has 32 columns for 1 to 32 tokens.
Each number is explained by the simplest sum of such terms that agrees with all recordings, of which there are at least
two more than terms. If there is none for some number, there is no prediction.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from planner.derive.extrapolate import BASE_SIZES, predicted
from planner.recording.step_graph import StepGraph
from planner.run_memory.batches import BatchShape

RECORDINGS = 7
"""Number of recordings from which others with the same number of samples are predicted."""
_OTHER_RECORDINGS = 4
"""Number of further recordings, with other numbers of samples, from which steps with any number are predicted."""


class _Term(NamedTuple):
    """Exponents of the numbers whose product is one term of a sum."""

    samples: int
    length: int
    rounded: int
    """Exponent of the length that is rounded up to a multiple."""


_BY_LENGTH = (
    ((0, 0), (1, 0)),
    ((0, 0), (1, 0), (2, 0)),
    ((0, 0), (0, 1)),
    ((0, 0), (0, 1), (0, 2)),
    ((0, 0), (1, 0), (0, 1)),
    ((0, 0), (1, 0), (2, 0), (0, 1)),
    ((0, 0), (1, 0), (0, 1), (1, 1)),
    ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1)),
)
"""Sums that are tried if all batches have as many samples, the simplest first: exponents of the length and of the
rounded length."""
_CHECKS = 2
"""Number of recordings, beyond the number of terms, that a sum must agree with."""
_MOST_TERMS = 5
_MOST_SHARED = 2
"""Maximum number of terms that a sum has both with and without the number of samples."""
_ROUNDINGS = (8, 16, 32, 64, 128, 256)
"""Multiples to which kernels round lengths up."""


def _sums_by_samples() -> list[tuple[_Term, ...]]:
    """Returns the sums that are tried if the number of samples differs, the simplest first."""
    monomials = ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1))
    parts = [part for size in range(4) for part in itertools.combinations(monomials, size)]
    sums = [
        (*(_Term(0, *powers) for powers in fixed), *(_Term(1, *powers) for powers in scaled))
        for fixed, scaled in itertools.product(parts, parts)
        if 0 < len(fixed) + len(scaled) <= _MOST_TERMS and len(set(fixed) & set(scaled)) <= _MOST_SHARED
    ]
    return sorted(sums, key=lambda terms: (len(terms), sum(map(sum, terms))))


_SUMS_BY_LENGTH = [tuple(_Term(0, *powers) for powers in terms) for terms in _BY_LENGTH]
_SUMS_BY_SAMPLES = _sums_by_samples()


def shapes_to_record(
    shapes: Collection[BatchShape], recorded: Collection[BatchShape] = (), parts: int = 1
) -> list[BatchShape]:
    """Returns the shapes whose steps are recorded: all of them if they are few, else some that differ much.

    Args:
        shapes: the shapes that are asked for.
        recorded: shapes that have been recorded.
        parts: number of micro-batches.
    """
    chosen: list[BatchShape] = []
    for is_single in (False, True):
        known = Counter(shape.samples for shape in recorded if _is_single(shape, parts) is is_single)
        by_samples: dict[int, list[BatchShape]] = {}
        for shape in sorted(set(shapes)):
            if _is_single(shape, parts) is is_single and known[shape.samples] < RECORDINGS:
                by_samples.setdefault(shape.samples, []).append(shape)
        if by_samples and known.total() < RECORDINGS:
            usual = max(by_samples, key=lambda samples: (len(by_samples[samples]), samples))
            spread = _spread(by_samples.pop(usual), RECORDINGS)
            chosen += spread
            known[usual] += len(spread)
        rest = [shape for same in by_samples.values() for shape in same]
        chosen += _spread(rest, max(RECORDINGS - known.total(), 0) + _OTHER_RECORDINGS)
    return chosen


def _is_single(shape: BatchShape, parts: int) -> bool:
    """True if a micro-batch has one sample. PyTorch runs other ops then: it returns views where it copies otherwise."""
    return shape.samples < BASE_SIZES[0] * parts


def _spread(shapes: Sequence[BatchShape], count: int) -> list[BatchShape]:
    """Returns shapes from the shortest to the longest.

    Among lengths that are near to each other, those are taken whose remainders differ, so that a rounding is noticed.
    """
    ordered = sorted(shapes, key=lambda shape: (shape.length, shape.samples))
    if len(ordered) <= count:
        return ordered
    chosen = {0, len(ordered) - 1}
    for part in range(1, count - 1):
        middle = part * (len(ordered) - 1) // (count - 1)
        near = [index for index in range(max(middle - 1, 0), middle + 2) if index not in chosen]
        remainders = {ordered[index].length % max(_ROUNDINGS) for index in chosen}
        chosen.add(
            max(near, key=lambda index: min(abs(ordered[index].length % max(_ROUNDINGS) - r) for r in remainders))
        )
    return [ordered[index] for index in sorted(chosen)]


class Interpolation:
    """Predicts the recordings and the bytes of batches of all shapes from those of some.

    Args:
        recordings: the recording of each known shape.
        batch_bytes: bytes of the batch of each known shape.
        parts: number of micro-batches.
    """

    def __init__(
        self, recordings: Mapping[BatchShape, StepGraph], batch_bytes: Mapping[BatchShape, int], parts: int = 1
    ) -> None:
        self._recordings, self._batch_bytes, self._parts = recordings, batch_bytes, parts
        self._formulas = functools.cache(Formulas)

    def at(self, shape: BatchShape) -> tuple[StepGraph, int] | None:
        """Returns the predicted recording for a shape, and the bytes of its batch; None if there is no prediction."""
        is_single = _is_single(shape, self._parts)
        known = [other for other in self._recordings if _is_single(other, self._parts) is is_single]
        same = [other for other in known if other.samples == shape.samples]
        known = same if len(same) >= RECORDINGS else known
        if not known:
            return None
        formulas = self._formulas(tuple(known))

        def predict(values: tuple[int, ...]) -> int | None:
            return formulas.value_at(values, shape)

        graphs = [self._recordings[other] for other in known]
        graph, batch_bytes = predicted(graphs, predict), predict(tuple(self._batch_bytes[other] for other in known))
        sizes = [predict(values) for values in zip(*(other.micro_batch_sizes for other in graphs), strict=False)]
        if graph is None or batch_bytes is None or None in sizes or len(sizes) != len(graph.micro_batch_sizes):
            return None
        return dataclasses.replace(graph, micro_batch_sizes=tuple(size for size in sizes if size)), batch_bytes


class Formulas:
    """Sums that explain numbers which are known for batches of some shapes."""

    def __init__(self, shapes: tuple[BatchShape, ...]) -> None:
        self._shapes = shapes
        self._sums = _SUMS_BY_LENGTH if len({shape.samples for shape in shapes}) == 1 else _SUMS_BY_SAMPLES
        self._found: dict[tuple[int, ...], _Formula | None] = {}

    def value_at(self, values: tuple[int, ...], shape: BatchShape) -> int | None:
        """Returns the value for a shape of the simplest sum that agrees with all values; None if there is none.

        Args:
            values: the value for each of the known shapes.
            shape: the shape for which it is asked.
        """
        if values not in self._found:
            self._found[values] = self._formula(values)
        formula = self._found[values]
        if formula is None:
            return None
        factors = zip(formula.terms, formula.factors, strict=True)
        value = sum(_product(term, shape, formula.multiple) * factor for term, factor in factors)
        return int(value) if value == int(value) else None

    def _formula(self, values: tuple[int, ...]) -> _Formula | None:
        if len(set(values)) == 1:
            return _Formula(terms=(_Term(0, 0, 0),), multiple=1, factors=(Fraction(values[0]),))
        for terms in self._sums:
            is_rounded = any(term.rounded for term in terms)
            for multiple in _ROUNDINGS if is_rounded else _ROUNDINGS[:1]:
                rows = [[_product(term, shape, multiple) for term in terms] for shape in self._shapes]
                found = _solved(rows, values)
                if found is not None:
                    return _Formula(terms=terms, multiple=multiple, factors=tuple(found))
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Formula:
    """A sum of terms, each with a factor."""

    terms: tuple[_Term, ...]
    multiple: int
    factors: tuple[Fraction, ...]


def _product(term: _Term, shape: BatchShape, multiple: int) -> int:
    """Returns the value of a term for a shape."""
    rounded = -(-shape.length // multiple) * multiple
    return int(shape.samples**term.samples * shape.length**term.length * rounded**term.rounded)


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
            return None  # two terms are the same for these shapes
        pivot = system.pop(found)
        pivot = [number / pivot[column] for number in pivot]
        system.insert(column, pivot)
        for index, row in enumerate(system):
            if index != column and row[column]:
                system[index] = [a - row[column] * b for a, b in zip(row, pivot, strict=True)]
    if any(row[-1] for row in system[count:]):
        return None
    return [row[-1] for row in system[:count]]
