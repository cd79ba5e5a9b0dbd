"""Which units to recompute: the cheapest selection inside a budget, and the smallest peak, proven optimal.

    minimise    sum_u cost_u x_u
    subject to  curve[e](x)                <= budget     for every event e
                curve[at_r](x) + extra_r x_u <= budget   for every recompute r of unit u
                sum of x_u over each path  <= 1,         x_u in {0, 1}

Choosing what to recompute by a program over the memory curve follows Checkmate (Jain et al. 2020,
arXiv:1910.02653); what a segment saves and costs, Chen et al. 2016 (arXiv:1604.06174). Here the variables are
modules instead of tensors and time steps, which makes the program small.

Method: cutting rows. The program starts with no event at all. Solve; evaluate the curve exactly (`curve`);
add the rows of the peaks that exceed the budget; repeat. Every row is valid for every selection that fits, so
the objective bounds the true optimum from below at any time, and the first solution that fits exactly is
optimal. First without integrality, which is cheap and finds nearly all rows, then with it, equal layers
folded into one (`symmetry`). A few dozen rows of a hundred thousand events are enough.

    problem -> reduce -> rows -> program -> symmetry -> HiGHS -> curve -> more rows, or Selection

What is exact: that a selection fits. It is evaluated in whole bytes, and one that exceeds the budget by less
than the solver's tolerance is excluded by a cover row. What rests on the solver's doubles: that no other is
cheaper, or that none fits; two costs are told apart down to about 1e-9 of the smaller.

Where it stops being optimal: one level of checkpointing (a unit inside a selected unit is not selected as
well), whole units, recomputed once and at one moment, and nothing but the curve that was recorded.

HiGHS is called through `highspy` and not through `scipy.optimize.milp`: 12 MB installed against 143 MB (`du` of
highspy 1.15.1, and of scipy 1.17.1 with its libraries, on Linux), and rows can be added to a model that keeps
its basis, a solution to start from can be given, and a run can end at a target.
"""

from __future__ import annotations

import time

import numpy as np

from planner.errors import PlannerError
from planner.search.cheapest import CuttingLoop, Effort, total
from planner.search.curve import CompiledProblem
from planner.search.problem import CheckpointProblem, Selection
from planner.search.reduce import reduce
from planner.search.rows import Row

_TIE_NODES = 200
"""Branch-and-bound nodes a round for finding fewer units at the same cost: not a time, so as to be repeatable."""


class SearchTimeout(PlannerError):
    """The time limit passed before a selection that fits was found, and without a proof that there is none."""


def solve(problem: CheckpointProblem, budget_bytes: int, *, time_limit_seconds: float = 10.0) -> Selection | None:
    """The cheapest selection whose peak is at most `budget_bytes`; among equals, one with few units.

    Returns:
        None if it is proven that no selection fits. Status "optimal" with gap 0.0, or "time limit" with the best found.

    Raises:
        SearchTimeout: undecided within the time limit.
    """
    return Search(problem).solve(budget_bytes, time_limit_seconds=time_limit_seconds)


def smallest_peak(problem: CheckpointProblem, *, time_limit_seconds: float = 10.0) -> Selection:
    """The selection with the smallest possible peak, and among those the cheapest. `gap` is that of the peak."""
    return Search(problem).smallest_peak(time_limit_seconds=time_limit_seconds)


class Search:
    """One problem, compiled once, for several questions. `effort` says what the last one took."""

    def __init__(self, problem: CheckpointProblem) -> None:
        self.problem = problem
        self.exact = CompiledProblem(problem)
        self.effort = Effort()
        self._cost_ns = np.array(problem.cost_ns, np.int64)
        if np.any(self._cost_ns < 0):
            raise ValueError(f"unit {int(self._cost_ns.argmin())} costs {self._cost_ns.min()} ns: costs are >= 0")

    def solve(self, budget_bytes: int, *, time_limit_seconds: float = 10.0) -> Selection | None:
        """See the function of this name."""
        began, self.effort = time.monotonic(), Effort()
        return self._cheapest(budget_bytes, None, began, began + time_limit_seconds)

    def smallest_peak(self, *, time_limit_seconds: float = 10.0) -> Selection:
        """See the function of this name."""
        began, self.effort = time.monotonic(), Effort()
        deadline = began + time_limit_seconds
        best, bound_bytes = self._lowest(deadline)
        # The solver's peak is a double. The proof is that one byte less is impossible.
        while self.exact.peak(best) > bound_bytes:
            fits, proven = self._any_below(self.exact.peak(best), deadline)
            if fits is not None:
                best = fits
            elif proven:
                bound_bytes = self.exact.peak(best)
            else:
                break
        peak_bytes = self.exact.peak(best)
        found = self._cheapest(peak_bytes, best, began, deadline)
        status = "optimal" if peak_bytes == bound_bytes and found.status == "optimal" else "time limit"
        gap = 0.0 if peak_bytes <= bound_bytes else 1.0 - bound_bytes / peak_bytes
        return self._selection(found.units, status, gap, began)

    def _cheapest(
        self, budget_bytes: int, best: tuple[int, ...] | None, began: float, deadline: float
    ) -> Selection | None:
        """`solve`, from the selection `best` if one that fits is known."""
        if self.exact.peak(()) <= budget_bytes:
            return self._selection((), "optimal", 0.0, began)
        reduced = reduce(self.problem, budget_bytes)
        if int(reduced.problem.fixed_bytes.max()) > budget_bytes:
            return None
        loop = CuttingLoop(self.exact, reduced, budget_bytes, deadline=deadline, effort=self.effort)
        if not loop.relax(self._cost_ns):
            return None
        best = None if best is None else tuple(sorted(set(best).intersection(reduced.useful)))
        found = loop.run(self._cost_ns, best)
        if found.units is None and found.proven:
            return None
        units = found.units if found.units is not None else loop.repaired(())
        if units is None:
            raise SearchTimeout(
                f"no selection within {budget_bytes} bytes was found, nor a proof that there is none, in "
                f"{time.monotonic() - began:.1f} s: allow more time, or a larger budget"
            )
        if found.proven:
            units = self._with_fewer_units(loop, units)
            return self._selection(units, "optimal", 0.0, began)
        return self._selection(units, "time limit", 1.0 - found.bound / max(1, total(self._cost_ns, units)), began)

    def _with_fewer_units(self, loop: CuttingLoop, units: tuple[int, ...]) -> tuple[int, ...]:
        """A selection of the same cost with as few units as a short search finds."""
        loop.nodes = _TIE_NODES
        no_dearer = Row(
            columns=np.arange(len(self._cost_ns)), coefficients=self._cost_ns, upper=total(self._cost_ns, units)
        )
        fewer = loop.run(np.ones(len(self._cost_ns), np.int64), units, [no_dearer]).units
        return units if total(self._cost_ns, fewer) > total(self._cost_ns, units) else fewer

    def _any_below(self, peak_bytes: int, deadline: float) -> tuple[tuple[int, ...] | None, bool]:
        """A selection with a peak below `peak_bytes`, and if there is none, whether that is proven."""
        reduced = reduce(self.problem, peak_bytes - 1)
        if int(reduced.problem.fixed_bytes.max()) >= peak_bytes:
            return None, True
        loop = CuttingLoop(self.exact, reduced, peak_bytes - 1, deadline=deadline, effort=self.effort)
        nothing = np.zeros_like(self._cost_ns)
        if not loop.relax(nothing):
            return None, True
        found = loop.run(nothing, None)
        return found.units, found.proven

    def _lowest(self, deadline: float) -> tuple[tuple[int, ...], int]:
        """A selection with a peak as small as the solver can tell, and bytes below which no peak can be."""
        floor_bytes = max(0, int(reduce(self.problem, 0).problem.fixed_bytes.max(initial=0)))
        if self.exact.peak(()) <= floor_bytes:
            return (), floor_bytes
        reduced = reduce(self.problem, floor_bytes)
        return CuttingLoop(self.exact, reduced, floor_bytes, deadline=deadline, effort=self.effort).lowest(floor_bytes)

    def _selection(self, units: tuple[int, ...], status: str, gap: float, began: float) -> Selection:
        return Selection(
            units=units,
            peak_bytes=self.exact.peak(units),
            cost_ns=total(self._cost_ns, units),
            status=status,
            gap=gap,
            seconds=time.monotonic() - began,
        )
