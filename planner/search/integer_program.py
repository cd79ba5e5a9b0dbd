"""One integer program in whole numbers, handed to HiGHS.

    minimise  cost * x   subject to  rows * x <= upper,  0 <= x <= limit,  x whole where `integral`

Where the peak is minimised, it is a column of its own, the last, in units of `peak_unit_bytes`, and the rows
that it is part of are handed over as they are.

HiGHS works in doubles with tolerances. So that it never rejects what satisfies a row, every row is relaxed by
half of its smallest step (its left side is a whole number); and so that it can keep tight tolerances, rows and
costs are divided by powers of two. What it accepts wrongly is for the caller to refuse.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import highspy
import numpy as np

from planner.search.linear_rows import Row

_LARGEST_COEFFICIENT = 1 << 12

_SMALLEST_GAP = 1e-6
"""Of objectives, after scaling: what HiGHS tells apart."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """An integer program. Every number in it is whole."""

    cost: np.ndarray
    limit: np.ndarray
    integral: np.ndarray
    rows: tuple[Row, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run of the solver found."""

    status: highspy.HighsModelStatus
    values: np.ndarray | None
    """float64 of each column; None if the solver holds no solution."""
    bound: float
    """No solution has a smaller objective, up to `tolerance`."""
    tolerance: float

    @property
    def infeasible(self) -> bool:
        return self.status in (
            highspy.HighsModelStatus.kInfeasible,
            highspy.HighsModelStatus.kUnboundedOrInfeasible,
            highspy.HighsModelStatus.kObjectiveBound,
        )

    @property
    def complete(self) -> bool:
        """Whether the solver ended by itself: not by a limit on time or nodes."""
        return self.status in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kObjectiveTarget)


class Solver:
    """A HiGHS model of whole-number rows. Deterministic: one thread, a fixed seed."""

    def __init__(self, *, limit: np.ndarray, integral: np.ndarray) -> None:
        self._highs = highspy.Highs()
        self._set(output_flag=False, threads=1, random_seed=0, mip_rel_gap=0.0, mip_feasibility_tolerance=1e-7)
        # Searches in sub-programs: on recorded models they took longer than the branching that they are to save.
        self._set(mip_heuristic_run_rins=False, mip_heuristic_run_rens=False)
        self._set(primal_feasibility_tolerance=1e-9, dual_feasibility_tolerance=1e-9)
        self._highs.addVars(len(limit), np.zeros(len(limit)), limit.astype(np.float64))
        whole = np.flatnonzero(integral).astype(np.int32)
        self._highs.changeColsIntegrality(
            len(whole), whole, np.full(len(whole), int(highspy.HighsVarType.kInteger), np.uint8)
        )
        self._objective_scale = 1.0

    def minimise(self, cost: np.ndarray) -> None:
        """Minimise `cost`, whole numbers >= 0, over the first `len(cost)` columns."""
        divisor = int(np.gcd.reduce(cost)) or 1
        self._objective_scale = divisor * power_of_two(int(cost.max(initial=1)) // divisor)
        self._highs.changeColsCost(len(cost), np.arange(len(cost), dtype=np.int32), cost / self._objective_scale)

    def add(self, row: Row) -> None:
        """Add a row: its left side is at most its right side."""
        row = row.divided() if row.whole else row
        step = power_of_two(int(np.abs(row.coefficients).max(initial=1)))
        upper = (row.upper + (0.5 if step > 1 and row.whole else 0.0)) / step
        lower, starts = np.array([-highspy.kHighsInf]), np.zeros(1, np.int32)
        self._highs.addRows(
            1, lower, np.array([upper]), len(row.columns), starts, row.columns.astype(np.int32), row.coefficients / step
        )

    def relax(self, *, time_limit_seconds: float) -> Outcome:
        """Solve without integrality, from the last basis."""
        self._set(solve_relaxation=True, objective_bound=math.inf)
        return self._run(time_limit_seconds, relaxed=True)

    def solve(
        self,
        *,
        time_limit_seconds: float,
        gap: float = 0.0,
        tolerance: float = 0.0,
        below: float = math.inf,
        target: float = -math.inf,
        nodes: int | None = None,
        start: np.ndarray | None = None,
    ) -> Outcome:
        """Solve until the objective is proven to the relative `gap` or the absolute `tolerance`.

        Stops early at a solution whose objective is at most `target`, or after so many `nodes`. Objectives from
        `below` on do not count: without a smaller one the program is infeasible. Begins from the solution
        `start` (a value for each column) if there is one.
        """
        scale = self._objective_scale
        self._set(solve_relaxation=False, mip_max_nodes=highspy.kHighsIInf if nodes is None else nodes)
        self._set(mip_rel_gap=gap, mip_abs_gap=max(_SMALLEST_GAP, tolerance / scale))
        self._set(objective_target=target / scale, objective_bound=below / scale)
        if start is not None:
            self._highs.setSolution(len(start), np.arange(len(start), dtype=np.int32), start.astype(np.float64))
        return self._run(time_limit_seconds, relaxed=False)

    def _run(self, time_limit_seconds: float, *, relaxed: bool) -> Outcome:
        # HiGHS adds up the time of all runs of one model and compares that with the limit.
        self._set(time_limit=self._highs.getRunTime() + max(time_limit_seconds, 0.0))
        self._highs.run()
        info, status = self._highs.getInfo(), self._highs.getModelStatus()
        optimal = status == highspy.HighsModelStatus.kOptimal
        bound = info.mip_dual_bound if not relaxed else info.objective_function_value if optimal else -np.inf
        values = None
        if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
            values = np.array(self._highs.getSolution().col_value)
        return Outcome(
            status=status,
            values=values,
            bound=bound * self._objective_scale,
            tolerance=_SMALLEST_GAP * self._objective_scale,
        )

    def _set(self, **options: object) -> None:
        for name, value in options.items():
            if self._highs.setOptionValue(name, value) != highspy.HighsStatus.kOk:
                raise ValueError(f"HiGHS refuses the option {name} = {value!r}")


def solver_of(program: Program, extra_rows: Sequence[Row] = ()) -> Solver:
    """A solver loaded with `program` and some more rows."""
    solver = Solver(limit=program.limit, integral=program.integral)
    solver.minimise(program.cost)
    for row in (*program.rows, *extra_rows):
        solver.add(row)
    return solver


def power_of_two(largest: int) -> int:
    """The power of two that brings `largest` down to at most _LARGEST_COEFFICIENT; 1 if it already is."""
    return 1 << max(0, (largest // _LARGEST_COEFFICIENT).bit_length())
