"""The checkpoint problem: which units to recompute so that memory stays inside a budget at the least cost.

Time is an index of events 0..E-1 of the recorded step. A *unit* is a module, or a segment of its forward, whose calls
may be recomputed. Bytes come in three kinds: those alive whatever is selected (`fixed_bytes`), those alive on a
condition (`Hold`), and those that a recompute adds at one event (`Recompute`).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hold:
    """Bytes whose life depends on the selection: they are alive at events start <= e < stop if ANY of these is true:

    - some set in `unless` contains no selected unit (so an empty set makes the condition always true),
    - some unit in `when` is selected,
    - the shared condition number `shared` is true.
    """

    size_bytes: int
    start: int
    stop: int
    unless: tuple[tuple[int, ...], ...]
    when: tuple[int, ...]
    shared: int | None = None
    """Index into `CheckpointProblem.shared`; None if there is no such condition."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedCondition:
    """A condition that many holds and other shared conditions contain.

    It is true if a set in `unless` contains no selected unit, if a unit in `when` is selected, or if the condition
    `before` is true. A storage that every layer uses is held in each layer on the condition of the layer before it, or
    on one of its own. So all its conditions together take no more memory than those of the last layer.
    """

    before: int | None
    """Index into `CheckpointProblem.shared` of an earlier condition; None if there is none."""
    unless: tuple[tuple[int, ...], ...]
    when: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recompute:
    """If `unit` is selected, `extra_bytes` are alive at event `at` in addition to the curve at that event."""

    unit: int
    at: int
    extra_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointProblem:
    """The input of the search."""

    fixed_bytes: np.ndarray
    """int64[E]: bytes alive at each event whatever is selected."""
    holds: tuple[Hold, ...]
    recomputes: tuple[Recompute, ...]
    """Recomputes of the units. A unit may have several, one for each of its calls. Their bytes are never added to each
    other: each recompute is a peak of its own."""
    cost_ns: tuple[int, ...]
    """Nanoseconds to recompute each unit in all its calls. The length of the tuple is the number of units."""
    paths: tuple[tuple[int, ...], ...]
    """Sets of units of which at most one may be selected: a unit and the units that it is nested in."""
    shared: tuple[SharedCondition, ...] = ()
    """Conditions that several holds contain. Each comes after the one that it contains."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """The units to recompute, with their peak and cost."""

    units: tuple[int, ...]
    """Numbers of the selected units, in ascending order."""
    peak_bytes: int
    """Largest value of the memory curve with these units selected, including the extra bytes of their recomputes."""
    cost_ns: int
    status: str
    """'optimal' or 'time limit'."""
    gap: float
    """Relative distance between `cost_ns` (or the peak, if the peak was minimized) and its proven lower bound."""
    seconds: float
    """Wall-clock time of the search in seconds."""


def exclusive_units(paths: Sequence[Sequence[int]], count: int) -> tuple[frozenset[int], ...]:
    """Returns, for each of `count` units, the units that may not be selected together with it."""
    neighbours: list[set[int]] = [set() for _ in range(count)]
    for path in paths:
        for unit in path:
            neighbours[unit].update(path)
    return tuple(frozenset(others - {unit}) for unit, others in enumerate(neighbours))


def longest_paths(paths: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Returns the paths of two units or more that no other path contains, the longest first.

    Args:
        paths: each has its units in ascending order.
    """
    longest: list[tuple[int, ...]] = []
    of_unit: dict[int, list[frozenset[int]]] = defaultdict(list)
    for path in sorted(set(paths), key=lambda path: (-len(path), path)):
        # A unit of the model is in the paths of all layers: the unit that is in the fewest shows what contains a path.
        if len(path) > 1 and not any(longer.issuperset(path) for longer in min((of_unit[u] for u in path), key=len)):
            longest.append(path)
            units = frozenset(path)
            for unit in path:
                of_unit[unit].append(units)
    return longest
