"""The cutting-plane loop: finds the selection with the least objective within a budget, or with the smallest peak.

    solve the rows so far, folded by symmetry -> unfold -> evaluate exactly -> add the violated rows -> repeat

A row is the inequality that the memory curve stays inside the budget at one event. Rows are lazy constraints: they are
generated when a solution violates them. Every row is valid for every selection that fits, and folding keeps every
solution, so each optimum on the way is a lower bound of the true optimum. The first selection that reaches the bound
and fits exactly is optimal. If a solution of the folded program cannot be unfolded to a selection that fits, the rows
that are violated enter the program, which makes its classes finer. In the worst case nothing is folded any more, and
this is plain branch and cut.

Where it stops being exact: bounds are doubles from the solver, in which differences below `_resolution` do not show.
At the deadline the best selection so far is returned with `proven=False`.
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
from planner.search.presolve import ReducedProblem
from planner.search.repair import descend
from planner.search.symmetry import Folded, fold, unfolded

_COARSE_GAP = 0.01
"""Relative gap at which a run of the solver stops while no selection that fits is known.

An exact optimum would be wasted then: it would probably change with the rows that are still missing.
"""

_MANY_COLUMNS = 5000
"""Programs with more columns are folded for the linear relaxation, too. For others its time hardly matters."""

_SHARE_OF_TIME = 0.9
"""Maximum fraction of the remaining time for one run of the solver; the rest is for unfolding and checking."""


@dataclasses.dataclass(kw_only=True)
class Effort:
    """Counts the work of a search."""

    rows: int = 0
    """Number of rows that were generated."""
    rounds: int = 0
    """Number of runs of the solver."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopResult:
    """The best selection that was found until the loop ended, with a lower bound."""

    units: tuple[int, ...] | None
    """Units of the best selection; None if no selection that fits was found."""
    bound: float
    """Lower bound: no selection that fits has a smaller objective."""
    proven: bool
    """True if `units` is optimal within the tolerance, or if `units` is None and nothing fits below the cutoff."""


class CuttingLoop:
    """The searches with one budget. They share the rows that have been generated so far.

    Args:
        exact: the original problem, to evaluate selections with.
        reduced: the problem after presolve.
        budget_bytes: the largest peak that fits.
        deadline: value of `time.monotonic()` at which to stop.
        effort: counters to update.
    """

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
        """The rows of the curve that every program contains."""
        self.covers: list[Row] = []
        """Cover inequalities. Each excludes a selection that exceeds the budget by less than the solver's tolerance."""
        self.rounded: tuple[int, ...] = ()
        """Units of which the last linear relaxation selects more than half: at most one on each path."""
        self.nodes: int | None = None
        """Maximum number of branch-and-bound nodes per run of the solver; None for no limit."""
        self._folding = True

    @property
    def left_seconds(self) -> float:
        """Number of seconds until the deadline; negative after it."""
        return self.deadline - time.monotonic()

    def relax(self, objective: np.ndarray) -> float:
        """Solves the linear relaxation, and puts the rows that bind in its solution into `core`.

        Returns:
            A lower bound of the objective of all selections that fit; inf if it is proven that no selection fits.
        """
        if self.source.column_count > _MANY_COLUMNS:
            return self._relax_folded(objective)
        solver, known, bound = solver_of(self._program(objective)), dict[RowKey, Row](), 0.0
        while self.left_seconds > 0:
            self.effort.rounds += 1
            outcome = solver.relax(time_limit_seconds=self.left_seconds)
            if outcome.infeasible:
                return math.inf
            bound = max(bound, outcome.bound - outcome.tolerance)
            if outcome.values is None:
                break
            self.rounded = self._chosen(outcome.values)
            new = self._violated(outcome.values, self.budget_bytes * (1 + 1e-9), known)
            if not new or not outcome.complete:
                self.core = [key for key, row in known.items() if _is_tight(row, outcome.values)]
                break
            solver.add(self.source.rows(new, self.budget_bytes))
            known.update((key, self.source.row(key, self.budget_bytes)[0]) for key in new)
        return bound

    def _relax_folded(self, objective: np.ndarray) -> float:
        """Does the same for many layers. In some optimum of a linear program, equal columns have equal values."""
        bound, tight = 0.0, list[RowKey]()
        while self.left_seconds > 0:
            folded = fold(self._program(objective))
            self.effort.rounds += 1
            outcome = solver_of(folded.program).relax(time_limit_seconds=self.left_seconds)
            if outcome.infeasible:
                return math.inf
            bound = max(bound, outcome.bound - outcome.tolerance)
            if outcome.values is None:
                break
            share = (outcome.values / folded.sizes)[folded.class_of]
            self.rounded = self._chosen(share)
            tight = [key for key in self.core if _is_tight(self.source.row(key, self.budget_bytes)[0], share)]
            new = self._violated(share, self.budget_bytes * (1 + 1e-9), self.core)
            if not new or not outcome.complete:
                break
            self.core += new
        self.core = tight
        return bound

    def run(
        self,
        objective: np.ndarray,
        best: tuple[int, ...] | None,
        side_rows: Sequence[Row] = (),
        *,
        tolerance: int = 0,
        below: int | None = None,
    ) -> LoopResult:
        """Minimizes an objective over the selections that fit.

        Args:
            objective: int64[U]: cost of each unit, at least 0.
            best: a selection to start from, which fits, satisfies `side_rows` and has an objective below `below`; None
                if no such selection is known.
            side_rows: further rows that every selection has to satisfy.
            tolerance: maximum difference between the result and the optimum.
            below: cutoff; only selections with a smaller objective count. None for no cutoff.
        """
        bound, coarse_gap, cutoff = 0.0, _COARSE_GAP, _cutoff(objective, below)
        while self.left_seconds > 0:
            # 1. Solve the rows so far. Until a selection fits, a coarse gap is enough, since rows are missing.
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
            # 2. Update the bound. Rows are valid for every selection that fits, so infeasible means nothing fits.
            if outcome.infeasible:
                return LoopResult(units=best, bound=bound, proven=best is None)
            bound = max(bound, outcome.bound)
            if bound >= cutoff or outcome.values is None:
                return LoopResult(units=best, bound=bound, proven=best is None and bound >= cutoff)
            # 3. Unfold the solution and check it exactly; the rows that it violates are now in `core`.
            units = self._unfolded(program, folded, outcome.values)
            if units is not None and not self._fits(units):
                units = self.repaired(units) if best is None else None
            if units is not None and total(objective, units) > cutoff:
                if distance(objective, units, bound) == 0.0:
                    return LoopResult(units=best, bound=bound, proven=best is None)
                # With a gap, HiGHS may stop at a solution above the cutoff: continue without a gap.
                units, coarse_gap, tolerance = None, 0.0, 0
            # 4. Keep the better selection, and stop if it reaches the bound.
            if units is not None:
                best = units if best is None else min(best, units, key=lambda selection: total(objective, selection))
            if best is not None and distance(objective, best, bound) <= tolerance:
                return LoopResult(units=best, bound=bound, proven=True)
            if not outcome.complete:
                break
        return LoopResult(units=best, bound=bound, proven=False)

    def lowest(self, floor_bytes: int, tolerance_bytes: int) -> tuple[tuple[int, ...], int]:
        """Returns a selection whose peak is as small as the solver finds, and a lower bound in bytes of all peaks.

        The loop cannot be used for another search afterwards, since its budget changes.

        Args:
            floor_bytes: bytes that the curve reaches whatever units are selected.
            tolerance_bytes: maximum difference between the result and the smallest peak.
        """
        best: tuple[int, ...] = ()
        always_bytes = floor_bytes
        unit_bytes = power_of_two(self.exact.peak(best))
        self.core = [RowKey(event=int(self.source.compiled.fixed_bytes.argmax()))]
        relaxed = True
        while self.left_seconds > 0:
            # 1. Minimise the peak over the rows so far, first without integrality.
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
            # 2. Generate the rows that exceed this peak.
            peak_bytes = outcome.values[-1] * unit_bytes + slack_bytes
            self.budget_bytes = int(peak_bytes)
            if relaxed:
                share = (outcome.values / folded.sizes)[folded.class_of]
                best = min(best, self._chosen(share), key=self.exact.peak)
                new = self._violated(share, peak_bytes + slack_bytes, self.core)
                self.core += new
                relaxed = bool(new)
                continue
            # 3. Unfold the solution. Stop if it reaches its peak exactly, or if no new row was found.
            known, self.covers = len(self.core), []
            units = self._unfolded(self._program(np.zeros(self.exact.unit_count, np.int64)), folded, outcome.values)
            best = best if units is None else min(best, units, key=self.exact.peak)
            progress = len(self.core) > known or (not self._folding and not folded.trivial)
            if self._fits(best) or not outcome.complete or not progress:
                break
        if not best:
            best = min((), descend(self.source.compiled, self.reduced, (), floor_bytes), key=self.exact.peak)
        return best, max(always_bytes, self._next_possible(floor_bytes, always_bytes))

    def _next_possible(self, bound_bytes: int, always_bytes: int) -> int:
        """Returns a sharper lower bound of all peaks: the smallest possible peak of at least `bound_bytes`.

        All bytes that depend on the selection are multiples of one size (usually the allocator's granularity), so peaks
        above `always_bytes`, the bytes that are alive whatever units are selected, cannot have every value.
        """
        if bound_bytes <= always_bytes:
            return bound_bytes
        compiled = self.source.compiled
        size_bytes = int(np.gcd.reduce(np.concatenate((compiled.hold_bytes, compiled.recompute_bytes)))) or 1
        remainders = np.unique(compiled.fixed_bytes[self.reduced.hot] % size_bytes)
        return bound_bytes + int(((remainders - bound_bytes) % size_bytes).min(initial=size_bytes - 1))

    def repaired(self, units: tuple[int, ...]) -> tuple[int, ...] | None:
        """Returns a selection near `units` that fits; None if a greedy search finds none."""
        lowest = descend(self.source.compiled, self.reduced, units, self.budget_bytes)
        return lowest if self._fits(lowest) else None

    def _program(self, objective: np.ndarray, side_rows: Sequence[Row] = ()) -> Program:
        """Returns the integer program that minimizes the objective subject to the rows so far."""
        rows = (*self.source.paths(), *self.source.rows(self.core, self.budget_bytes), *self.covers, *side_rows)
        cost = np.zeros(self.source.column_count, np.int64)
        cost[: len(objective)] = objective
        return Program(cost=cost, limit=self.source.limits(), integral=np.arange(len(cost)) < len(objective), rows=rows)

    def _folded(self, program: Program) -> Folded:
        """Returns `program` folded by symmetry, or unchanged if that does not make it smaller.

        In a folded program the columns of conditions have to be integers, because their class sums do not follow from
        the class sums of the units. In the unchanged program they follow from the units, and branching on them would
        take longer.
        """
        if not self._folding:
            return unfolded(program)
        whole = np.arange(len(program.cost)) < self.source.column_count
        folded = fold(dataclasses.replace(program, integral=whole))
        return unfolded(program) if folded.trivial else folded

    def _peak_program(self, unit_bytes: int) -> Program:
        """Returns the program that minimizes the peak subject to the rows so far.

        The last column is the peak, in multiples of `unit_bytes`.
        """
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
        """Returns the keys of violated rows not in `known`, if a fraction `share[u]` of each unit u is selected."""
        keys = self.source.violated(share[: self.exact.unit_count], limit_bytes)
        new = [key for key in keys if key not in known]
        self.effort.rows += len(new)
        return new

    def _unfolded(self, program: Program, folded: Folded, values: np.ndarray) -> tuple[int, ...] | None:
        """Returns a selection whose class sums are `values`; None if none is found.

        If possible, it is a selection that fits; otherwise one that exceeds the budget. Rows that the tried selections
        violate are added to `core`. If no selection has these class sums at all, folding is switched off, because new
        rows would not exclude these sums from the folded program.
        """
        if folded.trivial:
            chosen = self._chosen(values)
            if not self._fits(chosen):
                self._exclude(chosen)
            return chosen
        # A feasibility problem in the original columns, with the sums fixed, solved with lazy constraints as well.
        solver = solver_of(
            dataclasses.replace(program, cost=np.zeros_like(program.cost)),
            folded.fixing(np.rint(values), np.array(self.reduced.useful)),
        )
        units: tuple[int, ...] | None = None
        while self.left_seconds > 0:
            self.effort.rounds += 1
            outcome = solver.solve(time_limit_seconds=self.left_seconds, nodes=self.nodes)
            if outcome.values is None:
                self._folding = units is not None
                return units
            units = self._chosen(outcome.values)
            if self._fits(units):
                return units
            solver.add(self._exclude(units))
        return units

    def _exclude(self, units: tuple[int, ...]) -> list[Row]:
        """Adds rows to the program that exclude the selection `units`, which exceeds the budget, and returns them.

        They are the rows that the selection violates. If the program has all of these already, the solver violated one
        of them by its tolerance. In that case a cover inequality is added.
        """
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
    """Returns the sum of `objective` over the selected units."""
    return int(objective[list(units)].sum())


def distance(objective: np.ndarray, units: Sequence[int], bound: float) -> float:
    """Returns how far the objective of a selection is above the lower bound; 0.0 if less than the resolution."""
    room = total(objective, units) - bound
    return 0.0 if room < _resolution(objective, bound) else room


def _is_tight(row: Row, values: np.ndarray) -> bool:
    """True if the row is (nearly) satisfied with equality."""
    room = row.upper - float(row.coefficients @ values[row.columns])
    return room <= 1e-6 * float(np.abs(row.coefficients).sum())


def _cutoff(objective: np.ndarray, below: int | None) -> float:
    """Returns a cutoff for the solver: between the largest possible objective below `below` and the next larger one.

    The cutoff is inf if `below` is None.
    """
    divisor = int(np.gcd.reduce(objective)) or 1
    return math.inf if below is None else (below - 1) // divisor * divisor + divisor / 2


def _resolution(objective: np.ndarray, bound: float) -> float:
    """Returns the smallest difference of objectives that counts: costs are integers, and bounds are doubles."""
    return max(0.5 * int(np.gcd.reduce(objective)), 1e-9 * bound, 1e-9)
