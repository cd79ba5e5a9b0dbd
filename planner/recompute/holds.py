"""The memory curve of a step as a function of the selected units: which storages are held, and on which condition.

`recompute.units` describes the effects of a unit. Here they become times for which a storage is alive always, unless a
unit is selected, or only if a unit is selected.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from planner.progress import Watch
from planner.recompute.conditions import ALWAYS, ConditionNow, SharedConditions
from planner.recompute.recompute_cost import Rerun
from planner.recompute.repeated_gathers import RepeatedGathers
from planner.recording.step_graph import StepGraph
from planner.search.problem import Hold, SharedCondition
from planner.search.shared import Condition


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """A unit (by its number) that applies to a call, and the cost of the call if the unit is selected."""

    unit: int
    rerun: Rerun


Options = dict[int, tuple[Option, ...]]
"""For each call, the units that recompute or offload it. A unit that keeps no outputs comes before those that do."""

LONGEST = 100_000
"""Maximum number of units in the conditions of one storage that are written out for each time.

Longer ones are `SharedCondition`s. Both mean the same, but the search takes other ways to equally good selections.
"""

_BETWEEN_CHECKS = 256
"""Number of saved tensors, or of storages, between two checks of the time."""

_ALWAYS: Condition = ((),), ()
_NEVER: Condition = (), ()

_Time = tuple[int, int, int]
"""(first tick, tick after the last, number of the condition)."""

_Piece = tuple[int, int, str, tuple[int, ...]]
"""(first tick, tick after the last, condition, units): a time for which a storage is held, and under which condition.

The condition is 'fixed' (always held), 'unless' (held if none of the units is selected) or 'when' (held if the unit is
selected).
"""


def holds_of(
    graph: StepGraph,
    options: Options,
    sizes: list[int],
    gathers: Mapping[int, RepeatedGathers],
    exclusive: Sequence[frozenset[int]],
    watch: Watch,
) -> tuple[np.ndarray, tuple[Hold, ...], tuple[SharedCondition, ...]]:
    """Returns int64[ticks] of bytes that are always alive, the storages that are alive only on a condition, and the
    conditions that these storages share.

    Args:
        gathers: by number of a unit, the gathers that the step repeats if the unit is selected.
        exclusive: for each unit, the units that may not be selected together with it.
        watch: is checked after every `_BETWEEN_CHECKS` saved tensors or storages.

    Raises:
        TimeIsUp: the time of the watch is up.
    """
    pieces: dict[int, list[_Piece]] = defaultdict(list)
    copies: dict[int, list[_Piece]] = defaultdict(list)  # of a storage that exists twice
    for save in watch.checking(graph.saves, every=_BETWEEN_CHECKS):
        if save.storage is None:
            continue
        start, release = save.pack, graph.ticks if save.release is None else save.release
        of_calls = [(call, option) for call in graph.enclosing(save.call) for option in options.get(call, ())]
        chosen = [option for _, option in of_calls]
        # 1. From the save until `back`: held unless a unit is selected that frees the storage and makes it again at
        #    `back`. Units differ in `back`, so the time is divided at the `back` of every unit.
        backs = [(min(option.rerun.back(save), release), option) for option in chosen if not option.rerun.keeps(save)]
        for back in sorted({back for back, _ in backs if back > start}):
            units = units_in(option for later, option in backs if later >= back)
            pieces[save.storage].append((start, back, "unless", units))
            start = back
        # 2. From the last `back` until the first read: always held.
        unpack = release if save.unpack is None or not chosen else min(save.unpack, release)
        if unpack > start:
            pieces[save.storage].append((start, unpack, "fixed", ()))
        # 3. From the read until the node's release: autograd holds it, but a checkpoint frees it after the read.
        if release > unpack:
            units = units_in(option for option in chosen if option.rerun.gives_away(save.storage))
            pieces[save.storage].append((unpack, release, "unless" if units else "fixed", units))
        # 4. What a unit makes again is a second copy, if something other than autograd still holds the first one.
        born, died = next(
            (life for life in graph.storages[save.storage].lives if life[0] < save.pack <= life[1]), (0, 0)
        )
        for call, option in of_calls if any(back < died for back, _ in backs) else ():
            if option.rerun.makes(save, since=graph.calls[call].start, born=born):
                first = min(option.rerun.back(save), release)
                last = min(unpack if option.rerun.gives_away(save.storage) else release, died)
                copies[save.storage].append((first, last, "when", (option.unit,)))
    # 5. Storages that a unit holds, for example the inputs of a recompute: held when the unit is selected.
    for option in itertools.chain.from_iterable(options.values()):
        for storage, start, stop in option.rerun.holds:
            pieces[storage].append((start, stop, "when", (option.unit,)))
    # 6. Parameters that stay gathered unless a unit is gathered again, and the buffers of its second gather.
    in_gathers: set[int] = set()
    for unit, repeated in gathers.items():
        for storage, start, stop in repeated.gaps:
            pieces[storage].append((start, stop, "unless", (unit,)))
        for storage in repeated.buffers:
            pieces[storage] += [(start, stop, "when", (unit,)) for start, stop in graph.storages[storage].lives]
        in_gathers |= repeated.buffers
    # 7. A storage counts once, even if it is held for several reasons at the same time.
    delta = np.zeros(graph.ticks + 1, dtype=np.int64)
    numbered, times = SharedConditions(), []
    held: list[tuple[int, list[_Piece]]] = []
    for number, record in enumerate(graph.storages):
        always = [] if number in in_gathers else record.lives
        lives: list[_Piece] = [(start, stop, "fixed", ()) for start, stop in always]
        held.append((number, lives + pieces.get(number, [])))
    for number, of_one in watch.checking((*held, *copies.items()), every=_BETWEEN_CHECKS):
        conditional: list[_Time] = []
        for start, stop, condition in times_of(of_one, exclusive, numbered):
            if condition is None:
                delta[start] += sizes[number]
                delta[stop] -= sizes[number]
            else:
                conditional.append((start, stop, condition))
        if conditional:
            times.append((sizes[number], conditional))
    holds, shared = holds_at(times, numbered, longest=LONGEST)
    return np.cumsum(delta)[:-1], holds, shared


def units_in(options: Iterable[Option]) -> tuple[int, ...]:
    return tuple(sorted({option.unit for option in options}))


def times_of(
    pieces: list[_Piece], exclusive: Sequence[frozenset[int]], shared: SharedConditions
) -> list[tuple[int, int, int | None]]:
    """Merges the pieces of one storage into times that do not overlap.

    Returns:
        For each time: the first tick, the tick after the last, and the number of the condition. The number is None if
        the storage is held whatever is selected.
    """
    if len(pieces) == 1 and pieces[0][2] == "fixed":
        return [(pieces[0][0], pieces[0][1], None)]
    changes: dict[int, list[tuple[str, tuple[int, ...], bool]]] = defaultdict(list)
    for start, stop, kind, units in pieces:
        if start < stop:
            changes[start].append((kind, units, True))
            changes[stop].append((kind, units, False))
    fixed, now = 0, ConditionNow(exclusive, shared)
    result: list[tuple[int, int, int | None]] = []
    for start, stop in itertools.pairwise(sorted(changes)):
        for kind, units, begins in sorted(changes[start], key=lambda change: not change[2]):
            if kind == "fixed":
                fixed += 1 if begins else -1
            elif begins:
                now.begin(kind, units)
            else:
                now.end(kind, units)
        if fixed:
            result.append((start, stop, None))
        elif (condition := now.number()) is not None:
            # Adjacent times with the same condition are joined.
            if result and result[-1][1:] == (start, condition):
                start = result.pop()[0]
            result.append((start, stop, condition))
    return result


def holds_at(
    times: list[tuple[int, list[_Time]]], numbered: SharedConditions, *, longest: int
) -> tuple[tuple[Hold, ...], tuple[SharedCondition, ...]]:
    """Returns the holds of all storages, and the conditions that they share.

    Args:
        times: for each storage, its size and the times for which it is held on a condition.
        longest: maximum number of units in the conditions of a storage that are written out.
    """
    written_out = [sum(numbered.length(number) for *_, number in of_one) <= longest for _, of_one in times]
    is_shared = {
        number
        for (_, of_one), is_written in zip(times, written_out, strict=True)
        for *_, number in of_one
        if not is_written and number != ALWAYS
    }
    shared, renumbered = numbered.used(is_shared)
    holds: list[Hold] = []
    for (size, of_one), is_written in zip(times, written_out, strict=True):
        for start, stop, number in of_one:
            unless, when = _ALWAYS if number == ALWAYS else _NEVER
            if number != ALWAYS and is_written:
                unless, when = numbered.written_out(number)
            one_shared = renumbered[number] if number != ALWAYS and not is_written else None
            holds.append(Hold(size_bytes=size, start=start, stop=stop, unless=unless, when=when, shared=one_shared))
    return tuple(holds), shared
