"""Chooses the units to recompute: the cheapest selection within a budget, or the smallest peak, proven optimal.

    minimize    sum_u cost_u x_u
    subject to  curve[e](x)                <= budget     for every event e
                curve[at_r](x) + extra_r x_u <= budget   for every recompute r of unit u
                sum of x_u over each path  <= 1,         x_u in {0, 1}

Choosing what to recompute by an integer program over the memory curve follows Checkmate (Jain et al. 2020, "Checkmate:
Breaking the Memory Wall with Optimal Tensor Rematerialization", arXiv:1910.02653). The memory that a segment saves and
the time that it costs follow Chen et al. 2016 ("Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174).
Checkmate's variables are pairs of tensor and time step; here they are modules and segments, so the program is small.

Method: cutting planes, with the curve's rows as lazy constraints. The program starts without any event. Solve it;
evaluate the curve of the solution exactly (`curve`); add the rows of the peaks that exceed the budget; repeat. Every
row is valid for every selection that fits, so the objective is a lower bound of the true optimum at any time, and the
first solution that fits exactly is optimal. The loop first runs on the linear relaxation, which is cheap and finds
nearly all rows, and then with integrality, equal layers folded into one (`symmetry`). A few dozen rows are enough for
a hundred thousand events. Layers that differ only in one small tensor are still folded into one, because the rows are
sharp: they say that the tensor is alive in full as soon as one of the layers needs it (`linear_rows`).

    problem -> presolve -> linear_rows -> integer_program -> symmetry -> HiGHS -> curve -> more rows, or Selection

It is exact that a returned selection fits. Its peak is evaluated in whole bytes, and a selection that exceeds the
budget by less than the solver's tolerance is excluded by a cover inequality. That no other selection is cheaper, or
that no selection fits, is proven in the solver's doubles only: costs that differ by less than about 1e-9 of the smaller
cost count as equal. `tolerance_ns` and `below_ns` are passed to HiGHS: it stops as soon as its bound is within the
tolerance, and prunes branches above the cutoff.

Where it stops being optimal: there is one level of checkpointing (a unit nested in a selected unit is not selected as
well), units are recomputed as a whole, once and at one moment, and only the recorded curve is considered.

HiGHS is called through `highspy` and not through `scipy.optimize.milp`: it takes 12 MB installed instead of 143 MB
(`du` of highspy 1.15.1, and of scipy 1.17.1 with its libraries, on Linux); rows can be added to a model, which keeps
its basis; a start solution can be given; and a run can stop at a target.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import time

import numpy as np

from planner.errors import PlannerError
from planner.search.curve import CompiledProblem
from planner.search.cutting_loop import CuttingLoop, Effort, distance, total
from planner.search.linear_rows import Row
from planner.search.presolve import Presolve
from planner.search.problem import CheckpointProblem, Selection

_TIE_NODES = 200
"""Maximum number of branch-and-bound nodes per round of the search for fewer units at the same cost.

With a limit in nodes the result is the same in every run; with a limit in seconds it would not be.
"""


class SearchTimeout(PlannerError):
    """The time limit passed before a selection that fits and is cheap enough was found, or proven not to exist."""


def solve(
    problem: CheckpointProblem,
    budget_bytes: int,
    *,
    time_limit_seconds: float = 10.0,
    tolerance_ns: int = 0,
    below_ns: int | None = None,
) -> Selection | None:
    """Returns the cheapest selection whose peak is at most `budget_bytes`; of equally cheap ones, one with few units.

    Args:
        problem: the units, and how they change memory and time.
        budget_bytes: the largest peak that fits.
        time_limit_seconds: maximum wall-clock time.
        tolerance_ns: the result may cost up to this many nanoseconds more than the optimum. Among selections within
            this tolerance, the one with the fewest units that a short search finds is returned.
        below_ns: cutoff; only selections that cost less than this many nanoseconds count. None for no cutoff.

    Returns:
        None if it is proven that no selection fits at a cost below `below_ns`. Otherwise the best selection that was
        found. Its status is "optimal" if its cost is proven to be within the tolerance, else "time limit". Its `gap` is
        the proven relative distance to the optimum; 0.0 if no cheaper selection fits.

    Raises:
        SearchTimeout: within the time limit, neither such a selection was found nor a proof that there is none.
    """
    return Search(problem).solve(
        budget_bytes, time_limit_seconds=time_limit_seconds, tolerance_ns=tolerance_ns, below_ns=below_ns
    )


def smallest_peak(
    problem: CheckpointProblem, *, time_limit_seconds: float = 10.0, tolerance_bytes: int = 0, tolerance_ns: int = 0
) -> Selection:
    """Returns the selection with the smallest possible peak; among selections with this peak, the cheapest.

    Args:
        problem: the units, and how they change memory and time.
        time_limit_seconds: maximum wall-clock time.
        tolerance_bytes: the peak may be up to this many bytes above the smallest one.
        tolerance_ns: the cost may be up to this many nanoseconds above the lowest one for this peak.

    Returns:
        The best selection that was found. Its status is "optimal" if peak and cost are proven to be within the
        tolerances, else "time limit". Its `gap` is the relative distance of the peak to its proven lower bound.
    """
    return Search(problem).smallest_peak(
        time_limit_seconds=time_limit_seconds, tolerance_bytes=tolerance_bytes, tolerance_ns=tolerance_ns
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Question:
    """The arguments of one search, and the values of `time.monotonic()` between which it runs."""

    budget_bytes: int
    tolerance_ns: int
    below_ns: int | None
    """Only selections that cost less than this count; None for no limit."""
    takes_few: bool = True
    """True to return a selection with few units; False if any selection within the tolerance is enough."""
    began: float
    deadline: float


class Search:
    """A problem that is compiled once and solved for several budgets. `effort` counts the work of the last search."""

    def __init__(self, problem: CheckpointProblem) -> None:
        self.problem = problem
        self.exact = CompiledProblem(problem)
        self.effort = Effort()
        self._cost_ns = np.array(problem.cost_ns, np.int64)
        if np.any(self._cost_ns < 0):
            raise ValueError(f"unit {int(self._cost_ns.argmin())} costs {self._cost_ns.min()} ns: costs must be >= 0")

    @functools.cached_property
    def _presolve(self) -> Presolve:
        return Presolve(self.problem)

    def with_fixed_bytes(self, fixed_bytes: np.ndarray) -> Search:
        """Returns the search of the same problem with other bytes (int64[E]) that are alive whatever is selected.

        What does not depend on these bytes is shared, so that this takes much less time than a new `Search`.
        """
        other = copy.copy(self)
        other.problem = dataclasses.replace(self.problem, fixed_bytes=fixed_bytes)
        other.exact = self.exact.with_fixed_bytes(fixed_bytes)
        other.effort = Effort()
        other._presolve = self._presolve.with_fixed_bytes(fixed_bytes)
        return other

    def solve(
        self,
        budget_bytes: int,
        *,
        time_limit_seconds: float = 10.0,
        tolerance_ns: int = 0,
        below_ns: int | None = None,
    ) -> Selection | None:
        """See the function `solve`."""
        began, self.effort = time.monotonic(), Effort()
        return self._cheapest(
            _Question(
                budget_bytes=budget_bytes,
                tolerance_ns=tolerance_ns,
                below_ns=below_ns,
                began=began,
                deadline=began + time_limit_seconds,
            )
        )

    def may_fit(self, budget_bytes: int, *, below_ns: int | None = None, time_limit_seconds: float = 10.0) -> bool:
        """Returns False if it is proven that no selection fits at a cost below `below_ns` (None: at any cost)."""
        began, self.effort = time.monotonic(), Effort()
        deadline = began + time_limit_seconds
        if below_ns is None:
            found, proven = self._any_below(budget_bytes + 1, deadline)
            return found is not None or not proven
        any_cheaper = _Question(
            budget_bytes=budget_bytes, tolerance_ns=below_ns, below_ns=below_ns, began=began, deadline=deadline,
            takes_few=False,
        )  # fmt: skip
        try:
            return self._cheapest(any_cheaper) is not None
        except SearchTimeout:
            return True

    def smallest_peak(
        self, *, time_limit_seconds: float = 10.0, tolerance_bytes: int = 0, tolerance_ns: int = 0
    ) -> Selection:
        """See the function `smallest_peak`."""
        began, self.effort = time.monotonic(), Effort()
        deadline = began + time_limit_seconds
        # 1. The smallest peak that the solver finds, with a lower bound.
        best, bound_bytes = self._lowest(deadline, tolerance_bytes)
        # 2. The solver's peak is a double. It is proven if one byte less is infeasible; else a better one exists.
        while self.exact.peak(best) > bound_bytes + tolerance_bytes:
            fits, proven = self._any_below(self.exact.peak(best) - tolerance_bytes, deadline)
            if fits is not None:
                best = fits
            elif proven:
                bound_bytes = self.exact.peak(best) - tolerance_bytes
            else:
                break
        question = _Question(
            budget_bytes=self.exact.peak(best), tolerance_ns=tolerance_ns, below_ns=None, began=began, deadline=deadline
        )
        # 3. The cheapest selection of that peak.
        cheapest = self._cheapest(question, best)
        assert cheapest is not None  # `best` fits
        proven = cheapest.peak_bytes <= bound_bytes + tolerance_bytes and cheapest.status == "optimal"
        gap = 0.0 if cheapest.peak_bytes <= bound_bytes else 1.0 - bound_bytes / cheapest.peak_bytes
        return dataclasses.replace(cheapest, status="optimal" if proven else "time limit", gap=gap)

    def _cheapest(self, question: _Question, best: tuple[int, ...] | None = None) -> Selection | None:
        """Returns the cheapest selection, as the function `solve` does.

        Args:
            best: a selection that fits, to start from; None if none is known.
        """
        below_ns = math.inf if question.below_ns is None else question.below_ns
        # 1. Trivial cases: nothing is cheap enough, nothing has to be recomputed, or nothing can help.
        if below_ns <= 0:
            return None
        if self.exact.peak(()) <= question.budget_bytes:
            return self._selection((), 0.0, question)
        if self._presolve.lowest_bytes > question.budget_bytes:
            return None
        reduced = self._presolve.above(question.budget_bytes)
        # 2. The linear relaxation: nearly all rows, and a first bound. Costs are integers.
        loop = CuttingLoop(self.exact, reduced, question.budget_bytes, deadline=question.deadline, effort=self.effort)
        if loop.relax(self._cost_ns) > below_ns - 1:
            return None
        best = None if best is None else tuple(sorted(set(best).intersection(reduced.useful)))
        # 3. With integrality. If no selection that fits is found in time, a greedy search is tried.
        result = loop.run(self._cost_ns, best, tolerance=question.tolerance_ns, below=question.below_ns)
        if result.units is None and result.proven:
            return None
        units = result.units if result.units is not None else loop.repaired(loop.rounded)
        if units is None or total(self._cost_ns, units) >= below_ns:
            raise SearchTimeout(
                f"in {time.monotonic() - question.began:.1f} s no selection of units to recompute was found whose peak "
                f"is within {question.budget_bytes} bytes and whose cost is low enough, and it was not proven that "
                "there is none: allow more time, or a larger budget"
            )
        # 4. Of selections that cost about the same, one with few units is easier to read.
        if result.proven and question.takes_few:
            units = self._with_fewer_units(loop, units, result.bound + question.tolerance_ns, below_ns)
        return self._selection(units, result.bound, question)

    def _with_fewer_units(
        self, loop: CuttingLoop, units: tuple[int, ...], most_ns: float, below_ns: float
    ) -> tuple[int, ...]:
        """Returns a selection with the fewest units that a short search finds; it costs at most `most_ns`."""
        loop.nodes = _TIE_NODES
        most = max(total(self._cost_ns, units), int(min(int(most_ns), below_ns - 1)))
        no_dearer = Row(columns=np.arange(len(self._cost_ns)), coefficients=self._cost_ns, upper=most)
        fewer = loop.run(np.ones(len(self._cost_ns), np.int64), units, [no_dearer]).units
        return units if fewer is None or total(self._cost_ns, fewer) > most else fewer

    def _any_below(self, peak_bytes: int, deadline: float) -> tuple[tuple[int, ...] | None, bool]:
        """Returns a selection with a peak below `peak_bytes`; None if none was found.

        The second value is True if it is proven that there is none.
        """
        if self.exact.peak(()) < peak_bytes:
            return (), True
        if self._presolve.lowest_bytes >= peak_bytes:
            return None, True
        reduced = self._presolve.above(peak_bytes - 1)
        loop = CuttingLoop(self.exact, reduced, peak_bytes - 1, deadline=deadline, effort=self.effort)
        nothing = np.zeros_like(self._cost_ns)
        if math.isinf(loop.relax(nothing)):
            return None, True
        result = loop.run(nothing, None)
        return result.units, result.proven

    def _lowest(self, deadline: float, tolerance_bytes: int) -> tuple[tuple[int, ...], int]:
        """Returns a selection whose peak is as small as the solver finds, and a lower bound in bytes of all peaks."""
        floor_bytes = self._presolve.lowest_bytes
        if self.exact.peak(()) <= floor_bytes:
            return (), floor_bytes
        reduced = self._presolve.above(floor_bytes)
        loop = CuttingLoop(self.exact, reduced, floor_bytes, deadline=deadline, effort=self.effort)
        return loop.lowest(floor_bytes, tolerance_bytes)

    def _selection(self, units: tuple[int, ...], bound_ns: float, question: _Question) -> Selection:
        """Returns `units` as a `Selection`. Its status and gap follow from `bound_ns`, a lower bound of all costs."""
        cost_ns, distance_ns = total(self._cost_ns, units), distance(self._cost_ns, units, bound_ns)
        return Selection(
            units=units,
            peak_bytes=self.exact.peak(units),
            cost_ns=cost_ns,
            status="optimal" if distance_ns <= question.tolerance_ns else "time limit",
            gap=distance_ns / max(1, cost_ns),
            seconds=time.monotonic() - question.began,
        )
