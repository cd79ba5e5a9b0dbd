"""Finds how many bytes a plan may promise, so that it still fits once the allocator's slack is added.

The chooser promises a peak of *tensors*; whether a plan fits is known only after its certificate, which includes the
allocator's slack (rounding and fragmentation). The slack is not known in advance, and differs between configurations:
a loss in chunks leaves other holes than full logits. So the search adapts the budget for promises in two stages:

1. *Together.* All configurations have one budget. When a plan fails its certificate, the budget goes down by what was
   missing (at least by a step that doubles with each failure), and the chooser is asked again. If nothing is left under
   so small a budget, the search bisects between that budget and the smallest promise that failed.
2. *Each.* Once a plan fits, configurations that never failed get the whole budget back. For a configuration that
   failed, the range between what is known to be searched and what failed is bisected, the one with the fastest plan
   first, as long as a plan in the range could be faster than the best one by more than a tie.

Where it is not exact: slack is not monotonic in the promise, so that a plan in a range that was given up may fit. The
number of attempts and the width of a range (`finest_bytes`) are limited.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar


class Promise(Protocol):
    """A plan that was chosen, with the peak and the time that it promises."""

    @property
    def config(self) -> Hashable: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def step_ns(self) -> int: ...


P = TypeVar("P", bound=Promise)
BudgetOf = Callable[[Any], int]
"""A configuration -> maximum number of bytes that its plans may promise."""


def search(
    propose: Callable[[BudgetOf, float], P | None],
    short_bytes_of: Callable[[P], int],
    *,
    budgets: PromiseBudgets,
    tie: float,
    attempts: int,
    hopeless: int,
    is_over: Callable[[], bool],
) -> P | None:
    """Returns the fastest plan that was found to fit; None if no plan was.

    Args:
        propose: called with the budgets and a limit in ns; returns the fastest plan inside both, or None.
        short_bytes_of: certifies a plan and returns how many bytes it lacks; 0 or less if it fits.
        attempts: maximum number of plans that are certified.
        hopeless: maximum number of plans that fail before the first one that fits.
        is_over: asked after each attempt; True ends the search with the best plan so far.
    """
    best: P | None = None
    plan = propose(budgets.budget_of, math.inf)
    for attempt in range(attempts):
        if best is None and attempt == hopeless:
            break
        below_ns = math.inf if best is None else best.step_ns / tie
        # Nothing left under these budgets: widen them where a faster plan may still be, or stop.
        while plan is None:
            if not budgets.widen(None if best is None else best.step_ns):
                return best
            plan = propose(budgets.budget_of, below_ns)
        short_bytes = short_bytes_of(plan)
        if short_bytes <= 0:
            best = plan
        else:
            budgets.fail(plan.config, promised_bytes=plan.peak_bytes, short_bytes=short_bytes, step_ns=plan.step_ns)
        if is_over():
            break
        # After a success the budgets are widened first: under the present ones the plan was already the fastest.
        plan = None if short_bytes <= 0 else propose(budgets.budget_of, below_ns)
    return best


@dataclasses.dataclass(kw_only=True)
class _Range:
    """The range of promises in which it is not known whether a plan fits, after one of them failed."""

    asked_bytes: int
    """Maximum number of bytes that plans may promise now."""
    low_bytes: int = 0
    """All plans that promise at most this many bytes have been searched."""
    high_bytes: int
    """A plan that promised this many bytes did not fit."""
    step_ns: int
    """Step time of the slowest plan that failed; faster plans promise more bytes."""

    def fail(self, high_bytes: int, less_bytes: int, step_ns: int) -> None:
        """Record a failed plan: lower the asked bytes by `less_bytes`, or bisect if that range was searched before."""
        self.high_bytes, self.step_ns = high_bytes, max(self.step_ns, step_ns)
        self.asked_bytes = high_bytes - less_bytes
        if self.asked_bytes <= self.low_bytes:
            self.halve()

    def halve(self) -> None:
        """Set the asked bytes to the middle of the range."""
        self.asked_bytes = (self.low_bytes + self.high_bytes) // 2


class PromiseBudgets:
    """The budget of each configuration while plans are chosen and certified."""

    def __init__(self, budget_bytes: int, *, finest_bytes: int, tie: float) -> None:
        """
        Args:
            budget_bytes: the budget of every configuration before any plan failed.
            finest_bytes: ranges that are narrower are given up; also the smallest step of the budget.
            tie: factor between step times below which two plans count as equally fast.
        """
        self._budget_bytes, self._finest_bytes, self._tie = budget_bytes, max(finest_bytes, 1), tie
        self._together: _Range | None = None
        """The range of all configurations, until a plan fits; None before the first failure."""
        self._each: dict[Hashable, _Range] = {}
        """The range of each configuration that has a plan that failed."""
        self._is_together = True
        self._failures = 0
        self._first_ns: int | None = None
        """Step time of the first plan that failed. Plans that were never proposed are not faster."""

    def budget_of(self, config: Hashable) -> int:
        """Maximum number of bytes that plans of this configuration may promise."""
        known = self._together if self._is_together else self._each.get(config)
        return self._budget_bytes if known is None else known.asked_bytes

    def fail(self, config: Hashable, *, promised_bytes: int, short_bytes: int, step_ns: int) -> None:
        """Record that a plan of this configuration lacked `short_bytes` to fit."""
        high_bytes = min(self.budget_of(config), promised_bytes)
        less_bytes = max(short_bytes, self._finest_bytes * 2**self._failures)
        self._failures += 1
        self._first_ns = step_ns if self._first_ns is None else self._first_ns
        new = _Range(asked_bytes=0, high_bytes=high_bytes, step_ns=step_ns)
        self._each.setdefault(config, new).fail(high_bytes, less_bytes, step_ns)
        if self._is_together:
            self._together = self._together or dataclasses.replace(new)
            self._together.fail(high_bytes, less_bytes, step_ns)

    def widen(self, best_ns: int | None) -> bool:
        """Raise the budgets, since nothing faster than `best_ns` by more than a tie is left within them.

        Args:
            best_ns: step time of the best plan that fits; None if none does yet.

        Returns:
            False if there is no range left in which a faster plan could be.
        """
        if self._first_ns is None or not self._could_be_faster(self._first_ns, best_ns):
            return False
        if self._is_together and self._together is not None:
            # What was searched together was searched for each configuration.
            together = self._together
            together.low_bytes = together.asked_bytes
            for known in self._each.values():
                known.low_bytes = max(known.low_bytes, min(known.asked_bytes, together.asked_bytes))
            self._is_together = best_ns is None and self._is_wide(together)
            if self._is_together:
                together.halve()
            return True
        for known in self._each.values():
            known.low_bytes = max(known.low_bytes, known.asked_bytes)
        wide = [
            known
            for known in self._each.values()
            if self._is_wide(known) and self._could_be_faster(known.step_ns, best_ns)
        ]
        if wide:
            min(wide, key=lambda known: known.step_ns).halve()
        return bool(wide)

    def _could_be_faster(self, step_ns: int, best_ns: int | None) -> bool:
        return best_ns is None or best_ns > self._tie * step_ns

    def _is_wide(self, known: _Range) -> bool:
        return known.high_bytes - known.low_bytes > self._finest_bytes
