"""Stretches of a long forward: where one call does much of a step by itself, it is cut where few bytes cross.

A module that does everything in one forward has no modules inside of it to recompute. Its ops are numbered as they run;
between two of them cross those tensors that were made before and are read after. Cuts are local minima of their bytes.
Stretches between cuts are nested like a tree, each halved at one of its smallest cuts, so that a unit is found at every
length from the whole forward down to what lies between neighbouring cuts.

A module that calls many others is cut between them, for a budget that checkpoints of those do not reach: a stretch that
is divided needs but few of the tensors between its parts at a time.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect
from collections import defaultdict

import numpy as np

from planner.recording.module_calls import COMPILED, NO_REPLAY
from planner.recording.step_graph import Call, Phase, Save, StepGraph

_OWN_SHARE = 0.1
"""Of all that is saved for backward: calls that save so much by themselves, beside their submodules, are cut."""
_LONG = 8
"""Ops of its own, beside those of its submodules, from which on a forward is cut."""
_SMALLEST_SHARE = 1 / 100
"""Of all that is saved for backward: what saves less is not cut any more."""
_MANY = 8
"""Calls of a module that is cut between them, into halves and quarters."""
_ALIKE = 1.2
"""Cuts with so many times the bytes of the smallest one are as good; the one nearest to the middle is taken."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Segment:
    """Ops [start, stop) of a forward, by their numbers."""

    start: int
    stop: int
    stops: tuple[int, ...]
    only_divided: bool


def with_stretches(graph: StepGraph) -> StepGraph:
    """The same recording with stretches of long forwards as calls; those of one module are alike in all its calls."""
    long = _long_calls(graph)
    ops_of = {call: ops_in(graph, call) for call in (*long, *(_calls_of_many(graph) - long))}
    by_module: dict[str, list[int]] = defaultdict(list)
    for call in ops_of:
        by_module[graph.calls[call].module].append(call)
    found: dict[int, tuple[_Segment, ...]] = {}
    for module, usable in by_module.items():
        calls = [index for index, call in enumerate(graph.calls) if call.module == module]
        if calls == sorted(usable) and len({len(ops_of[call]) for call in calls}) == 1:
            cuts = _Cuts(graph, calls[0], ops_of[calls[0]])
            found |= dict.fromkeys(calls, cuts.stretches() if calls[0] in long else cuts.divided_stretches())
    return _with_calls(graph, ops_of, found) if any(found.values()) else graph


def ops_in(graph: StepGraph, call: int) -> list[int]:
    """Ops of a call by their numbers: those that make a storage or change one."""
    first, last = graph.calls[call].start, graph.calls[call].end
    return [
        index
        for index, op in enumerate(graph.ops)
        if first < op.tick < last and op.phase is Phase.FORWARD and op.makes_or_changes
    ]


def place_of(save: Save, ticks: list[int]) -> int:
    """Of the op, among those that begin at these ticks, that a tensor was saved for."""
    return bisect(ticks, save.pack) - (0 if save.is_of_next_op else 1)


def _long_calls(graph: StepGraph) -> set[int]:
    """Calls of modules that save much by themselves, all of one type together."""
    own_bytes, own_ops = _saved_bytes(graph), _own_ops(graph)
    by_type: dict[str, int] = defaultdict(int)
    for index, call in enumerate(graph.calls):
        by_type[graph.module_types[call.module]] += own_bytes.get(index, 0)
    enough = _OWN_SHARE * sum(own_bytes.values())
    return {
        index
        for index, call in enumerate(graph.calls)
        if own_ops[index] >= _LONG and by_type[graph.module_types[call.module]] > enough and _can_run_again(call)
    }


def _own_ops(graph: StepGraph) -> dict[int | None, int]:
    found: dict[int | None, int] = defaultdict(int)
    for op in graph.ops:
        if op.phase is Phase.FORWARD and op.makes_or_changes:
            found[op.call] += 1
    return found


def _calls_of_many(graph: StepGraph) -> set[int]:
    """Calls that make many calls, none of which runs compiled."""
    inside: dict[int, int] = defaultdict(int)
    for call in graph.calls:
        if call.parent is not None:
            inside[call.parent] += 1
    compiled = {index for index, call in enumerate(graph.calls) if call.obstacle == COMPILED}
    outer = {parent for index in compiled for parent in _outer(graph, index)}
    return {index for index, n in inside.items() if n >= _MANY and _can_run_again(graph.calls[index])} - outer


def _outer(graph: StepGraph, call: int) -> list[int]:
    """The calls that a call is nested in."""
    found = []
    while (parent := graph.calls[call].parent) is not None:
        found.append(parent)
        call = parent
    return found


def _can_run_again(call: Call) -> bool:
    return call.obstacle not in NO_REPLAY and not call.has_hooks


def _saved_bytes(graph: StepGraph) -> dict[int | None, int]:
    """Bytes of what each call saved itself; a storage counts once, where it was saved first."""
    first: dict[int, int | None] = {}
    for save in graph.saves:
        if save.storage is not None:
            first.setdefault(save.storage, save.call)
    found: dict[int | None, int] = defaultdict(int)
    for storage, call in first.items():
        found[call] += graph.storages[storage].size_bytes
    return found


class _Cuts:
    """Where one call may be cut, and into what."""

    def __init__(self, graph: StepGraph, call: int, ops: list[int]) -> None:
        self._crossing = _crossing_bytes(graph, ops)
        ticks = np.array([graph.ops[op].tick for op in ops])
        saved = {save.storage: save.pack for save in reversed(graph.saves) if save.storage is not None}
        places = np.searchsorted(ticks, list(saved.values())) - 1
        inside = (places >= 0) & (places < len(ops))
        self._saved = np.zeros(len(ops) + 1, dtype=np.int64)
        sizes = np.array([graph.storages[storage].size_bytes for storage in saved], dtype=np.int64)
        np.add.at(self._saved, places[inside] + 1, sizes[inside])
        self._saved = np.cumsum(self._saved)
        self._least = _SMALLEST_SHARE * sizes.sum()
        self._allowed = self._minima() - self._in_submodules(graph, call, ticks)

    def stretches(self) -> tuple[_Segment, ...]:
        """All of them, outer before inner. Undivided, the whole would run again all at once, as it ran before."""
        found: list[_Segment] = []
        self._halve(0, len(self._crossing) - 1, found, depth=len(self._crossing))
        return tuple(
            dataclasses.replace(stretch, only_divided=not number)
            for number, stretch in enumerate(found)
            if number or stretch.stops
        )

    def divided_stretches(self) -> tuple[_Segment, ...]:
        """The whole, its halves and its quarters, divided."""
        found: list[_Segment] = []
        self._halve(0, len(self._crossing) - 1, found, depth=2)
        return tuple(dataclasses.replace(stretch, only_divided=True) for stretch in found if stretch.stops)

    def _halve(self, start: int, stop: int, found: list[_Segment], *, depth: int) -> list[int]:
        """Where the innermost stretches begin; those down to a depth are added to what is found."""
        saved_bytes = self._saved[stop] - self._saved[start]
        if not saved_bytes:
            return []
        place, begins = len(found), [start]
        if depth >= 0:
            found.append(_Segment(start=start, stop=stop, stops=(), only_divided=False))
        cuts = sorted(cut for cut in self._allowed if start < cut < stop)
        if cuts and saved_bytes >= self._least:
            least = min(self._crossing[cut] for cut in cuts)
            middle = (self._saved[start] + self._saved[stop]) / 2
            good = [cut for cut in cuts if self._crossing[cut] <= _ALIKE * least]
            cut = min(good, key=lambda cut: (abs(self._saved[cut] - middle), cut))
            halves = self._halve(start, cut, found, depth=depth - 1), self._halve(cut, stop, found, depth=depth - 1)
            begins = [*halves[0], *halves[1]]
        if depth >= 0:
            stops = tuple(begin for begin in begins if begin > start)
            found[place] = dataclasses.replace(found[place], stops=stops)
        return begins

    def _minima(self) -> set[int]:
        """Places between ops where no more bytes cross than before and after."""
        crossing = self._crossing
        return {
            place
            for place in range(1, len(crossing) - 1)
            if crossing[place] <= crossing[place - 1] and crossing[place] <= crossing[place + 1]
        }

    def _in_submodules(self, graph: StepGraph, call: int, ticks: np.ndarray) -> set[int]:
        """Places inside of the calls that this one makes."""
        found: set[int] = set()
        for inner in graph.calls:
            if inner.parent == call:
                first, last = np.searchsorted(ticks, [inner.start, inner.end])
                found.update(range(int(first) + 1, int(last)))
        return found


def _crossing_bytes(graph: StepGraph, ops: list[int]) -> np.ndarray:
    """int64[ops + 1]: of storages made by the ops before each place and read by those after it."""
    made: dict[int, int] = {}
    read: dict[int, int] = {}
    for number, op in enumerate(ops):
        for storage in graph.ops[op].inputs:
            read[storage] = number
        for storage in graph.ops[op].outputs:
            made.setdefault(storage, number)
    delta = np.zeros(len(ops) + 2, dtype=np.int64)
    for storage, number in read.items():
        if graph.storages[storage].op is not None:
            delta[made.get(storage, -1) + 1] += graph.storages[storage].size_bytes
            delta[number + 1] -= graph.storages[storage].size_bytes
    return np.cumsum(delta)[:-1]


def _with_calls(
    graph: StepGraph, ops_of: dict[int, list[int]], stretches: dict[int, tuple[_Segment, ...]]
) -> StepGraph:
    calls = [dataclasses.replace(call) for call in graph.calls]
    innermost: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # by call: (first op, op after last, stretch)
    for index, found in stretches.items():
        ticks = [*(graph.ops[op].tick for op in ops_of[index]), graph.calls[index].end]
        for stretch in found:
            around = [known for known in innermost[index] if known[0] <= stretch.start and stretch.stop <= known[1]]
            parent = around[-1][2] if around else index
            innermost[index].append((stretch.start, stretch.stop, len(calls)))
            calls.append(
                Call(
                    module=graph.calls[index].module,
                    parent=parent,
                    start=ticks[stretch.start],
                    end=ticks[stretch.stop],
                    inputs=(),
                    made_inputs=(),
                    obstacle=None,
                    stretch=(stretch.start, stretch.stop),
                    stops=stretch.stops,
                    only_divided=stretch.only_divided,
                )
            )
        for inner in calls[: len(graph.calls)]:
            if inner.parent == index:
                inner.parent = _inside(innermost[index], int(np.searchsorted(ticks, inner.start)), index)
    saves = []
    for save in graph.saves:
        if save.call in stretches:
            ticks = [graph.ops[op].tick for op in ops_of[save.call]]
            call = _inside(innermost[save.call], place_of(save, ticks), save.call)
            save = dataclasses.replace(save, call=call)
        saves.append(save)
    return dataclasses.replace(graph, calls=calls, saves=saves)


def _inside(stretches: list[tuple[int, int, int]], number: int, otherwise: int) -> int:
    """The innermost stretch that an op is in."""
    around = [call for start, stop, call in stretches if start <= number < stop]
    return around[-1] if around else otherwise
