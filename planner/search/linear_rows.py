"""Makes linear inequalities (rows) that say "the curve at event e stays inside the budget", in whole bytes.

x_u is 1 if unit u is selected. Conditions of two forms are linear in x; any other condition c gets a column z_c:

    unless {S}, at most one of S selectable   1 - sum of x_u over S
    when {u, v, ...}, at most one selectable  x_u + x_v + ...
    anything else                             z_c in [0, 1],  z_c >= 1 - sum of x_u over S  for each S of `unless`,
                                              z_c >= sum of x_u over each clique of `when`

A clique is a maximal set of units that exclude each other: in a tree of modules, a chain of nested modules. One
inequality per clique is sharper than one per unit. With one per unit, the linear relaxation could select halves of two
units that exclude each other and set z_c to 1/2, as if the condition was only half true. In folded programs
(`symmetry`) the same could happen with units of different layers.

A row is  fixed[e] + sum over conditions (bytes_c(e) * condition_c) + sum over a clique (extra_u * x_u) <= budget.
Every column is 0 or 1 in a solution. So a row can be divided by the greatest common divisor of its coefficients, and
its right side rounded down, without losing a solution (a Chvatal-Gomory cut). Everything is computed in int64; only
finished rows are passed to the solver as doubles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from planner.search.curve import NONE, CompiledProblem
from planner.search.presolve import ReducedProblem, normal_form
from planner.search.shared import Condition

_ROWS_PER_ROUND = 40
"""Maximum number of rows added in one round of the cutting loop."""


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class RowKey:
    """Identifies a row: the curve at `event`, plus the extra bytes of recomputes whose units exclude each other."""

    event: int
    recomputes: tuple[int, ...] = ()
    """Indices into the reduced problem's recomputes, all at `event`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """The inequality  sum over i of coefficients[i] * (column number columns[i])  <=  upper, in integers."""

    columns: np.ndarray
    coefficients: np.ndarray
    upper: int
    whole: bool = True
    """True if the left side is an integer in every solution. It need not be if the row contains the peak."""

    def divided(self) -> Row:
        """Returns the row divided by the greatest common divisor of its coefficients, with `upper` rounded down."""
        divisor = int(np.gcd.reduce(self.coefficients)) or 1
        return Row(columns=self.columns, coefficients=self.coefficients // divisor, upper=self.upper // divisor)


class RowSource:
    """Makes the rows of a reduced problem.

    Columns 0..U-1 are the units. Columns U..`column_count` - 1 are the conditions that need a column of their own.
    """

    def __init__(self, reduced: ReducedProblem) -> None:
        self.reduced = reduced
        self.compiled = CompiledProblem(reduced.problem)
        self.column_count = self.compiled.unit_count
        self.recompute_keys = tuple(self._recompute_keys())
        self.column_of: dict[int, int] = {}
        self._links: dict[int, tuple[Row, ...]] = {}
        self._rows_without_budget: dict[RowKey, tuple[Row, list[int]]] = {}
        # Every condition as  constant + signs * columns, all of them in flat arrays.
        constant, owner, columns, signs = [], [], [], []
        for number, condition in enumerate(self.compiled.conditions):
            form = self._linear_form(number, condition)
            constant.append(form.upper)
            owner += [number] * len(form.columns)
            columns += form.columns.tolist()
            signs += form.coefficients.tolist()
        self._constant = np.array(constant, np.int64)
        self._owner = np.array(owner, np.int64)
        self._columns = np.array(columns, np.int64)
        self._signs = np.array(signs, np.int64)

    def _linear_form(self, number: int, condition: Condition) -> Row:
        """Returns a `Row` with which the condition is  upper + coefficients * columns.

        If the condition needs a column of its own, it gets one here.
        """
        unless, when = condition
        is_whole = self.compiled.condition_shared[number] == NONE
        if is_whole and len(unless) == 1 and not when and self._alternatives(unless[0]):
            return _row(unless[0], [-1] * len(unless[0]), 1)
        if is_whole and not unless and self._alternatives(when):
            return _row(when, [1] * len(when), 0)
        self.column_of[number] = self.column_count
        self.column_count += 1
        return _row([self.column_of[number]], [1], 0)

    def _alternatives(self, units: Sequence[int]) -> bool:
        """True if at most one of `units` can be selected."""
        return all(self.reduced.exclusive[unit].issuperset(units[:k]) for k, unit in enumerate(units))

    def _cliques(self, units: Sequence[int]) -> list[tuple[int, ...]]:
        """Returns maximal sets of `units` that exclude each other; every unit is in at least one of them.

        Each unit is extended greedily to a maximal clique. Where exclusion comes from nesting, these are all maximal
        cliques, as `networkx.find_cliques` gives them (a test compares the two). The greedy search is used since it
        is 7 to 180 times faster: 1.1 against 22 ms for examples/flat.py, 0.02 against 3.7 ms for roberta_84m, 11
        against 79 ms for llama_1b, for every budget that is searched (CPU time, networkx 3.6.1). If units excluded each
        other for another reason than nesting, a clique could be missing: the rows would be valid, but less sharp.
        """
        cliques: set[tuple[int, ...]] = set()
        among = set(units)
        for unit in units:
            clique = {unit}
            for other in sorted(among & self.reduced.exclusive[unit]):
                if self.reduced.exclusive[other] >= clique:
                    clique.add(other)
            cliques.add(tuple(sorted(clique)))
        return sorted(cliques)

    def _recompute_keys(self) -> Iterator[RowKey]:
        """Yields keys for the events with recomputes: one for each clique of the units that are recomputed there."""
        at_event: dict[int, dict[int, int]] = {}
        for index, recompute in enumerate(self.reduced.problem.recomputes):
            at_event.setdefault(recompute.at, {})[recompute.unit] = index
        for event, index_of in sorted(at_event.items()):
            for clique in self._cliques(sorted(index_of)):
                yield RowKey(event=event, recomputes=tuple(index_of[unit] for unit in clique))

    def rows(self, keys: Iterable[RowKey], budget_bytes: int) -> list[Row]:
        """Returns the rows of `keys` and the rows that link the conditions in them to the units, all `divided`."""
        return [row.divided() if budgeted else row for row, budgeted in self._rows(keys, budget_bytes)]

    def _rows(self, keys: Iterable[RowKey], budget_bytes: int) -> Iterator[tuple[Row, bool]]:
        """Yields the rows of `keys`, with True, and the rows that link the conditions in them to units, with False."""
        linked: set[int] = set()
        for key in keys:
            row, used = self.row(key, budget_bytes)
            for number in used:
                if number not in linked:
                    yield from ((link, False) for link in self.links(number))
            linked.update(used)
            yield row, True

    def rows_below_peak(self, keys: Iterable[RowKey], peak_unit_bytes: int) -> list[Row]:
        """Returns the rows of `keys` (with the links of their conditions) in which the peak takes the budget's place.

        The peak is one more column, the last, in multiples of `peak_unit_bytes`.
        """
        return [
            Row(
                columns=np.append(row.columns, self.column_count),
                coefficients=np.append(row.coefficients, -peak_unit_bytes),
                upper=row.upper,
                whole=False,
            )
            if budgeted
            else row
            for row, budgeted in self._rows(keys, 0)
        ]

    def paths(self) -> list[Row]:
        """Returns one row per path: at most one of its units is selected."""
        return [_row(path, [1] * len(path), 1) for path in self.reduced.problem.paths]

    def limits(self) -> np.ndarray:
        """Returns int64[columns]: upper bounds, which are 0 for units that are never worth selecting, else 1."""
        limits = np.ones(self.column_count, np.int64)
        limits[: self.compiled.unit_count] = 0
        limits[list(self.reduced.useful)] = 1
        return limits

    def links(self, number: int) -> tuple[Row, ...]:
        """Returns the rows that make the column of condition `number` at least as large as each of its literals."""
        if number not in self._links:
            column, (unless, when) = self.column_of[number], self.compiled.conditions[number]
            if self.compiled.condition_shared[number] != NONE:
                # All its units are in its rows: with a column for each condition that it contains, layers would differ
                # in the conditions that they belong to, and could not be folded.
                unless, when = normal_form(self.compiled.written_out(number), self.reduced.exclusive)
            self._links[number] = (
                *(_row([column, *members], [-1] * (1 + len(members)), -1) for members in unless),
                *(_row([column, *clique], [-1] + [1] * len(clique), 0) for clique in self._cliques(when)),
            )
        return self._links[number]

    def row(self, key: RowKey, budget_bytes: int) -> tuple[Row, list[int]]:
        """Returns the row of `key`, and the numbers of the conditions in it that have columns of their own."""
        if key not in self._rows_without_budget:
            self._rows_without_budget[key] = self._row_without_budget(key)
        row, used = self._rows_without_budget[key]
        return dataclasses.replace(row, upper=row.upper + budget_bytes), used

    def _row_without_budget(self, key: RowKey) -> tuple[Row, list[int]]:
        held_bytes = self.compiled.condition_bytes(key.event)
        total = np.zeros(self.column_count, np.int64)
        np.add.at(total, self._columns, held_bytes[self._owner] * self._signs)
        for index in key.recomputes:
            total[self.compiled.recompute_unit[index]] += self.compiled.recompute_bytes[index]
        upper = -int(self.compiled.fixed_bytes[key.event]) - int(held_bytes @ self._constant)
        columns = np.flatnonzero(total)
        used = [number for number in np.flatnonzero(held_bytes).tolist() if number in self.column_of]
        return Row(columns=columns, coefficients=total[columns], upper=upper), used

    def violated(self, share: np.ndarray, limit_bytes: float) -> list[RowKey]:
        """Separation: returns the keys of the most violated rows if a fraction `share[u]` of each unit u is selected.

        Each interval of events whose curve is above `limit_bytes` gives the key of its highest event. Each clique of
        recomputes above `limit_bytes` gives a key too. The most violated row comes first.
        """
        curve = self.compiled.fractional_curve(share)
        above = np.flatnonzero((curve > limit_bytes) & self.reduced.hot)
        intervals = np.split(above, np.flatnonzero(np.diff(above) > 1) + 1) if above.size else []
        ranked = [(-float(curve[i].max()), RowKey(event=int(i[curve[i].argmax()]))) for i in intervals]
        extra_bytes = self.compiled.recompute_bytes * share[self.compiled.recompute_unit]
        for key in self.recompute_keys:
            height = float(curve[key.event] + extra_bytes[list(key.recomputes)].sum())
            if height > limit_bytes:
                ranked.append((-height, key))
        return [key for _, key in sorted(ranked)[:_ROWS_PER_ROUND]]

    def truth(self, units: Collection[int]) -> np.ndarray:
        """Returns int64[columns]: the value of each column, 0 or 1, when `units` are selected."""
        values = np.zeros(self.column_count, np.int64)
        values[list(units)] = 1
        truth = self.compiled.truth(units)
        for number, column in self.column_of.items():
            values[column] = truth[number]
        return values


def cover(row: Row, values: np.ndarray) -> Row:
    """Returns a cover inequality: a row with coefficients 1 and -1 that excludes `values` but no solution of `row`.

    A column of `row` has the literal "column is 1" if its coefficient is positive, else "column is 0". A cover is a set
    of literals whose coefficients together exceed the right side, so that they cannot all be true. The returned row
    says so about the literals with the largest coefficients among those that are true in `values`.

    Args:
        row: the violated row.
        values: int64[columns]: values, 0 or 1, that violate `row`.
    """
    positive = row.coefficients > 0
    weights = np.abs(row.coefficients)
    spare = row.upper + int(weights[~positive].sum())
    true = np.flatnonzero(values[row.columns] == positive)
    order = true[np.argsort(-weights[true], kind="stable")]
    members = order[: int(np.searchsorted(np.cumsum(weights[order]), spare, side="right")) + 1]
    signs = np.where(positive[members], 1, -1)
    return Row(columns=row.columns[members], coefficients=signs, upper=len(members) - 1 - int((signs < 0).sum()))


def _row(columns: Sequence[int], coefficients: Sequence[int], upper: int) -> Row:
    return Row(columns=np.array(columns, np.int64), coefficients=np.array(coefficients, np.int64), upper=upper)
