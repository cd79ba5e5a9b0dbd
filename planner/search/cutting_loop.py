"""The cutting loop: the best selection for an objective inside a budget, or the smallest peak.

    solve the rows so far, folded by symmetry -> unfold -> evaluate exactly -> add the rows it violates -> repeat

Every row is valid for every selection that fits, and folding keeps every solution, so each optimum on the way
bounds the true one from below. The first selection that reaches the bound and fits exactly is optimal. The
rows that made an unfolding fail enter the folded program, which makes its classes finer; at worst nothing is
folded any more and this is plain branch and cut.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import numpy as np

from planner.search.curve import CompiledProblem
from planner.search.integer_program import Program, power_of_two, solver_of
from planner.search.linear_rows import Row, RowKey, RowSource, cover
from planner.search.reduce import ReducedProblem
from planner.search.repair import descend
from planner.search.symmetry import Folded, fold, unfolded

_COARSE_GAP = 0.01
"""Relative gap to stop at while no selection that fits is known: the rows are not complete yet."""

_SHARE_OF_TIME = 0.9
"""Of the time that is left, what one run of the solver may take: what it finds must still be unfolded and checked."""


@dataclasses.dataclass(kw_only=True)
class Effort:
    """What a search took so far: rows of the curve that it needed, and runs of the solver."""

    rows: int = 0
    rounds: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """The best selection known when the loop ended."""

    units: tuple[int, ...] | None
    bound: float
    """Proven: no selection that fits has a smaller objective."""
    proven: bool
    """`units` is optimal to within the tolerance, or, if it is None, nothing fits below the cutoff."""


class CuttingLoop:
    """The rows of one budget that were found so far, and the ways to use them."""

    def __init__(
        self, exact: CompiledProblem, reduced: ReducedProblem, budget_bytes: int, *, deadline: float, effort: Effort
    ) -> None:
        self.exact = exact
        self.reduced = reduced
        self.budget_bytes = budget_bytes
        self.deadline = deadline
        self.effort = effort
        self.source = RowSource(reduced)
        self.core: list[RowKey] = []
        """Events that the programs know of."""
        self.covers: list[Row] = []
        self.nodes: int | None = None
        """Branch-and-bound nodes to stop at, if any."""
        self._folding = True

    @property
    def left_seconds(self) -> float:
        return self.deadline - time.monotonic()

    def relax(self, objective: np.ndarray) -> float:
        """Find the rows that bind without integrality. Gives a bound of the objective: inf if nothing fits."""
        solver, known, bound = solver_of(self._program(objective)), dict[RowKey, Row](), 0.0
        while self.left_seconds > 0:
            self.effort.rounds += 1
            outcome = solver.relax(time_limit_seconds=self.left_seconds)
            if outcome.infeasible:
                return math.inf
            bound = max(bound, outcome.bound - outcome.tolerance)
            if outcome.values is None:
                break
            new = self._violated(outcome.values, self.budget_bytes * (1 + 1e-9), known)
            if not new or not outcome.complete:
                self.core = [key for key, row in known.items() if _is_tight(row, outcome.values)]
                break
            for row in self.source.rows(new, self.budget_bytes):
                solver.add(row)
            known.update((key, self.source.row(key, self.budget_bytes)[0]) for key in new)
        return bound

    def run(
        self,
        objective: np.ndarray,
        best: tuple[int, ...] | None,
        side_rows: Sequence[Row] = (),
        *,
        tolerance: int = 0,
        below: int | None = None,
    ) -> Found:
        """Minimise `objective`, int64[U], to within `tolerance`; selections that reach `below` do not count.

        `best`: a selection to start from, that fits, satisfies `side_rows` and is below `below`.
        """
        bound, coarse_gap, cutoff = 0.0, _COARSE_GAP, _cutoff(objective, below)
        while self.left_seconds > 0:
            program = self._program(objective, side_rows)
            folded = self._folded(program)
            self.effort.rounds += 1
            outcome = solver_of(folded.program).solve(
                time_limit_seconds=_SHARE_OF_TIME * self.left_seconds,
                gap=coarse_gap if best is None and folded.trivial else 0.0,
                tolerance=tolerance,
                below=cutoff,
                target=bound + max(tolerance, _resolution(objective, bound) / 2),
                nodes=self.nodes,
                start=None if best is None else folded.sums(self.source.truth(best)),
            )
            if outcome.infeasible:
                return Found(units=best, bound=bound, proven=best is None)
            bound = max(bound, outcome.bound)
            if bound >= cutoff or outcome.values is None:
                return Found(units=best, bound=bound, proven=best is None and bound >= cutoff)
            units = self._unfolded(program, folded, outcome.values)
            if units is not None and not self._fits(units):
                units = self.repaired(units) if best is None else None
            if units is not None and total(objective, units) > cutoff:
                if distance(objective, units, bound) == 0.0:
                    return Found(units=best, bound=bound, proven=best is None)
                # HiGHS may end with a solution beyond its cutoff, within the gap of one that is not.
                units, coarse_gap, tolerance = None, 0.0, 0
            if units is not None:
                best = units if best is None else min(best, units, key=lambda found: total(objective, found))
            if best is not None and distance(objective, best, bound) <= tolerance:
                return Found(units=best, bound=bound, proven=True)
            if not outcome.complete:
                break
        return Found(units=best, bound=bound, proven=False)

    def lowest(self, floor_bytes: int, tolerance_bytes: int) -> tuple[tuple[int, ...], int]:
        """A selection whose peak is as small as the solver can tell, and bytes below which no peak can be.

        `floor_bytes`: bytes that the curve reaches whatever is selected. The peak may be off by `tolerance_bytes`.
        Uses up the loop: its budget moves.
        """
        best: tuple[int, ...] = ()
        always_bytes = floor_bytes
        unit_bytes = power_of_two(self.exact.peak(best))
        self.core = [RowKey(event=int(self.source.compiled.fixed_bytes.argmax()))]
        relaxed = True
        while self.left_seconds > 0:
            folded, left_seconds = self._folded(self._peak_program(unit_bytes)), _SHARE_OF_TIME * self.left_seconds
            solver = solver_of(folded.program)
            self.effort.rounds += 1
            if relaxed:
                outcome = solver.relax(time_limit_seconds=left_seconds)
            else:
                outcome = solver.solve(time_limit_seconds=left_seconds, tolerance=tolerance_bytes / unit_bytes)
            slack_bytes = outcome.tolerance * unit_bytes
            if math.isfinite(outcome.bound):
                floor_bytes = max(floor_bytes, math.ceil(outcome.bound * unit_bytes - slack_bytes))
            if outcome.values is None:
                break
            peak_bytes = outcome.values[-1] * unit_bytes + slack_bytes
            self.budget_bytes = int(peak_bytes)
            if relaxed:
                share = (outcome.values / folded.sizes)[folded.class_of]
                new = self._violated(share, peak_bytes + slack_bytes, self.core)
                self.core += new
                relaxed = bool(new)
                continue
            known, self.covers = len(self.core), []
            units = self._unfolded(self._program(np.zeros(self.exact.unit_count, np.int64)), folded, outcome.values)
            best = best if units is None else min(best, units, key=self.exact.peak)
            progress = len(self.core) > known or (not self._folding and not folded.trivial)
            if self._fits(best) or not outcome.complete or not progress:
                break
        if not best:
            best = descend(self.source.compiled, self.reduced, best, floor_bytes)
        return min(best, (), key=self.exact.peak), max(always_bytes, self._next_possible(floor_bytes, always_bytes))

    def _next_possible(self, bound_bytes: int, always_bytes: int) -> int:
        """The smallest number of bytes from `bound_bytes` on that a peak above `always_bytes` can have.

        All that depends on the selection comes in multiples of some size (an allocator's, usually).
        """
        if bound_bytes <= always_bytes:
            return bound_bytes
        compiled = self.source.compiled
        size_bytes = int(np.gcd.reduce(np.concatenate((compiled.hold_bytes, compiled.recompute_bytes)))) or 1
        remainders = np.unique(compiled.fixed_bytes[self.reduced.hot] % size_bytes)
        return bound_bytes + int(((remainders - bound_bytes) % size_bytes).min(initial=size_bytes - 1))

    def repaired(self, units: tuple[int, ...]) -> tuple[int, ...] | None:
        """A selection near `units` that fits, if a greedy search finds one."""
        found = descend(self.source.compiled, self.reduced, units, self.budget_bytes)
        return found if self._fits(found) else None

    def _program(self, objective: np.ndarray, side_rows: Sequence[Row] = ()) -> Program:
        rows = (*self.source.paths(), *self.source.rows(self.core, self.budget_bytes), *self.covers, *side_rows)
        cost = np.zeros(self.source.column_count, np.int64)
        cost[: len(objective)] = objective
        return Program(cost=cost, limit=self.source.limits(), integral=np.arange(len(cost)) < len(objective), rows=rows)

    def _folded(self, program: Program) -> Folded:
        """`program`, folded if that helps: with conditions that are whole, as their sums do not follow from the units'.

        Where nothing is folded they do follow, and to branch on them takes longer.
        """
        if not self._folding:
            return unfolded(program)
        whole = np.arange(len(program.cost)) < self.source.column_count
        folded = fold(dataclasses.replace(program, integral=whole))
        return unfolded(program) if folded.trivial else folded

    def _peak_program(self, unit_bytes: int) -> Program:
        rows = (*self.source.paths(), *self.source.rows_below_peak(self.core, unit_bytes))
        largest = self.exact.peak(()) // unit_bytes + 1
        columns = np.arange(self.source.column_count + 1)
        return Program(
            cost=(columns == self.source.column_count).astype(np.int64),
            limit=np.append(self.source.limits(), largest),
            integral=columns < self.exact.unit_count,
            rows=rows,
        )

    def _violated(
        self, share: np.ndarray, limit_bytes: float, known: Sequence[RowKey] | dict[RowKey, Row]
    ) -> list[RowKey]:
        """New keys of rows that are violated when unit u is selected to the share `share[u]`."""
        keys = self.source.violated(share[: self.exact.unit_count], limit_bytes)
        new = [key for key in keys if key not in known]
        self.effort.rows += len(new)
        return new

    def _unfolded(self, program: Program, folded: Folded, values: np.ndarray) -> tuple[int, ...] | None:
        """A selection with the class sums `values` that fits; else one that does not; else None.

        Rows that were needed to see that join `core`. If there is none and no row shows it, folding ends.
        """
        if folded.trivial:
            units = self._chosen(values)
            if not self._fits(units):
                self._exclude(units)
            return units
        solver = solver_of(
            dataclasses.replace(program, cost=np.zeros_like(program.cost)),
            folded.fixing(np.rint(values), np.array(self.reduced.useful)),
        )
        units = None
        while self.left_seconds > 0:
            self.effort.rounds += 1
            outcome = solver.solve(time_limit_seconds=self.left_seconds, nodes=self.nodes)
            if outcome.values is None:
                self._folding = units is not None
                return units
            units = self._chosen(outcome.values)
            if self._fits(units):
                return units
            for row in self._exclude(units):
                solver.add(row)
        return units

    def _exclude(self, units: tuple[int, ...]) -> list[Row]:
        """Add rows that `units` violates. If all of them are known, the solver was off by its tolerance: a cover."""
        share, limit_bytes = self.exact.chosen(units).astype(float), self.budget_bytes + 0.5
        new = self._violated(share, limit_bytes, self.core)
        self.core += new
        if new:
            return self.source.rows(new, self.budget_bytes)
        row, _ = self.source.row(self.source.violated(share, limit_bytes)[0], self.budget_bytes)
        self.covers.append(cover(row, self.source.truth(units)))
        self.effort.rows += 1
        return self.covers[-1:]

    def _chosen(self, values: np.ndarray) -> tuple[int, ...]:
        return tuple(np.flatnonzero(values[: self.exact.unit_count] > 0.5).tolist())

    def _fits(self, units: tuple[int, ...]) -> bool:
        return self.exact.peak(units) <= self.budget_bytes


def total(objective: np.ndarray, units: Sequence[int]) -> int:
    """The objective of a selection."""
    return int(objective[list(units)].sum())


def distance(objective: np.ndarray, units: Sequence[int], bound: float) -> float:
    """By how much a selection may exceed the optimum, if `bound` is proven; 0.0 if that is less than can be told."""
    room = total(objective, units) - bound
    return 0.0 if room < _resolution(objective, bound) else room


def _is_tight(row: Row, values: np.ndarray) -> bool:
    """Whether `values` leave (nearly) no room in the row."""
    room = row.upper - float(row.coefficients @ values[row.columns])
    return room <= 1e-6 * float(np.abs(row.coefficients).sum())


def _cutoff(objective: np.ndarray, below: int | None) -> float:
    """Between the largest objective below `below` and the next one."""
    divisor = int(np.gcd.reduce(objective)) or 1
    return math.inf if below is None else (below - 1) // divisor * divisor + divisor / 2


def _resolution(objective: np.ndarray, bound: float) -> float:
    """A difference of objectives that no two selections can have, or that doubles cannot tell."""
    return max(0.5 * int(np.gcd.reduce(objective)), 1e-9 * bound, 1e-9)
