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
folded into one (`symmetry`). A few dozen rows of a hundred thousand events are enough. What folding needs are
sharp rows: layers that differ in nothing but one small tensor are still one class, as long as the rows say that
the tensor is there in full as soon as one of them needs it (`rows`).

    problem -> reduce -> rows -> program -> symmetry -> HiGHS -> curve -> more rows, or Selection

What is exact: that a selection fits. It is evaluated in whole bytes, and one that exceeds the budget by less
than the solver's tolerance is excluded by a cover row. What rests on the solver's doubles: that no other is
cheaper, or that none fits; two costs are told apart down to about 1e-9 of the smaller. Tolerance and cutoff are
limits of HiGHS itself: it ends as soon as its bound is that close, and drops branches that cannot be cheaper.

Where it stops being optimal: one level of checkpointing (a unit inside a selected unit is not selected as
well), whole units, recomputed once and at one moment, and nothing but the curve that was recorded.

HiGHS is called through `highspy` and not through `scipy.optimize.milp`: 12 MB installed against 143 MB (`du` of
highspy 1.15.1, and of scipy 1.17.1 with its libraries, on Linux), and rows can be added to a model that keeps
its basis, a solution to start from can be given, and a run can end at a target.
"""

from __future__ import annotations

import dataclasses
import math
import time

import numpy as np

from planner.errors import PlannerError
from planner.search.curve import CompiledProblem
from planner.search.cutting_loop import CuttingLoop, Effort, distance, total
from planner.search.linear_rows import Row
from planner.search.problem import CheckpointProblem, Selection
from planner.search.reduce import reduce

_TIE_NODES = 200
"""Branch-and-bound nodes a round for finding fewer units at the same cost: not a time, so as to be repeatable."""


class SearchTimeout(PlannerError):
    """The time limit passed before a selection was found that fits, and is cheap enough, or a proof of none."""


def solve(
    problem: CheckpointProblem,
    budget_bytes: int,
    *,
    time_limit_seconds: float = 10.0,
    tolerance_ns: int = 0,
    below_ns: int | None = None,
) -> Selection | None:
    """The cheapest selection whose peak is at most `budget_bytes`; among equals, one with few units.

    Args:
        problem: what may be selected, and what that does.
        budget_bytes: the largest peak that fits.
        time_limit_seconds: of the wall clock.
        tolerance_ns: differences in cost up to this do not matter. Any selection proven to cost no more than that
            above the optimum is an answer, with as few units as a short search finds among those.
        below_ns: only selections that cost less than this are of interest.

    Returns:
        None if it is proven that no selection fits at a cost below `below_ns`. Else a selection with status
        "optimal" if its cost is proven to be within the tolerance, or "time limit" with the best one found.
        `gap` is what was proven, whatever the tolerance; it is 0.0 if no cheaper selection fits.

    Raises:
        SearchTimeout: undecided within the time limit.
    """
    return Search(problem).solve(
        budget_bytes, time_limit_seconds=time_limit_seconds, tolerance_ns=tolerance_ns, below_ns=below_ns
    )


def smallest_peak(
    problem: CheckpointProblem, *, time_limit_seconds: float = 10.0, tolerance_bytes: int = 0, tolerance_ns: int = 0
) -> Selection:
    """The selection with the smallest possible peak, and the cheapest one of that peak.

    Status "optimal" if no selection has a peak smaller by more than `tolerance_bytes`, and none with at most the
    returned peak is cheaper by more than `tolerance_ns`; both proven. `gap` is that of the peak.
    """
    return Search(problem).smallest_peak(
        time_limit_seconds=time_limit_seconds, tolerance_bytes=tolerance_bytes, tolerance_ns=tolerance_ns
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Question:
    """What to solve for, and how long."""

    budget_bytes: int
    tolerance_ns: int
    below_ns: int | None
    began: float
    deadline: float


class Search:
    """One problem, compiled once, for several questions. `effort` says what the last one took."""

    def __init__(self, problem: CheckpointProblem) -> None:
        self.problem = problem
        self.exact = CompiledProblem(problem)
        self.effort = Effort()
        self._cost_ns = np.array(problem.cost_ns, np.int64)
        if np.any(self._cost_ns < 0):
            raise ValueError(f"unit {int(self._cost_ns.argmin())} costs {self._cost_ns.min()} ns: costs are >= 0")

    def solve(
        self,
        budget_bytes: int,
        *,
        time_limit_seconds: float = 10.0,
        tolerance_ns: int = 0,
        below_ns: int | None = None,
    ) -> Selection | None:
        """See the function of this name."""
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

    def smallest_peak(
        self, *, time_limit_seconds: float = 10.0, tolerance_bytes: int = 0, tolerance_ns: int = 0
    ) -> Selection:
        """See the function of this name."""
        began, self.effort = time.monotonic(), Effort()
        deadline = began + time_limit_seconds
        best, bound_bytes = self._lowest(deadline, tolerance_bytes)
        # The solver's peak is a double. The proof is that one byte less is impossible.
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
        found = self._cheapest(question, best)
        proven = found.peak_bytes <= bound_bytes + tolerance_bytes and found.status == "optimal"
        gap = 0.0 if found.peak_bytes <= bound_bytes else 1.0 - bound_bytes / found.peak_bytes
        return dataclasses.replace(found, status="optimal" if proven else "time limit", gap=gap)

    def _cheapest(self, question: _Question, best: tuple[int, ...] | None = None) -> Selection | None:
        """`solve`, from the selection `best` if one that fits is known."""
        below_ns = math.inf if question.below_ns is None else question.below_ns
        if below_ns <= 0:
            return None
        if self.exact.peak(()) <= question.budget_bytes:
            return self._selection((), 0.0, question)
        reduced = reduce(self.problem, question.budget_bytes)
        if int(reduced.problem.fixed_bytes.max()) > question.budget_bytes:
            return None
        loop = CuttingLoop(self.exact, reduced, question.budget_bytes, deadline=question.deadline, effort=self.effort)
        if loop.relax(self._cost_ns) > below_ns - 1:
            return None
        best = None if best is None else tuple(sorted(set(best).intersection(reduced.useful)))
        found = loop.run(self._cost_ns, best, tolerance=question.tolerance_ns, below=question.below_ns)
        if found.units is None and found.proven:
            return None
        units = found.units if found.units is not None else loop.repaired(())
        if units is None or total(self._cost_ns, units) >= below_ns:
            raise SearchTimeout(
                f"no selection within {question.budget_bytes} bytes was found, nor a proof that there is none, in "
                f"{time.monotonic() - question.began:.1f} s: allow more time, or a larger budget"
            )
        if found.proven:
            units = self._with_fewer_units(loop, units, found.bound + question.tolerance_ns, below_ns)
        return self._selection(units, found.bound, question)

    def _with_fewer_units(
        self, loop: CuttingLoop, units: tuple[int, ...], most_ns: float, below_ns: float
    ) -> tuple[int, ...]:
        """A selection of about the same cost with as few units as a short search finds."""
        loop.nodes = _TIE_NODES
        most = max(total(self._cost_ns, units), min(int(most_ns), below_ns - 1))
        no_dearer = Row(columns=np.arange(len(self._cost_ns)), coefficients=self._cost_ns, upper=most)
        fewer = loop.run(np.ones(len(self._cost_ns), np.int64), units, [no_dearer]).units
        return units if total(self._cost_ns, fewer) > most else fewer

    def _any_below(self, peak_bytes: int, deadline: float) -> tuple[tuple[int, ...] | None, bool]:
        """A selection with a peak below `peak_bytes`, and if there is none, whether that is proven."""
        reduced = reduce(self.problem, peak_bytes - 1)
        if int(reduced.problem.fixed_bytes.max()) >= peak_bytes:
            return None, True
        loop = CuttingLoop(self.exact, reduced, peak_bytes - 1, deadline=deadline, effort=self.effort)
        nothing = np.zeros_like(self._cost_ns)
        if math.isinf(loop.relax(nothing)):
            return None, True
        found = loop.run(nothing, None)
        return found.units, found.proven

    def _lowest(self, deadline: float, tolerance_bytes: int) -> tuple[tuple[int, ...], int]:
        """A selection with a peak as small as the solver can tell, and bytes below which no peak can be."""
        floor_bytes = max(0, int(reduce(self.problem, 0).problem.fixed_bytes.max(initial=0)))
        if self.exact.peak(()) <= floor_bytes:
            return (), floor_bytes
        reduced = reduce(self.problem, floor_bytes)
        loop = CuttingLoop(self.exact, reduced, floor_bytes, deadline=deadline, effort=self.effort)
        return loop.lowest(floor_bytes, tolerance_bytes)

    def _selection(self, units: tuple[int, ...], bound_ns: float, question: _Question) -> Selection:
        """`units` as the answer, if `bound_ns` is proven to be the least cost."""
        cost_ns, distance_ns = total(self._cost_ns, units), distance(self._cost_ns, units, bound_ns)
        return Selection(
            units=units,
            peak_bytes=self.exact.peak(units),
            cost_ns=cost_ns,
            status="optimal" if distance_ns <= question.tolerance_ns else "time limit",
            gap=distance_ns / max(1, cost_ns),
            seconds=time.monotonic() - question.began,
        )
