"""Computes the condition under which a storage is held, tick by tick.

The condition is true for some selections of units. It is an "or" of reasons, which begin and end during
the step. A reason is "none of these units is selected" or "this unit is selected". A storage that all layers use, such
as a mask, has reasons in every layer, and its condition changes in every layer. To write down all its reasons after
each change would take time and memory that grow with the square of the number of layers. So only what changes is
computed:

- Reasons that say nothing new are left out by the rules of `planner.search.presolve` as soon as they begin. An
  exception is a reason that would make very many others unnecessary: then all are kept. Most of the time what is left
  is short, or does not change from one layer to the next.
- What is left is kept as a stack in the order in which it began. A state of the stack is a `SharedCondition`: the last
  reason, and the number of the condition before it. Layers are nested in time, so the backward comes back to the
  conditions of the forward.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from planner.search.problem import SharedCondition

Reason = tuple[str, tuple[int, ...]]
"""('unless', units): held if none of the units is selected; ('when', (unit,)): held if the unit is selected."""

ALWAYS = -1
"""Takes the place of the number of a condition if it is true whatever is selected."""


_MOST_COVERED = 1024
"""If a rest could cover more units than this when it begins (`ConditionNow._covers`), no reason is left out because of
it. Otherwise, in a network of hundreds of layers, a reason that begins and ends in every layer would remove the reasons
of all layers and add them again, each time. The condition stays the same, but its list of reasons can be longer."""


class SharedConditions:
    """The conditions that have been numbered. Equal ones get the same number if they began in the same order."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int | None, Reason], int] = {}
        self._conditions: list[tuple[int | None, Reason]] = []
        self._lengths: list[int] = []
        """For each condition, the number of units in its reasons."""

    def number(self, before: int | None, reason: Reason) -> int:
        """Returns the number of the condition "as condition `before`, or for this reason"."""
        key = before, reason
        if key not in self._numbers:
            self._numbers[key] = len(self._conditions)
            self._conditions.append(key)
            self._lengths.append(len(reason[1]) + (0 if before is None else self._lengths[before]))
        return self._numbers[key]

    def length(self, number: int) -> int:
        """Returns the number of units in the reasons of a condition."""
        return 0 if number == ALWAYS else self._lengths[number]

    def reasons(self, number: int | None) -> Iterator[Reason]:
        """Yields the reasons of a condition, the last one first."""
        while number is not None:
            number, reason = self._conditions[number]
            yield reason

    def written_out(self, number: int) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        """Returns the reasons of a condition as `Hold.unless` and `Hold.when`."""
        reasons = list(self.reasons(number))
        unless = tuple(sorted(units for kind, units in reasons if kind == "unless"))
        return unless, tuple(sorted(unit for kind, (unit, *_) in reasons if kind == "when"))

    def used(self, numbers: set[int]) -> tuple[tuple[SharedCondition, ...], dict[int, int]]:
        """Returns these conditions and those before them, and the new number of each."""
        needed: set[int] = set()
        for number in numbers:
            at: int | None = number
            while at is not None and at not in needed:
                needed.add(at)
                at = self._conditions[at][0]
        renumbered = {number: place for place, number in enumerate(sorted(needed))}
        return tuple(
            SharedCondition(
                before=None if before is None else renumbered[before],
                unless=(units,) if kind == "unless" else (),
                when=units if kind == "when" else (),
            )
            for before, (kind, units) in (self._conditions[number] for number in renumbered)
        ), renumbered


@dataclasses.dataclass(slots=True)
class _Changes:
    """Reasons to add to the stack and to remove from it. A reason that is in both sets changes nothing."""

    added: dict[Reason, None] = dataclasses.field(default_factory=dict)
    removed: set[Reason] = dataclasses.field(default_factory=set)

    def add(self, reason: Reason) -> None:
        if reason in self.removed:
            self.removed.remove(reason)
        else:
            self.added[reason] = None

    def remove(self, reason: Reason) -> None:
        if reason in self.added:
            del self.added[reason]
        else:
            self.removed.add(reason)


class ConditionNow:
    """The condition of one storage at one time.

    Args:
        exclusive: for each unit, the units that may not be selected together with it.
        shared: gives conditions their numbers.
    """

    def __init__(self, exclusive: Sequence[frozenset[int]], shared: SharedConditions) -> None:
        self._exclusive, self._shared = exclusive, shared
        self._selected: Counter[int] = Counter()
        """The units that hold the storage if they are selected, each with the number of reasons."""
        self._sets: Counter[tuple[int, ...]] = Counter()
        """The sets of units that free the storage, each with the number of reasons."""
        self._sets_with: dict[int, set[tuple[int, ...]]] = defaultdict(set)
        self._rest: dict[tuple[int, ...], frozenset[int]] = {}
        """For each of these sets, its units that are not in `_selected`."""
        self._rests: Counter[frozenset[int]] = Counter()
        """The rests in `_rest`, each with the number of sets that have it."""
        self._large: set[frozenset[int]] = set()
        """The rests that could cover more than `_MOST_COVERED` units when they began. They are not in `_rests_from`,
        and `_covers` does not count them."""
        self._rests_from: dict[int, set[frozenset[int]]] = defaultdict(set)
        """The rests that are not in `_large`, by their smallest unit."""
        self._covers: dict[int, int] = {}
        """For each unit of `_selected`, the number of rests in `_rests_from` that it excludes. If it is not 0, the
        reason "the unit is selected" is left out, because it implies that no unit of such a rest is selected."""
        self._changes = _Changes()
        self._stack: list[tuple[Reason, int]] = []
        """The reasons that are left, each with the number of the condition that it is the last reason of."""
        self._places: dict[Reason, int] = {}
        """The place of each reason in the stack."""

    def begin(self, kind: str, units: tuple[int, ...]) -> None:
        """Adds a reason."""
        counts: Counter = self._selected if kind == "when" else self._sets
        key = units[0] if kind == "when" else units
        counts[key] += 1
        if counts[key] > 1:
            return
        if kind == "when":
            unit = units[0]
            self._set_rests({members: self._rest[members] - {unit} for members in sorted(self._sets_with[unit])})
            self._covers[unit] = sum(1 for _ in self._rests_excluded_by(unit))
            if not self._covers[unit]:
                self._changes.add((kind, units))
        else:
            for unit in units:
                self._sets_with[unit].add(units)
            self._set_rests({units: frozenset(unit for unit in units if unit not in self._selected)})

    def end(self, kind: str, units: tuple[int, ...]) -> None:
        """Removes a reason that has begun."""
        counts: Counter = self._selected if kind == "when" else self._sets
        key = units[0] if kind == "when" else units
        counts[key] -= 1
        if counts[key]:
            return
        del counts[key]
        if kind == "when":
            unit = units[0]
            if not self._covers.pop(unit):
                self._changes.remove((kind, units))
            self._set_rests({members: self._rest[members] | {unit} for members in sorted(self._sets_with[unit])})
        else:
            for unit in units:
                self._sets_with[unit].remove(units)
            self._set_rests({units: None})

    def number(self) -> int | None:
        """Returns the number of the condition; `ALWAYS` if it is true in any case, None if there is no reason."""
        if frozenset() in self._rests:
            return ALWAYS
        changes, self._changes = self._changes, _Changes()
        lowest = min((self._places[reason] for reason in changes.removed), default=len(self._stack))
        popped = [reason for reason, _ in self._stack[lowest:]]
        del self._stack[lowest:]
        for reason in popped:
            del self._places[reason]
        for reason in (*(reason for reason in popped if reason not in changes.removed), *changes.added):
            before = self._stack[-1][1] if self._stack else None
            self._places[reason] = len(self._stack)
            self._stack.append((reason, self._shared.number(before, reason)))
        return self._stack[-1][1] if self._stack else None

    def _set_rests(self, changed: Mapping[tuple[int, ...], frozenset[int] | None]) -> None:
        """Sets the units that are left of some sets. None means that a set has stopped being a reason."""
        changes: Counter[frozenset[int]] = Counter()
        for members, rest in changed.items():
            if (before := self._rest.pop(members, None)) is not None:
                changes[before] -= 1
            if rest is not None:
                self._rest[members] = rest
                changes[rest] += 1
        # Rests that begin come first, since they often exclude the same units as those that end.
        for rest, change in sorted(changes.items(), key=lambda item: -item[1]):
            count = self._rests[rest]
            if count + change:
                self._rests[rest] = count + change
            else:
                del self._rests[rest]
            if rest and not count:
                self._begin_rest(rest)
            elif rest and not count + change:
                self._end_rest(rest)

    def _begin_rest(self, rest: frozenset[int]) -> None:
        self._changes.add(("unless", tuple(sorted(rest))))
        if min(len(self._covers), *(len(self._exclusive[unit]) for unit in rest)) > _MOST_COVERED:
            self._large.add(rest)
            return
        self._rests_from[min(rest)].add(rest)
        covers = self._covers
        for unit in self._units_that_exclude(rest):
            covers[unit] += 1
            if covers[unit] == 1:
                self._changes.remove(("when", (unit,)))

    def _end_rest(self, rest: frozenset[int]) -> None:
        self._changes.remove(("unless", tuple(sorted(rest))))
        if rest in self._large:
            self._large.remove(rest)
            return
        first = min(rest)
        self._rests_from[first].remove(rest)
        if not self._rests_from[first]:
            del self._rests_from[first]
        covers = self._covers
        for unit in self._units_that_exclude(rest):
            covers[unit] -= 1
            if not covers[unit]:
                self._changes.add(("when", (unit,)))

    def _units_that_exclude(self, rest: frozenset[int]) -> list[int]:
        """Returns the units in `_covers` that may not be selected together with any unit of `rest`."""
        if not self._covers:
            return []
        fewest = min([self._exclusive[unit] for unit in rest], key=len)
        one: Collection[int] = self._covers if len(self._covers) < len(fewest) else self._covers.keys() & fewest
        return [unit for unit in one if rest <= self._exclusive[unit]]

    def _rests_excluded_by(self, unit: int) -> Iterator[frozenset[int]]:
        """Yields each rest in which no unit may be selected together with `unit`."""
        excluded = self._exclusive[unit]
        one: Collection[int] = self._rests_from if len(self._rests_from) < len(excluded) else excluded
        for first in [first for first in one if first in excluded and first in self._rests_from]:
            yield from (rest for rest in self._rests_from[first] if rest <= excluded)
