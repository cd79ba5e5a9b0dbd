"""Presolve: makes a smaller problem with the same answer, in which conditions are in normal form.

A condition has the sets `S`, `T` ... in `unless` and the units `W` in `when`. The floor is a number of bytes up to
which memory does not matter. Every rule is exact for selections with at most one unit of each path:

    S            ->  S - W      if u is in both, "u selected" already makes the condition true
    S is empty, or S and T exclude each other  ->  the condition is always true: its bytes are fixed
    T            ->  dropped    if S is a subset of T (absorption)
    w in W       ->  dropped    if w excludes all of S: selecting w then implies that no unit of S is selected
    equal (start, stop, condition)             ->  their bytes are added up
    events whose curve cannot exceed the floor whatever is selected, and holds that touch no other event  ->  dropped
    units that free no condition               ->  never selected, since they only cost time

Two units exclude each other if some path contains both. A solver's own presolve could not apply these rules, because it
sees only the rows of the integer program, and no longer the conditions from which they were made.

The relation of exclusion is a graph (its cliques include the paths). It is kept as one set of neighbours per unit, and
not as a `networkx.Graph`: that takes 9 to 31 ms to build for examples/roberta_84m and llama_1b, where the sets take 0.7
to 3.4 ms. The part of the presolve that does not depend on the floor is computed once for all budgets (`Presolve`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from planner.search.curve import NONE, CompiledProblem
from planner.search.problem import (
    CheckpointProblem,
    Hold,
    Recompute,
    SharedCondition,
    exclusive_units,
    longest_paths,
)
from planner.search.shared import Condition, needed

_ALWAYS: Condition = ((),), ()
"""The normal form of a condition that is always true."""

_Key = tuple[int, int, Condition, int]
"""(start, stop, own condition, number of the shared condition or `NONE`) of a hold."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReducedProblem:
    """A problem with the same feasible selections, and the same curve at the events that matter."""

    problem: CheckpointProblem
    """The smaller problem: the same units and events, but only those holds and recomputes that can matter."""
    hot: np.ndarray
    """bool[E]: True for events at which some selection may exceed the floor."""
    useful: tuple[int, ...]
    """Units that may be worth selecting, in ascending order."""
    exclusive: tuple[frozenset[int], ...]
    """For each unit, the units that may not be selected together with it."""


class Presolve:
    """The part of the presolve that does not depend on the floor: it brings the conditions into normal form."""

    def __init__(self, problem: CheckpointProblem) -> None:
        self._problem = problem
        self._exclusive = exclusive_units(problem.paths, len(problem.cost_ns))
        self._shared, place_of = _normalised_shared(problem.shared, self._exclusive)
        self._fixed_bytes, self._sizes = _normalised(problem, self._exclusive, place_of)
        self._recomputes = _largest(problem.recomputes)
        compiled = CompiledProblem(
            dataclasses.replace(
                problem,
                fixed_bytes=self._fixed_bytes,
                holds=_holds(self._sizes),
                recomputes=tuple(self._recomputes),
                shared=self._shared,
            )
        )
        # The curve with every condition true, and the largest recompute at each event.
        self._ceiling_bytes = compiled.highest_curve()
        self._extra_bytes = np.zeros(len(self._fixed_bytes), np.int64)
        np.maximum.at(self._extra_bytes, compiled.recompute_at, compiled.recompute_bytes)

    def with_fixed_bytes(self, fixed_bytes: np.ndarray) -> Presolve:
        """Returns the presolve of the same problem with other bytes (int64[E]) that are alive whatever is selected."""
        other, change = copy.copy(self), fixed_bytes - np.asarray(self._problem.fixed_bytes, np.int64)
        other._problem = dataclasses.replace(self._problem, fixed_bytes=fixed_bytes)
        other._fixed_bytes, other._ceiling_bytes = self._fixed_bytes + change, self._ceiling_bytes + change
        return other

    @property
    def lowest_bytes(self) -> int:
        """A lower bound on the peak of every selection: the largest number of fixed bytes at an event."""
        return int(self._fixed_bytes.max(initial=0))

    def above(self, floor_bytes: int) -> ReducedProblem:
        """Returns the problem without the holds, recomputes and paths that cannot matter.

        Args:
            floor_bytes: events with at most this many bytes under every selection do not matter. Usually the budget.
        """
        hot = self._ceiling_bytes + self._extra_bytes > floor_bytes
        # Holds that touch such an event, and the units that can free one of them. Other units stay unselected.
        hot_before = np.concatenate(([0], np.cumsum(hot)))
        sizes = {key: size for key, size in self._sizes.items() if hot_before[key[1]] > hot_before[key[0]]}
        places = needed({key[3] for key in sizes if key[3] != NONE}, self._shared)
        shared = [self._shared[number] for number in places]
        all_unless = (*(key[2][0] for key in sizes), *(one.unless for one in shared))
        useful = sorted({unit for unless in all_unless for members in unless for unit in members})
        kept = set(useful)
        return ReducedProblem(
            problem=dataclasses.replace(
                self._problem,
                fixed_bytes=self._fixed_bytes,
                holds=_holds(_without_when(sizes, kept, places)),
                shared=tuple(
                    SharedCondition(
                        before=None if one.before is None else places[one.before],
                        unless=one.unless,
                        when=tuple(unit for unit in one.when if unit in kept),
                    )
                    for one in shared
                ),
                recomputes=tuple(
                    r
                    for r in self._recomputes
                    if r.unit in kept and self._ceiling_bytes[r.at] + r.extra_bytes > floor_bytes
                ),
                paths=_longest(self._problem.paths, kept),
            ),
            hot=hot,
            useful=tuple(useful),
            exclusive=self._exclusive,
        )


def _normalised_shared(
    shared: Sequence[SharedCondition], exclusive: Sequence[frozenset[int]]
) -> tuple[tuple[SharedCondition, ...], list[int | None]]:
    """Returns the shared conditions without those that add nothing to the one before them or are always true.

    Returns also the place of each among them: that of the one before it if it adds nothing, `NONE` if there is none,
    and None if the condition is always true.
    """
    kept: list[SharedCondition] = []
    place_of: list[int | None] = []
    for one in shared:
        before = NONE if one.before is None else place_of[one.before]
        unless, when = normal_form((one.unless, one.when), exclusive)
        if before is None or (unless, when) == _ALWAYS:
            place_of.append(None)
        elif not unless and not when:
            place_of.append(before)
        else:
            place_of.append(len(kept))
            kept.append(SharedCondition(before=None if before == NONE else before, unless=unless, when=when))
    return tuple(kept), place_of


def _normalised(
    problem: CheckpointProblem, exclusive: Sequence[frozenset[int]], place_of: Sequence[int | None]
) -> tuple[np.ndarray, dict[_Key, int]]:
    """Returns the bytes at each event that are alive under every selection, and the size of all other holds.

    Holds with the same start, stop and condition are added up.

    Args:
        place_of: for each shared condition, its place among those in normal form, as `_normalised_shared` gives it.
    """
    events = len(problem.fixed_bytes)
    change = np.zeros(events + 1, np.int64)
    sizes: dict[_Key, int] = {}
    normal: dict[Condition, Condition] = {}
    for hold in problem.holds:
        start, stop = max(hold.start, 0), min(hold.stop, events)
        raw = (hold.unless, hold.when)
        if raw not in normal:
            normal[raw] = normal_form(raw, exclusive)
        place = NONE if hold.shared is None else place_of[hold.shared]
        if start >= stop or hold.size_bytes == 0 or (not any(normal[raw]) and place == NONE):
            continue
        if place is None or normal[raw] == _ALWAYS:
            change[start] += hold.size_bytes
            change[stop] -= hold.size_bytes
        else:
            key = (start, stop, normal[raw], place)
            sizes[key] = sizes.get(key, 0) + hold.size_bytes
    return np.asarray(problem.fixed_bytes, np.int64) + np.cumsum(change[:-1]), sizes


def normal_form(condition: Condition, exclusive: Sequence[frozenset[int]]) -> Condition:
    """Returns the condition with as few literals as the rules allow; `(((),), ())` if it is always true."""
    when = set(condition[1])
    freed = sorted(
        {frozenset(members) - when for members in condition[0]}, key=lambda members: (len(members), sorted(members))
    )
    kept: list[frozenset[int]] = []
    for members in freed:
        if not any(smaller <= members for smaller in kept):
            kept.append(members)
    for k, members in enumerate(kept):
        if not members or any(all(other <= exclusive[unit] for unit in members) for other in kept[:k]):
            return _ALWAYS
    when = {unit for unit in when if not any(members <= exclusive[unit] for members in kept)}
    return tuple(sorted(tuple(sorted(members)) for members in kept)), tuple(sorted(when))


def _without_when(sizes: dict[_Key, int], kept: set[int], places: Mapping[int, int]) -> dict[_Key, int]:
    """Drops the `when` literals of units that are never selected, and holds that have no other literals.

    Args:
        places: for each shared condition that is needed, its number in the result.
    """
    result: dict[_Key, int] = {}
    for (start, stop, (unless, when), number), size_bytes in sizes.items():
        condition = unless, tuple(unit for unit in when if unit in kept)
        if any(condition) or number != NONE:
            key = (start, stop, condition, places.get(number, NONE))
            result[key] = result.get(key, 0) + size_bytes
    return result


def _holds(sizes: dict[_Key, int]) -> tuple[Hold, ...]:
    """Returns one hold for each (start, stop, condition) of `sizes`, in a fixed order."""
    return tuple(
        Hold(
            size_bytes=size_bytes,
            start=start,
            stop=stop,
            unless=unless,
            when=when,
            shared=None if number == NONE else number,
        )
        for (start, stop, (unless, when), number), size_bytes in sorted(sizes.items())
    )


def _largest(recomputes: Iterable[Recompute]) -> list[Recompute]:
    """Returns the largest recompute of each unit at each event, without recomputes that add no bytes."""
    largest: dict[tuple[int, int], int] = {}
    for recompute in recomputes:
        key = (recompute.at, recompute.unit)
        largest[key] = max(largest.get(key, 0), recompute.extra_bytes)
    return [
        Recompute(unit=unit, at=at, extra_bytes=extra) for (at, unit), extra in sorted(largest.items()) if extra > 0
    ]


def _longest(paths: Iterable[Sequence[int]], kept: set[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the paths restricted to `kept` units, without paths that another path contains or that have one unit."""
    return tuple(sorted(longest_paths(tuple(sorted(kept.intersection(path))) for path in paths)))
