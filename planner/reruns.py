"""What running one call of a unit again takes: what is held for it, its time, and what it needs beside.

A module's forward runs again as Python does it, up to the last tensor that it saves. Of a stretch only those ops run
that lead to a saved tensor, and what they make dies with its last use among them.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import numpy as np

from planner.op_schema import WRITE_STATISTICS
from planner.products import Kept
from planner.step_graph import Save, StepGraph
from planner.stretches import ops_in


@dataclasses.dataclass(slots=True)
class Window:
    """Of one call: when backward first asks for what it saved, last save, last release."""

    back: float
    last_pack: int
    release: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rerun:
    """Of one call, as one unit does it."""

    back: int
    """When the second run begins: backward asks for the first of those tensors that it makes again."""
    frees: frozenset[int] | None
    """Storages that are made again, of those saved in the call; None: all but `kept`."""
    kept: frozenset[int]
    """Storages of results that are kept."""
    holds: tuple[tuple[int, int, int], ...]
    """(storage, first tick, tick after the last): what is held for the second run."""
    cost_ns: int
    extra_bytes: int
    """The most that is alive at once in the second run, beside what is held."""

    def keeps(self, storage: int) -> bool:
        """Whether a storage that is saved in the call stays there until backward asks for it."""
        return storage in self.kept if self.frees is None else storage not in self.frees

    def gives_away(self, storage: int) -> bool:
        """Whether nothing but the backward of an op holds a saved storage once that has asked for it."""
        return self.frees is None or storage in self.frees


class Reruns:
    """Of the calls of one recording."""

    def __init__(self, graph: StepGraph, op_ns: list[int], sizes: list[int]) -> None:
        self._graph, self._op_ns, self._sizes = graph, op_ns, sizes
        self._op_ticks = np.fromiter((op.tick for op in graph.ops), np.int64, len(graph.ops))
        self._elapsed = np.concatenate([[0], np.cumsum(np.array(op_ns, dtype=np.int64))])
        self._saved = {save.storage for save in graph.saves}
        spans = graph.spans()
        births = np.array([span[0][0] if span else graph.ticks for span in spans])
        deaths = np.array([span[0][1] if span else graph.ticks for span in spans])
        self._order = np.argsort(births, kind="stable")
        self._births, self._deaths = births[self._order], deaths[self._order]
        self._ordered_sizes = np.array(sizes, dtype=np.int64)[self._order]

    def of_module(self, index: int, window: Window, kept: Kept) -> Rerun:
        """The whole forward of a module, but for products that are kept."""
        graph, call = self._graph, self._graph.calls[index]
        holds = [(s, call.start, window.release) for s in call.inputs if graph.storages[s].op is not None]
        holds += [(s, graph.storages[s].lives[0][0], int(window.back) - 1) for s in kept.storages]
        first_op, last_op = np.searchsorted(self._op_ticks, [call.start, window.last_pack])
        inside = slice(*np.searchsorted(self._births, [call.start, window.last_pack]))
        born, held = self._births[inside], self._ordered_sizes[inside]
        if kept.storages:
            numbers = self._order[inside].tolist()
            is_kept = np.array([storage in kept.storages for storage in numbers])
            is_saved = np.array([storage in self._saved for storage in numbers])
            born, held = np.where(is_kept, call.start, born), np.where(is_kept & is_saved, 0, held)
        return Rerun(
            back=int(window.back),
            frees=None,
            kept=kept.storages,
            holds=tuple(holds),
            cost_ns=int(self._elapsed[last_op] - self._elapsed[first_op]) - sum(self._op_ns[op] for op in kept.ops),
            extra_bytes=_highest(born, np.minimum(self._deaths[inside], window.last_pack), held),
        )


def _highest(births: np.ndarray, deaths: np.ndarray, sizes: np.ndarray) -> int:
    """Largest number of bytes alive at once among storages that live [birth, death)."""
    if not len(births):
        return 0
    ticks = np.concatenate([births, deaths])
    deltas = np.concatenate([sizes, -sizes])
    return int(np.cumsum(deltas[np.lexsort((deltas, ticks))]).max())


class Replays:
    """Of the stretches of one recording."""

    def __init__(self, graph: StepGraph, op_ns: list[int], sizes: list[int]) -> None:
        self._graph, self._op_ns, self._sizes = graph, op_ns, sizes
        self._calls = {index: call for index, call in enumerate(graph.calls) if call.stretch is not None}
        self._ops: dict[int, list[int]] = {}
        self._born: dict[int, list[int]] = defaultdict(list)
        self._saves: dict[int, list[Save]] = defaultdict(list)
        self._writes: dict[int, list[int]] = defaultdict(list)
        if not self._calls:
            return
        for index, storage in enumerate(graph.storages):
            if storage.op is not None and storage.lives:
                self._born[storage.op].append(index)
        for save in graph.saves:
            call = save.call
            while save.storage is not None and call is not None:
                self._saves[call].append(save)
                call = graph.calls[call].parent
        for op in graph.ops:
            if op.writes and op.phase == "forward":
                for storage in set(op.inputs) & set(op.outputs):
                    self._writes[storage].append(op.tick)

    def ops_of(self, call: int) -> list[int]:
        """Ops of a stretch, in the order of their numbers."""
        if call not in self._ops:
            owner = self._graph.calls[call].parent
            while self._graph.calls[owner].stretch is not None:
                owner = self._graph.calls[owner].parent
            if owner not in self._ops:
                self._ops[owner] = ops_in(self._graph, owner)
            start, stop = self._graph.calls[call].stretch
            self._ops[call] = self._ops[owner][start:stop]
        return self._ops[call]

    def of_stretch(self, index: int, kept: Kept) -> Rerun | None:
        """Those ops of a stretch that lead to what it saved; None where there is nothing to free.

        None as well where something that they read is changed later.
        """
        graph = self._graph
        ops = [op for op in self.ops_of(index) if op not in kept.ops]
        made = self._made(ops)
        saves = [save for save in self._saves[index] if save.storage in made]
        back = min((save.unpack for save in saves if save.unpack is not None), default=None)
        if back is None:
            return None
        wanted = frozenset(save.storage for save in saves)
        program = self._leading_to(wanted, ops)
        starts = self._first_reads(program, made)
        if any(tick > starts[storage] for storage in starts for tick in self._writes[storage]):
            return None
        release, end = max(graph.ticks if s.release is None else s.release for s in saves), graph.calls[index].end
        births = {storage: graph.storages[storage].lives[0][0] for storage in kept.storages}
        holds = tuple(
            (storage, tick, release if storage in starts else end)
            for storage, tick in (self._first_reads(ops, made) | births).items()
            if graph.storages[storage].op is not None
        )
        cost_ns = sum(self._op_ns[op] for op in program)
        extra_bytes = self._highest(program, wanted)
        return Rerun(back=back, frees=wanted, kept=kept.storages, holds=holds, cost_ns=cost_ns, extra_bytes=extra_bytes)

    def _first_reads(self, ops: list[int], made: set[int]) -> dict[int, int]:
        """When each storage that was there before is first read."""
        read = ((s, self._graph.ops[op].tick) for op in reversed(ops) for s in self._graph.ops[op].inputs)
        return {storage: tick for storage, tick in read if storage not in made}

    def _made(self, ops: list[int]) -> set[int]:
        graph = self._graph
        return {storage for op in ops for storage in graph.ops[op].outputs if graph.storages[storage].op == op}

    def _leading_to(self, wanted: frozenset[int], ops: list[int]) -> list[int]:
        needed, found = set(wanted), []
        for op in reversed(ops):
            if not needed.isdisjoint(self._graph.ops[op].outputs):
                needed.update(self._graph.ops[op].inputs)
                found.append(op)
        return found[::-1]

    def _statistics_bytes(self, op: int) -> int:
        """Of a norm's running statistics: another run updates a copy of them."""
        record = self._graph.ops[op]
        if record.name not in WRITE_STATISTICS:
            return 0
        return sum(self._sizes[storage] for storage in record.inputs[-2:] if self._graph.storages[storage].op is None)

    def _highest(self, program: list[int], wanted: frozenset[int]) -> int:
        last_use = {s: op for op in program for s in (*self._graph.ops[op].inputs, *self._graph.ops[op].outputs)}
        alive = highest = 0
        values: set[int] = set()
        for op in program:
            born = self._born[op]
            alive += sum(self._sizes[storage] for storage in born)
            highest = max(highest, alive + self._statistics_bytes(op))
            values.update(born)
            over = {s for s in values if s not in wanted and last_use.get(s, op) == op}
            alive -= sum(self._sizes[storage] for storage in over)
            values -= over
        return highest
