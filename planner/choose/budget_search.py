"""How much a plan may promise, so that with the allocator's slack it is inside the budget.

The search promises bytes of tensors; what the allocator needs beside them is only known of a plan that was certified,
and differs by the outer choice (a loss in chunks leaves other holes than whole logits). So first all are asked for less
by what was missing, and then for half of that again where so little leaves nothing, until something fits. Then choices
of which no plan failed may promise all of the budget again, and for those of which one did, what lies between what is
known and what failed is halved: as long as a plan there could be quicker by more than a tie.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import Any, Protocol


class Promise(Protocol):
    """A plan that was chosen."""

    outer: Hashable
    peak_bytes: int
    step_ns: int


Propose = Callable[[Callable[[Any], int], float], "Promise | None"]
"""The fastest plan whose outer choice may promise so many bytes, and that takes less time; None: there is none."""
Attempt = Callable[[Any], int]
"""A plan -> bytes that it is short of when it is certified; 0 or less: it fits."""


def search(
    ask: Propose,
    short_bytes_of: Attempt,
    *,
    descent: PromiseBudgets,
    tie: float,
    attempts: int,
    hopeless: int,
    is_over: Callable[[], bool],
) -> Promise | None:
    """The fastest plan that was found to fit; None if none was.

    Args:
        attempts: so many plans are tried at most.
        hopeless: so many that do not fit before the first that does.
        is_over: asked after each of them, whether to stop at what is found.
    """
    found: Promise | None = None
    choice = ask(descent.budget_of, math.inf)
    for attempt in range(attempts):
        if found is None and attempt == hopeless:
            break
        below_ns = math.inf if found is None else found.step_ns / tie
        while choice is None:
            if not descent.widen(None if found is None else found.step_ns):
                return found
            choice = ask(descent.budget_of, below_ns)
        short_bytes = short_bytes_of(choice)
        if short_bytes <= 0:
            found = choice
        else:
            descent.fail(
                choice.outer, promised_bytes=choice.peak_bytes, short_bytes=short_bytes, step_ns=choice.step_ns
            )
        if is_over():
            break
        choice = None if short_bytes <= 0 else ask(descent.budget_of, below_ns)
    return found


@dataclasses.dataclass(kw_only=True)
class _Range:
    """What is known of plans after one of them failed."""

    asked_bytes: int
    """What they may promise now."""
    low_bytes: int = 0
    """With so much nothing is left to find."""
    high_bytes: int
    """A plan that promised so much did not fit."""
    step_ns: int
    """Time of the slowest that did not fit: what is quicker promises more."""

    def fail(self, high_bytes: int, less_bytes: int, step_ns: int) -> None:
        """Another plan did not fit."""
        self.high_bytes, self.step_ns = high_bytes, max(self.step_ns, step_ns)
        self.asked_bytes = high_bytes - less_bytes
        if self.asked_bytes <= self.low_bytes:
            self.halve()

    def halve(self) -> None:
        """Ask in the middle of what is unknown."""
        self.asked_bytes = (self.low_bytes + self.high_bytes) // 2


class PromiseBudgets:
    """The budget of each outer choice while plans are chosen and certified."""

    def __init__(self, budget_bytes: int, *, finest_bytes: int, tie: float) -> None:
        self._budget_bytes, self._finest_bytes, self._tie = budget_bytes, max(finest_bytes, 1), tie
        self._all: _Range | None = None
        """Of all plans, until something fits."""
        self._each: dict[Hashable, _Range] = {}
        """By outer choice."""
        self._together = True
        self._failures = 0
        self._first_ns: int | None = None
        """Time of the first plan that failed: what was never tried is no quicker."""

    def budget_of(self, outer: Hashable) -> int:
        """Bytes that plans of this outer choice may promise."""
        known = self._all if self._together else self._each.get(outer)
        return self._budget_bytes if known is None else known.asked_bytes

    def fail(self, outer: Hashable, *, promised_bytes: int, short_bytes: int, step_ns: int) -> None:
        """A plan of this outer choice did not fit: `short_bytes` were missing."""
        high_bytes = min(self.budget_of(outer), promised_bytes)
        less_bytes = max(short_bytes, self._finest_bytes * 2**self._failures)
        self._failures += 1
        self._first_ns = step_ns if self._first_ns is None else self._first_ns
        new = _Range(asked_bytes=0, high_bytes=high_bytes, step_ns=step_ns)
        self._each.setdefault(outer, new).fail(high_bytes, less_bytes, step_ns)
        if self._together:
            self._all = self._all or dataclasses.replace(new)
            self._all.fail(high_bytes, less_bytes, step_ns)

    def widen(self, found_ns: int | None) -> bool:
        """Nothing is left with these budgets that is quicker than `found_ns` by more than a tie: ask for more, or stop.

        Args:
            found_ns: time of the plan that fits; None: nothing did yet.
        """
        if self._first_ns is None or not self._could_be_quicker(self._first_ns, found_ns):
            return False
        if self._together:
            self._all.low_bytes = self._all.asked_bytes
            for known in self._each.values():
                known.low_bytes = max(known.low_bytes, min(known.asked_bytes, self._all.asked_bytes))
            self._together = found_ns is None and self._is_wide(self._all)
            if self._together:
                self._all.halve()
            return True
        for known in self._each.values():
            known.low_bytes = max(known.low_bytes, known.asked_bytes)
        left = [
            one for one in self._each.values() if self._is_wide(one) and self._could_be_quicker(one.step_ns, found_ns)
        ]
        if left:
            min(left, key=lambda known: known.step_ns).halve()
        return bool(left)

    def _could_be_quicker(self, step_ns: int, found_ns: int | None) -> bool:
        return found_ns is None or found_ns > self._tie * step_ns

    def _is_wide(self, known: _Range) -> bool:
        return known.high_bytes - known.low_bytes > self._finest_bytes
