"""Finds how many bytes a plan may promise, so that it still fits once the allocator's slack is added.

The chooser *promises* a peak of tensors for each plan. Whether the plan fits is known only from its certificate, which
also includes the allocator's slack (rounding and fragmentation). The slack is not known in advance, and it differs
between configurations: a loss in chunks leaves other holes than full logits. So this search limits the bytes that plans
may promise, and adapts the limit in two stages. If the slack can be predicted, most plans that do not fit are not
certified: a prediction is much quicker than a certificate.

1. *One limit for all configurations* (`PromiseBudgets._together`). When a plan fails, by its certificate or by a
   prediction, the limit goes down by the bytes that the plan lacked, at least by a step that doubles with each failure,
   and the chooser is asked again. If no plan promises so few bytes, the search bisects between that limit and the
   smallest promise that failed.
2. *One limit for each configuration* (`PromiseBudgets._each`), as soon as a plan fits. The limit is the whole budget
   again for configurations of which no plan failed. Each other configuration has a range of promises that have not been
   searched, below a promise that failed. The range is bisected, unless its plans cannot be faster than the best plan by
   more than a tie. Ranges in which plans may be fastest come first.

Where it is not exact: a plan that promises less may have more slack, so a plan in a range that was given up may fit. A
plan that is predicted to fail may fit, too. In the end, the search tries such plans only if they are much faster than
the best plan (`_MUCH_FASTER`), or if no plan has fit. The number of attempts is limited, and ranges that are not wider
than `finest_bytes` are not searched.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar


class Promise(Protocol):
    """The properties of a chosen plan that this search reads."""

    @property
    def config(self) -> Hashable: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def step_ns(self) -> int: ...


_MUCH_FASTER = 1.1
"""A plan is much faster than another one if the other one takes more than this many times as long."""
_LIMITS = 5
"""Number of limits that `_between` tries, between the promises of a plan that fits and of a plan that failed."""
_NEAR = 32
"""A plan that is predicted to fail is near if it lacks at most its promise divided by this number."""

P = TypeVar("P", bound=Promise)
BudgetOf = Callable[[Any], int]
"""A configuration -> maximum number of bytes that its plans may promise."""


def search(
    propose: Callable[[BudgetOf, float], P | None],
    certify_fits: Callable[[P], bool],
    missing_bytes_of: Callable[[P], int],
    predicted_missing_bytes: Callable[[P], int],
    *,
    budgets: PromiseBudgets,
    tie: float,
    attempts: int,
    predictions: int,
    hopeless: int,
) -> P | None:
    """Returns the fastest plan that was found to fit; None if no plan fits.

    Args:
        propose: function of the limit on promised bytes of each configuration, and of a limit on the step time in
            nanoseconds; returns the fastest plan within both limits, or None.
        certify_fits: function that certifies a plan, which takes seconds, and returns True if the plan fits.
        missing_bytes_of: function that takes a plan whose certificate does not fit, and returns how many bytes it
            lacks, at least 1.
        predicted_missing_bytes: function that predicts how many bytes a plan lacks; 0 or less if the plan may fit. Of
            the plans that are predicted to fail, only the one that lacks the fewest bytes is certified, in the end: if
            a plan has fit, of those that are much faster and lack few bytes (`_NEAR`).
        budgets: the limits on promised bytes, which this search changes.
        tie: a plan replaces the best one only if it is faster by more than this factor.
        attempts: maximum number of plans that are certified.
        predictions: maximum number of predicted failures. After that, plans are certified without a prediction.
        hopeless: the search ends with None after this number of certificates if no plan has fit.
    """
    best: P | None = None
    failed: list[P] = []
    predicted: list[tuple[int, P]] = []  # plans that are predicted to fail, each with the bytes that it lacks
    fits, certified = False, 0

    def limit() -> int:
        """Returns the maximum number of certificates, which is smaller as long as no plan has fit."""
        return min(attempts, hopeless) if best is None else attempts

    def predicted_to_lack(plan: P) -> int:
        """Returns how many bytes a plan lacks by a prediction, and notes the failure; 0 if it has to be certified."""
        missing_bytes = predicted_missing_bytes(plan) if len(predicted) < predictions else 0
        if missing_bytes > 0:
            predicted.append((missing_bytes, plan))
            failed.append(plan)
        return max(missing_bytes, 0)

    def passes(plan: P) -> bool:
        """Certifies a plan, and returns True if it fits."""
        nonlocal certified
        certified += 1
        does_fit = certify_fits(plan)
        if not does_fit:
            failed.append(plan)
        return does_fit

    while certified < limit():
        below_ns = math.inf if best is None else best.step_ns / tie
        # After a plan that fits, the limits are raised first: it was the fastest plan within the present limits.
        plan = None if fits else propose(budgets.budget_of, below_ns)
        # No plan is left within these limits: raise the limits under which a faster plan may exist, or stop.
        while plan is None and budgets.widen(None if best is None else best.step_ns):
            plan = propose(budgets.budget_of, below_ns)
        if plan is None:
            break
        missing_bytes = predicted_to_lack(plan)
        fits = not missing_bytes and passes(plan)
        if fits:
            best = plan
        elif missing_bytes or certified < limit():
            budgets.fail(plan, missing_bytes or missing_bytes_of(plan))
    if best is not None and failed:
        found = _between(
            propose,
            lambda plan: not predicted_to_lack(plan) and passes(plan),
            best,
            failed,
            may_certify=lambda: certified < attempts,
        )
        best = found or best
    # A prediction may be wrong. If no plan has fit, or only a much slower one, the plan that is predicted to lack the
    # fewest bytes is certified after all.
    near = [
        (missing_bytes, plan)
        for missing_bytes, plan in predicted
        if best is None or (best.step_ns > _MUCH_FASTER * plan.step_ns and missing_bytes <= plan.peak_bytes // _NEAR)
    ]
    if near and certified < limit():
        _, plan = min(near, key=lambda pair: pair[0])
        best = plan if certify_fits(plan) else best
    return best


def _between(
    propose: Callable[[BudgetOf, float], P | None],
    does_fit: Callable[[P], bool],
    best: P,
    failed: Sequence[P],
    *,
    may_certify: Callable[[], bool],
) -> P | None:
    """Returns a plan that fits and is much faster than `best`; None if none is found.

    A plan may fit although it promises more than another plan that does not fit, because it has less slack. So limits
    between the promise of `best` and the largest promise that failed are tried, from large to small.
    """
    high_bytes, low_bytes = max(plan.peak_bytes for plan in failed), best.peak_bytes
    below_ns, tried = best.step_ns / _MUCH_FASTER, list(failed)
    if high_bytes <= low_bytes or min(plan.step_ns for plan in failed) >= below_ns:
        return None
    for number in range(1, _LIMITS + 1):
        limit_bytes = high_bytes - (high_bytes - low_bytes) * number // (_LIMITS + 1)
        plan = propose(_same_for_all(limit_bytes), below_ns) if may_certify() else None
        if plan is None:
            return None
        if plan not in tried:
            tried.append(plan)
            if does_fit(plan):
                return plan
    return None


def _same_for_all(limit_bytes: int) -> BudgetOf:
    """Returns a function with the same limit for each configuration."""
    return lambda config: limit_bytes


@dataclasses.dataclass(kw_only=True)
class _Range:
    """A range of promised bytes in which it is not known whether a plan fits. It exists after a plan failed."""

    asked_bytes: int
    """Present limit on the bytes that plans may promise; a number inside the range."""
    low_bytes: int = 0
    """All plans that promise at most this many bytes have been searched."""
    high_bytes: int
    """A plan that promised this many bytes did not fit, by its certificate or by a prediction."""
    step_ns: int
    """Step time in nanoseconds of the slowest plan that failed. Plans in the range promise fewer bytes than that plan,
    so they are not faster."""

    def fail(self, high_bytes: int, less_bytes: int, step_ns: int) -> None:
        """Record a plan that promised `high_bytes` and did not fit: set the limit to `less_bytes` below that promise.

        If all plans below that limit have been searched already, set the limit to the middle of the range.
        """
        self.high_bytes, self.step_ns = high_bytes, max(self.step_ns, step_ns)
        self.asked_bytes = high_bytes - less_bytes
        if self.asked_bytes <= self.low_bytes:
            self.halve()

    def halve(self) -> None:
        """Set the limit to the middle of the range."""
        self.asked_bytes = (self.low_bytes + self.high_bytes) // 2


class PromiseBudgets:
    """The limit on promised bytes of each configuration, adapted to the certificates of its plans."""

    def __init__(self, budget_bytes: int, *, finest_bytes: int, tie: float) -> None:
        """
        Args:
            budget_bytes: the limit of every configuration before any plan failed.
            finest_bytes: minimum step by which a limit is lowered. Ranges that are not wider are given up.
            tie: factor between step times below which two plans count as equally fast.
        """
        self._budget_bytes, self._finest_bytes, self._tie = budget_bytes, max(finest_bytes, 1), tie
        self._together: _Range | None = None
        """The range that all configurations share until a plan fits; None before the first plan fails."""
        self._each: dict[Hashable, _Range] = {}
        """By configuration, the range of each configuration of which a plan failed."""
        self._is_together = True
        self._failures = 0
        self._first_ns: int | None = None
        """Step time in nanoseconds of the first plan that failed: the fastest plan within the whole budget."""

    def budget_of(self, config: Hashable) -> int:
        """Maximum number of bytes that plans of this configuration may promise."""
        known = self._together if self._is_together else self._each.get(config)
        return self._budget_bytes if known is None else known.asked_bytes

    def fail(self, plan: Promise, missing_bytes: int) -> None:
        """Record that a plan lacked `missing_bytes` to fit, by its certificate or by a prediction."""
        config, step_ns = plan.config, plan.step_ns
        high_bytes = min(self.budget_of(config), plan.peak_bytes)
        less_bytes = max(missing_bytes, self._finest_bytes * 2**self._failures)
        self._failures += 1
        self._first_ns = step_ns if self._first_ns is None else self._first_ns
        new = _Range(asked_bytes=0, high_bytes=high_bytes, step_ns=step_ns)
        self._each.setdefault(config, new).fail(high_bytes, less_bytes, step_ns)
        if self._is_together:
            self._together = self._together or dataclasses.replace(new)
            self._together.fail(high_bytes, less_bytes, step_ns)

    def widen(self, best_ns: int | None) -> bool:
        """Raise the limits. Called when no plan within them is faster than `best_ns` by more than a tie.

        Args:
            best_ns: step time in nanoseconds of the best plan that fits; None if no plan fits so far.

        Returns:
            True if limits were raised; False if no range is left in which a faster plan may exist.
        """
        if self._first_ns is None or not self._could_be_faster(self._first_ns, best_ns):
            return False
        if self._is_together and self._together is not None:
            # Up to the shared limit, the plans of each configuration have been searched.
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
