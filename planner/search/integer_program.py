"""An integer program with integer coefficients, solved by HiGHS.

    minimize  cost * x   subject to  rows * x <= upper,  0 <= x <= limit,  x integer where `integral`

HiGHS works in doubles with tolerances. Every row is therefore relaxed by half of its smallest step (its left side is an
integer), so that HiGHS never rejects a solution that satisfies the row; and rows and costs are divided by powers of
two, so that tight tolerances are possible. HiGHS may accept a solution that violates a row by its tolerance, so the
caller has to check the solution exactly.

If the peak is minimized, it is the last column, in multiples of `peak_unit_bytes`. The left sides of rows that contain
this column need not be integers (`Row.whole` is False), so these rows are not relaxed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import highspy
import numpy as np

from planner.search.linear_rows import Row

_LARGEST_COEFFICIENT = 1 << 12
"""Maximum coefficient of a scaled row."""

_SMALLEST_GAP = 1e-6
"""Smallest difference between scaled objectives that HiGHS resolves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """An integer program; all its numbers are integers."""

    cost: np.ndarray
    """int64[columns]: coefficient of each column in the objective."""
    limit: np.ndarray
    """int64[columns]: upper bound of each column; all lower bounds are 0."""
    integral: np.ndarray
    """bool[columns]: True for columns that have to be integers."""
    rows: tuple[Row, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one run of the solver."""

    status: highspy.HighsModelStatus
    values: np.ndarray | None
    """float64[columns]: the best solution that the solver found; None if it found none."""
    bound: float
    """Lower bound: no solution has a smaller objective, up to `tolerance`."""
    tolerance: float
    """Absolute tolerance of `bound`, in units of the objective."""

    @property
    def infeasible(self) -> bool:
        """True if it is proven that there is no solution (with an objective below the given cutoff)."""
        return self.status in (
            highspy.HighsModelStatus.kInfeasible,
            highspy.HighsModelStatus.kUnboundedOrInfeasible,
            highspy.HighsModelStatus.kObjectiveBound,
        )

    @property
    def complete(self) -> bool:
        """True if the solver finished, and was not stopped by a limit on time or nodes."""
        return self.status in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kObjectiveTarget)


class Solver:
    """A HiGHS model to which rows of integers are added. Its runs are repeatable: one thread and a fixed seed."""

    def __init__(self, *, limit: np.ndarray, integral: np.ndarray) -> None:
        self._highs = highspy.Highs()  # type: ignore[no-untyped-call]  # highspy does not annotate the constructor
        self._set(output_flag=False, threads=1, random_seed=0, mip_rel_gap=0.0, mip_feasibility_tolerance=1e-7)
        # RINS and RENS search in sub-programs; on recorded models they took longer than the branching they save.
        self._set(mip_heuristic_run_rins=False, mip_heuristic_run_rens=False)
        self._set(primal_feasibility_tolerance=1e-9, dual_feasibility_tolerance=1e-9)
        self._highs.addVars(len(limit), np.zeros(len(limit)), limit.astype(np.float64))
        whole = np.flatnonzero(integral).astype(np.int32)
        self._highs.changeColsIntegrality(
            len(whole), whole, np.full(len(whole), int(highspy.HighsVarType.kInteger), np.uint8)
        )
        self._objective_scale = 1.0

    def minimise(self, cost: np.ndarray) -> None:
        """Sets the objective: minimize `cost * x` over the first `len(cost)` columns. Costs are integers >= 0."""
        divisor = int(np.gcd.reduce(cost)) or 1
        self._objective_scale = divisor * power_of_two(int(cost.max(initial=1)) // divisor)
        self._highs.changeColsCost(len(cost), np.arange(len(cost), dtype=np.int32), cost / self._objective_scale)

    def add(self, rows: Sequence[Row]) -> None:
        """Adds rows, scaled and relaxed as the module's docstring describes."""
        if not rows:
            return
        scaled = [row.divided() if row.whole else row for row in rows]
        steps = [power_of_two(int(np.abs(row.coefficients).max(initial=1))) for row in scaled]
        upper = [
            (row.upper + (0.5 if step > 1 and row.whole else 0.0)) / step
            for row, step in zip(scaled, steps, strict=True)
        ]
        ends = np.cumsum([len(row.columns) for row in scaled])
        self._highs.addRows(
            len(rows),
            np.full(len(rows), -highspy.kHighsInf),
            np.array(upper),
            int(ends[-1]),
            np.concatenate(([0], ends[:-1])).astype(np.int32),
            np.concatenate([row.columns for row in scaled]).astype(np.int32),
            np.concatenate([row.coefficients / step for row, step in zip(scaled, steps, strict=True)]),
        )

    def relax(self, *, time_limit_seconds: float) -> Outcome:
        """Solves the linear relaxation, starting from the basis of the last run."""
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
        """Solves the integer program by branch and cut.

        Args:
            time_limit_seconds: maximum wall-clock time.
            gap: relative distance to the optimum at which to stop.
            tolerance: absolute distance to the optimum at which to stop.
            below: cutoff; a solution counts only if its objective is smaller.
            target: stop at a solution whose objective is at most this.
            nodes: maximum number of branch-and-bound nodes; None for no limit.
            start: a solution to start from, one value per column; None if there is none.
        """
        scale = self._objective_scale
        self._set(solve_relaxation=False, mip_max_nodes=highspy.kHighsIInf if nodes is None else nodes)
        self._set(mip_rel_gap=gap, mip_abs_gap=max(_SMALLEST_GAP, tolerance / scale))
        self._set(objective_target=target / scale, objective_bound=below / scale)
        if start is not None:
            self._highs.setSolution(len(start), np.arange(len(start), dtype=np.int32), start.astype(np.float64))
        return self._run(time_limit_seconds, relaxed=False)

    def _run(self, time_limit_seconds: float, *, relaxed: bool) -> Outcome:
        # HiGHS compares the limit with the time of all runs of one model together.
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

    def _set(self, **options: bool | int | float) -> None:
        for name, value in options.items():
            if self._highs.setOptionValue(name, value) != highspy.HighsStatus.kOk:
                raise ValueError(
                    f"HiGHS rejects the option {name} = {value!r}: install a version of highspy that has this option "
                    "(1.10 or newer)"
                )


def solver_of(program: Program, extra_rows: Sequence[Row] = ()) -> Solver:
    """Returns a solver loaded with `program` and the extra rows."""
    solver = Solver(limit=program.limit, integral=program.integral)
    solver.minimise(program.cost)
    solver.add((*program.rows, *extra_rows))
    return solver


def power_of_two(largest: int) -> int:
    """Returns the power of two by which `largest` is divided so that it is at most _LARGEST_COEFFICIENT."""
    return 1 << max(0, (largest // _LARGEST_COEFFICIENT).bit_length())
