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

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from planner.search.curve import CompiledProblem
from planner.search.problem import CheckpointProblem, Hold, Recompute

Condition = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]
"""The condition of a hold: its `unless` and its `when`."""


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
        self._exclusive = _exclusive(problem)
        self._fixed_bytes, self._sizes = _normalised(problem, self._exclusive)
        self._recomputes = _largest(problem.recomputes)
        compiled = CompiledProblem(
            dataclasses.replace(
                problem,
                fixed_bytes=self._fixed_bytes,
                holds=_holds(self._sizes),
                recomputes=tuple(self._recomputes),
            )
        )
        # The curve with every condition true, and the largest recompute at each event.
        self._ceiling_bytes = compiled.highest_curve()
        self._extra_bytes = np.zeros(len(self._fixed_bytes), np.int64)
        np.maximum.at(self._extra_bytes, compiled.recompute_at, compiled.recompute_bytes)

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
        useful = sorted({unit for (_, _, (unless, _)) in sizes for members in unless for unit in members})
        kept = set(useful)
        return ReducedProblem(
            problem=dataclasses.replace(
                self._problem,
                fixed_bytes=self._fixed_bytes,
                holds=_holds(_without_when(sizes, kept)),
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


def _exclusive(problem: CheckpointProblem) -> tuple[frozenset[int], ...]:
    """Returns, for each unit, the other units of the paths that contain it."""
    neighbours: list[set[int]] = [set() for _ in problem.cost_ns]
    for path in problem.paths:
        for unit in path:
            neighbours[unit].update(path)
    return tuple(frozenset(others - {unit}) for unit, others in enumerate(neighbours))


def _normalised(
    problem: CheckpointProblem, exclusive: Sequence[frozenset[int]]
) -> tuple[np.ndarray, dict[tuple[int, int, Condition], int]]:
    """Returns the bytes at each event that are alive under every selection, and the size of all other holds.

    Holds with the same start, stop and condition are added up.
    """
    events = len(problem.fixed_bytes)
    change = np.zeros(events + 1, np.int64)
    sizes: dict[tuple[int, int, Condition], int] = {}
    normal: dict[Condition, Condition] = {}
    for hold in problem.holds:
        start, stop = max(hold.start, 0), min(hold.stop, events)
        raw = (hold.unless, hold.when)
        if raw not in normal:
            normal[raw] = normal_form(raw, exclusive)
        unless, when = normal[raw]
        if start >= stop or hold.size_bytes == 0 or (not unless and not when):
            continue
        if unless == ((),):
            change[start] += hold.size_bytes
            change[stop] -= hold.size_bytes
        else:
            key = (start, stop, normal[raw])
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
            return ((),), ()
    when = {unit for unit in when if not any(members <= exclusive[unit] for members in kept)}
    return tuple(sorted(tuple(sorted(members)) for members in kept)), tuple(sorted(when))


def _without_when(
    sizes: dict[tuple[int, int, Condition], int], kept: set[int]
) -> dict[tuple[int, int, Condition], int]:
    """Drops the `when` literals of units that are never selected, and holds that have no other literals."""
    result: dict[tuple[int, int, Condition], int] = {}
    for (start, stop, (unless, when)), size_bytes in sizes.items():
        key = (start, stop, (unless, tuple(unit for unit in when if unit in kept)))
        if any(key[2]):
            result[key] = result.get(key, 0) + size_bytes
    return result


def _holds(sizes: dict[tuple[int, int, Condition], int]) -> tuple[Hold, ...]:
    """Returns one hold for each (start, stop, condition) of `sizes`, in a fixed order."""
    return tuple(
        Hold(size_bytes=size_bytes, start=start, stop=stop, unless=unless, when=when)
        for (start, stop, (unless, when)), size_bytes in sorted(sizes.items())
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
    longest: list[frozenset[int]] = []
    of_unit: dict[int, list[frozenset[int]]] = {}
    for path in sorted({frozenset(kept.intersection(path)) for path in paths}, key=lambda p: (-len(p), sorted(p))):
        if len(path) > 1 and not any(path <= longer for longer in of_unit.get(min(path), [])):
            longest.append(path)
            for unit in path:
                of_unit.setdefault(unit, []).append(path)
    return tuple(sorted(tuple(sorted(path)) for path in longest))
