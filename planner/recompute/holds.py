"""The memory curve of a step as a function of the selected units: which storages are held, and on which condition.

`recompute.units` describes the effects of a unit. Here they become times for which a storage is alive always, unless a
unit is selected, or only if a unit is selected.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from planner.recompute.recompute_cost import Rerun
from planner.recompute.repeated_gathers import RepeatedGathers
from planner.recording.step_graph import StepGraph
from planner.search.problem import Hold


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """A unit (by its number) that applies to a call, and the cost of the call if the unit is selected."""

    unit: int
    rerun: Rerun


Options = dict[int, tuple[Option, ...]]
"""For each call, the units that recompute or offload it. A unit that keeps no outputs comes before those that do."""

_Piece = tuple[int, int, str, tuple[int, ...]]
"""(first tick, tick after the last, condition, units): a time for which a storage is held, and under which condition.

The condition is 'fixed' (always held), 'unless' (held if none of the units is selected) or 'when' (held if the unit is
selected).
"""


def holds_of(
    graph: StepGraph, options: Options, sizes: list[int], gathers: Mapping[int, RepeatedGathers]
) -> tuple[np.ndarray, tuple[Hold, ...]]:
    """Returns int64[ticks] of bytes that are always alive, and the storages that are alive only on a condition.

    Args:
        gathers: by number of a unit, the gathers that the step repeats if the unit is selected.
    """
    pieces: dict[int, list[_Piece]] = defaultdict(list)
    for save in graph.saves:
        if save.storage is None:
            continue
        start, release = save.pack, graph.ticks if save.release is None else save.release
        chosen = [option for call in graph.enclosing(save.call) for option in options.get(call, ())]
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
    # 4. Storages that a unit holds, for example the inputs of a recompute: held when the unit is selected.
    for option in itertools.chain.from_iterable(options.values()):
        for storage, start, stop in option.rerun.holds:
            pieces[storage].append((start, stop, "when", (option.unit,)))
    # 5. Parameters that stay gathered unless a unit is gathered again, and the buffers of its second gather.
    in_gathers: set[int] = set()
    for unit, repeated in gathers.items():
        for storage, start, stop in repeated.gaps:
            pieces[storage].append((start, stop, "unless", (unit,)))
        for storage in repeated.buffers:
            pieces[storage] += [(start, stop, "when", (unit,)) for start, stop in graph.storages[storage].lives]
        in_gathers |= repeated.buffers
    # 6. A storage counts once, even if it is held for several reasons at the same time.
    delta = np.zeros(graph.ticks + 1, dtype=np.int64)
    holds: list[Hold] = []
    for number, record in enumerate(graph.storages):
        always = [] if number in in_gathers else record.lives
        lives: list[_Piece] = [(start, stop, "fixed", ()) for start, stop in always]
        for start, stop, hold in _disjoint(lives + pieces.get(number, []), sizes[number]):
            if hold is None:
                delta[start] += sizes[number]
                delta[stop] -= sizes[number]
            else:
                holds.append(hold)
    return np.cumsum(delta)[:-1], tuple(holds)


def units_in(options: Iterable[Option]) -> tuple[int, ...]:
    return tuple(sorted({option.unit for option in options}))


def _disjoint(pieces: list[_Piece], size: int) -> list[tuple[int, int, Hold | None]]:
    """Merges the pieces of one storage into times that do not overlap.

    Returns:
        (first tick, tick after the last, condition) of each time; the condition is None if the storage is always held.
    """
    if len(pieces) == 1 and pieces[0][2] == "fixed":
        return [(pieces[0][0], pieces[0][1], None)]
    changes: dict[int, list[tuple[str, tuple[int, ...], int]]] = defaultdict(list)
    for start, stop, kind, units in pieces:
        if start < stop:
            changes[start].append((kind, units, 1))
            changes[stop].append((kind, units, -1))
    # For each kind, the units of the pieces that hold the storage now, each with the number of these pieces.
    active: dict[str, dict[tuple[int, ...], int]] = {"fixed": {}, "unless": {}, "when": {}}
    result: list[tuple[int, int, Hold | None]] = []
    for start, stop in itertools.pairwise(sorted(changes)):
        for kind, units, change in changes[start]:
            count = active[kind].pop(units, 0) + change
            if count:
                active[kind][units] = count
        if active["fixed"]:
            result.append((start, stop, None))
        elif active["unless"] or active["when"]:
            unless, when = tuple(sorted(active["unless"])), tuple(sorted(unit for (unit,) in active["when"]))
            # Adjacent times with the same condition are joined.
            last = result[-1] if result else None
            if last and last[1] == start and (hold := last[2]) and (hold.unless, hold.when) == (unless, when):
                start = result.pop()[0]
            result.append((start, stop, Hold(size_bytes=size, start=start, stop=stop, unless=unless, when=when)))
    return result
