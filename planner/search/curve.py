"""The memory curve of a selection (the bytes alive at each event), computed exactly in whole bytes.

    curve[e] = fixed[e] + sum of size_h over holds h with start_h <= e < stop_h whose condition is true
    peak     = max( max_e curve[e],  max over recomputes r of selected units: curve[at_r] + extra_r )

A condition is an OR of literals ("no unit of S is selected", "unit u is selected"). Thousands of holds
share a few hundred conditions, so a selection is first turned into one truth value per condition; the
curve is then one cumulative sum over a difference array. All arithmetic is int64, so the result is exact
whatever solver proposed the selection. Curves with fractional truth values (`fractional_curve`) are only
used to find the next rows of a linear program.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from planner.search.problem import CheckpointProblem
from planner.search.shared import Condition, Containing, written_out

NONE = -1
"""Takes the place of the number of a shared condition if there is none."""


def evaluate(problem: CheckpointProblem, units: Collection[int]) -> np.ndarray:
    """Returns int64[E]: bytes alive at each event with `units` selected, without the extra bytes of recomputes."""
    return CompiledProblem(problem).curve(units)


def peak(problem: CheckpointProblem, units: Collection[int]) -> int:
    """Returns the largest value of the curve with `units` selected, including the extra bytes of their recomputes."""
    return CompiledProblem(problem).peak(units)


class CompiledProblem:
    """A problem as flat arrays, for fast evaluation: a few milliseconds per curve for 100k events and 50k holds.

    Array shapes: E events, U units, C conditions, H holds, R recomputes.
    """

    def __init__(self, problem: CheckpointProblem) -> None:
        self.events = len(problem.fixed_bytes)
        self.unit_count = len(problem.cost_ns)
        self.fixed_bytes = np.asarray(problem.fixed_bytes, np.int64)
        self._shared = problem.shared
        # Conditions without a shared one come first.
        keys = sorted(
            {(NONE if hold.shared is None else hold.shared, hold.unless, hold.when) for hold in problem.holds}
        )
        number = {key: k for k, key in enumerate(keys)}
        self.conditions: list[Condition] = [(unless, when) for _, unless, when in keys]
        self.condition_shared = _ints(shared for shared, *_ in keys)
        self.hold_condition = _ints(
            number[NONE if hold.shared is None else hold.shared, hold.unless, hold.when] for hold in problem.holds
        )
        self.hold_start = _ints(min(max(hold.start, 0), self.events) for hold in problem.holds)
        self.hold_stop = _ints(min(max(hold.start, hold.stop, 0), self.events) for hold in problem.holds)
        self.hold_bytes = _ints(hold.size_bytes for hold in problem.holds)
        self.recompute_unit = _ints(recompute.unit for recompute in problem.recomputes)
        self.recompute_at = _ints(recompute.at for recompute in problem.recomputes)
        self.recompute_bytes = _ints(recompute.extra_bytes for recompute in problem.recomputes)
        self._own = _Conditions(self.conditions)
        self._of_shared = _Conditions([(one.unless, one.when) for one in problem.shared])
        self._check()
        self._containing = Containing(problem.shared)

    def with_fixed_bytes(self, fixed_bytes: np.ndarray) -> CompiledProblem:
        """Returns the same problem with other bytes (int64[E]) that are alive whatever is selected."""
        other = copy.copy(self)
        other.fixed_bytes = fixed_bytes
        return other

    def _check(self) -> None:
        """Raises ValueError for input that would give wrong results: negative sizes, unknown events or units."""
        if np.any(self.hold_bytes < 0):
            raise ValueError(
                f"hold {int(np.argmin(self.hold_bytes))} has {self.hold_bytes.min()} bytes, but sizes must be >= 0"
            )
        outside = self.recompute_at[(self.recompute_at < 0) | (self.recompute_at >= self.events)]
        if outside.size:
            raise ValueError(f"a recompute is at event {outside[0]}, outside the events 0..{self.events - 1}")
        named = np.concatenate((self._own.units(), self._of_shared.units(), self.recompute_unit))
        if named.size and not 0 <= named.min() <= named.max() < self.unit_count:
            raise ValueError(
                f"the problem's units are 0..{self.unit_count - 1}, but its holds and recomputes refer to units "
                f"{named.min()}..{named.max()}"
            )

        late = [k for k, one in enumerate(self._shared) if one.before is not None and not 0 <= one.before < k]
        if late or self.condition_shared.max(initial=NONE) >= len(self._shared):
            raise ValueError(
                f"the problem has {len(self._shared)} shared conditions, but its holds refer to number "
                f"{self.condition_shared.max(initial=NONE)}, or one of the conditions to a later one: {late[:3]}"
            )

    def chosen(self, units: Collection[int]) -> np.ndarray:
        """Returns bool[U]: True for selected units."""
        chosen = np.zeros(self.unit_count, bool)
        chosen[list(units)] = True
        return chosen

    def truth(self, units: Collection[int]) -> np.ndarray:
        """Returns int64[C]: 1 for each of `conditions` that is true with `units` selected, else 0."""
        chosen = self.chosen(units).astype(np.int64)
        return self._with_shared(self._own.truth(chosen), self._of_shared.truth(chosen))

    def _with_shared(self, values: np.ndarray, of_shared: np.ndarray) -> np.ndarray:
        """Returns the truth values of conditions, given those without the shared conditions in them."""
        largest = np.append(self._containing.largest(of_shared), np.zeros(1, of_shared.dtype))
        with_shared: np.ndarray = np.maximum(values, largest[self.condition_shared])
        return with_shared

    def written_out(self, number: int) -> Condition:
        """Returns a condition with the units of the shared conditions that it contains."""
        shared = int(self.condition_shared[number])
        return self.conditions[number] if shared == NONE else written_out(self.conditions[number], shared, self._shared)

    def curve(self, units: Collection[int]) -> np.ndarray:
        """Returns int64[E]: bytes alive at each event with `units` selected, without the extra bytes of recomputes."""
        change = np.zeros(self.events + 1, np.int64)
        alive_bytes = self.hold_bytes * self.truth(units)[self.hold_condition]
        np.add.at(change, self.hold_start, alive_bytes)
        np.subtract.at(change, self.hold_stop, alive_bytes)
        curve: np.ndarray = self.fixed_bytes + np.cumsum(change[:-1])
        return curve

    def recompute_peaks(self, units: Collection[int], curve: np.ndarray) -> np.ndarray:
        """Returns int64[R]: `curve` at the event of each recompute, plus its extra bytes if its unit is selected.

        Args:
            units: the selected units.
            curve: the result of the method `curve` for these units.
        """
        peaks: np.ndarray = curve[self.recompute_at] + self.recompute_bytes * self.chosen(units)[self.recompute_unit]
        return peaks

    def peak(self, units: Collection[int]) -> int:
        """Returns the largest value of the curve with `units` selected; 0 if there are no events.

        The extra bytes of the recomputes of these units are included.
        """
        curve = self.curve(units)
        return max(int(curve.max(initial=0)), int(self.recompute_peaks(units, curve).max(initial=0)))

    def highest_curve(self) -> np.ndarray:
        """Returns int64[E]: the curve with every condition true. No selection has a higher curve."""
        change = np.zeros(self.events + 1, np.int64)
        np.add.at(change, self.hold_start, self.hold_bytes)
        np.subtract.at(change, self.hold_stop, self.hold_bytes)
        return self.fixed_bytes + np.cumsum(change[:-1])

    def fractional_curve(self, share: np.ndarray) -> np.ndarray:
        """Returns float64[E]: the curve of the linear relaxation if a fraction `share[u]` of unit u is selected."""
        truth = self._with_shared(self._own.fractions(share), self._of_shared.fractions(share))
        alive_bytes = self.hold_bytes * truth[self.hold_condition]
        change = np.bincount(self.hold_start, alive_bytes, self.events + 1)
        change -= np.bincount(self.hold_stop, alive_bytes, self.events + 1)
        return self.fixed_bytes + np.cumsum(change[:-1])

    def condition_bytes(self, event: int) -> np.ndarray:
        """Returns int64[C]: bytes that each condition keeps alive at `event`."""
        held = np.flatnonzero((self.hold_start <= event) & (event < self.hold_stop))
        total_bytes = np.zeros(len(self.conditions), np.int64)
        np.add.at(total_bytes, self.hold_condition[held], self.hold_bytes[held])
        return total_bytes


class _Conditions:
    """Conditions as flat arrays, without the shared conditions that they contain."""

    def __init__(self, conditions: Sequence[Condition]) -> None:
        self._unless = _Groups([members for unless, _ in conditions for members in unless])
        self._unless_of = _Groups.consecutive([len(unless) for unless, _ in conditions])
        self._when = _Groups([when for _, when in conditions])

    def units(self) -> np.ndarray:
        """Returns the units of all conditions."""
        return np.concatenate((self._unless.members, self._when.members))

    def truth(self, chosen: np.ndarray) -> np.ndarray:
        """Returns int64[conditions]: 1 for each that is true if the units with a 1 in `chosen` are selected."""
        free = self._unless.sums(chosen) == 0
        return ((self._unless_of.sums(free.astype(np.int64)) > 0) | (self._when.sums(chosen) > 0)).astype(np.int64)

    def fractions(self, share: np.ndarray) -> np.ndarray:
        """Returns float64[conditions]: the largest of the literals if a fraction `share[u]` of unit u is selected."""
        free = np.maximum(0.0, 1.0 - self._unless.sums(share))
        fractions: np.ndarray = np.maximum(self._unless_of.maxima(free), self._when.maxima(share))
        return fractions


class _Groups:
    """Lists of indices of different lengths, stored flat: group g is `members[bounds[g]:bounds[g + 1]]`."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self.members = _ints(member for group in groups for member in group)
        self.bounds = np.concatenate(([0], np.cumsum(_ints(map(len, groups)))))

    @classmethod
    def consecutive(cls, lengths: Sequence[int]) -> _Groups:
        """Returns groups of these lengths, whose members are the numbers 0..sum(lengths)-1 in order."""
        groups = cls([])
        groups.members = np.arange(sum(lengths))
        groups.bounds = np.concatenate(([0], np.cumsum(_ints(lengths))))
        return groups

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Returns for each group the sum of `values` at its members; 0 for an empty group."""
        running = np.concatenate((np.zeros(1, values.dtype), np.cumsum(values[self.members])))
        sums: np.ndarray = running[self.bounds[1:]] - running[self.bounds[:-1]]
        return sums

    def maxima(self, values: np.ndarray) -> np.ndarray:
        """Returns for each group the largest of `values` at its members; 0 for an empty group."""
        result = np.zeros(len(self.bounds) - 1, values.dtype)
        filled = np.flatnonzero(self.bounds[1:] > self.bounds[:-1])
        if filled.size:
            result[filled] = np.maximum.reduceat(values[self.members], self.bounds[filled])
        return result


def _ints(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.int64)
