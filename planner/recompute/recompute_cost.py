"""What running one call of a unit again takes: what is held for it, its time, and what it needs beside.

A module's forward runs again as Python does it, up to the last tensor that it saves. Of a stretch only those ops run
that lead to a saved tensor, and what they make dies with its last use among them.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect
from collections import defaultdict

import numpy as np

from planner.recompute.kept_products import Kept
from planner.recompute.segments import ops_in, place_of
from planner.recording.op_schema import WRITE_STATISTICS
from planner.recording.step_graph import Save, StepGraph


@dataclasses.dataclass(slots=True)
class Window:
    """Of one call: when backward first asks for what it saved, last save, last release."""

    back: float
    last_pack: int
    release: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rerun:
    """Of one call, as one unit does it."""

    backs: dict[int, int] | int
    """When backward asks for the first of the tensors that run again together: by the tick of each save, or of all."""
    frees: frozenset[int] | None
    """Storages that are made again, of those saved in the call; None: all but `kept`."""
    kept: frozenset[int]
    """Storages of results that are kept."""
    holds: tuple[tuple[int, int, int], ...]
    """(storage, first tick, tick after the last): what is held for a second run, or by one for others."""
    cost_ns: int
    peaks: tuple[tuple[int, int], ...]
    """(tick, bytes): the most that is alive at once in each second run, beside what is held."""

    def back(self, save: Save) -> int:
        """When a saved tensor is made again."""
        return self.backs if isinstance(self.backs, int) else self.backs[save.pack]

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
            backs=int(window.back),
            frees=None,
            kept=kept.storages,
            holds=tuple(holds),
            cost_ns=int(self._elapsed[last_op] - self._elapsed[first_op]) - sum(self._op_ns[op] for op in kept.ops),
            peaks=((int(window.back) - 1, _highest(born, np.minimum(self._deaths[inside], window.last_pack), held)),),
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

    def of_stretch(self, index: int, kept: Kept, stops: tuple[int, ...]) -> Rerun | None:
        """Those ops of a stretch that lead to what it saved; None where there is nothing to free.

        None as well where something that they read is changed later.
        """
        graph, numbered = self._graph, self.ops_of(index)
        ops = [op for op in numbered if op not in kept.ops]
        made = self._made(ops)
        end = graph.calls[index].end  # what is dropped before that is not made again
        saves = [s for s in self._saves[index] if s.storage in made and (s.release is None or s.release > end)]
        wanted = frozenset(save.storage for save in saves)
        first = self._calls[index].stretch[0]
        bounds = [0, *(stop - first for stop in stops), len(numbered)]
        ticks = [graph.ops[op].tick for op in numbered]
        part_of = {save.pack: bisect(stops, first + place_of(save, ticks)) for save in saves}
        parts = [
            _Part(
                ops=[op for op in numbered[start:stop] if op not in kept.ops],
                saves=[save for save in saves if part_of[save.pack] == number],
            )
            for number, (start, stop) in enumerate(itertools.pairwise(bounds))
        ]
        if all(part.back is None for part in parts):
            return None
        self._trace(parts)
        program = [op for part in parts for op in sorted({*part.to_make, *part.to_pass})]
        starts = self._first_reads(program, made)
        if any(tick >= starts[storage] for storage in starts for tick in self._writes[storage]):
            return None
        if stops and any(self._writes[storage] for part in parts for storage in part.crossing):
            return None
        release = max(graph.ticks if save.release is None else save.release for save in saves)
        births = {storage: graph.storages[storage].lives[0][0] for storage in kept.storages}
        held = [
            (storage, tick, release if storage in starts else end)
            for storage, tick in (self._first_reads(ops, made) | births).items()
            if graph.storages[storage].op is not None
        ]
        run = _Run(self, parts, release)
        return Rerun(
            backs={save.pack: graph.ticks if (b := parts[part_of[save.pack]].back) is None else b for save in saves},
            frees=wanted,
            kept=kept.storages,
            holds=(*held, *run.holds),
            cost_ns=run.cost_ns,
            peaks=tuple(run.peaks),
        )

    def _trace(self, parts: list[_Part]) -> None:
        """What leads to what, from the last part to the first."""
        made = [self._made(part.ops) for part in parts]
        before = list(itertools.accumulate(made, set.union, initial=set()))[:-1]
        after: set[int] = set()
        for part, made_before in reversed(list(zip(parts, before, strict=True))):
            part.to_make, reads = self._leading_to(part.wanted, part.ops)
            part.to_pass, also_reads = self._leading_to(after, part.ops)
            after = part.crossing = (reads | also_reads) & made_before

    def _first_reads(self, ops: list[int], made: set[int]) -> dict[int, int]:
        """When each storage that was there before is first read."""
        read = ((s, self._graph.ops[op].tick) for op in reversed(ops) for s in self._graph.ops[op].inputs)
        return {storage: tick for storage, tick in read if storage not in made}

    def _made(self, ops: list[int]) -> set[int]:
        graph = self._graph
        return {storage for op in ops for storage in graph.ops[op].outputs if graph.storages[storage].op == op}

    def _leading_to(self, wanted: set[int], ops: list[int]) -> tuple[list[int], set[int]]:
        """Those ops that lead to storages, and all that they and the storages need."""
        needed, found = set(wanted), []
        for op in reversed(ops):
            if not needed.isdisjoint(self._graph.ops[op].outputs):
                needed.update(self._graph.ops[op].inputs)
                found.append(op)
        return found[::-1], needed

    def _statistics_bytes(self, op: int) -> int:
        """Of a norm's running statistics: another run updates a copy of them."""
        record = self._graph.ops[op]
        if record.name not in WRITE_STATISTICS:
            return 0
        return sum(self._sizes[storage] for storage in record.inputs[-2:] if self._graph.storages[storage].op is None)

    def run(self, program: list[int], values: set[int], to_keep: set[int]) -> tuple[set[int], int]:
        """Run ops on values that count, in bytes, and find those that are left, and the most that was there at once."""
        last_use = {s: op for op in program for s in (*self._graph.ops[op].inputs, *self._graph.ops[op].outputs)}
        values = {storage for storage in values if storage in last_use or storage in to_keep}
        alive = highest = sum(self._sizes[storage] for storage in values)
        for op in program:
            born = set(self._born[op]) - values
            alive += sum(self._sizes[storage] for storage in born)
            highest = max(highest, alive + self._statistics_bytes(op))
            values |= born
            over = {s for s in values if s not in to_keep and last_use.get(s, op) == op}
            alive -= sum(self._sizes[storage] for storage in over)
            values -= over
        return values, highest

    def bytes_of(self, storages: set[int]) -> int:
        return sum(self._sizes[storage] for storage in storages)

    def ns_of(self, ops: list[int]) -> int:
        return sum(self._op_ns[op] for op in ops)


@dataclasses.dataclass(slots=True)
class _Part:
    """Of a stretch: its ops and saves; which ops make what it saved, which what later parts read, and what it reads."""

    ops: list[int]
    saves: list[Save]
    to_make: list[int] = dataclasses.field(default_factory=list)
    to_pass: list[int] = dataclasses.field(default_factory=list)
    crossing: set[int] = dataclasses.field(default_factory=set)

    @property
    def wanted(self) -> set[int]:
        return {save.storage for save in self.saves}

    @property
    def back(self) -> int | None:
        """When backward first asks for something that it saved."""
        return min((save.unpack for save in self.saves if save.unpack is not None), default=None)

    def can_be_asked_for(self, tick: int) -> bool:
        """Whether autograd still holds on to something that it saved."""
        return any(save.release is None or save.release > tick for save in self.saves)


class _Run:
    """All second runs of a stretch, in the order in which backward asks for its parts (`rewrite/rules/replay.py`)."""

    def __init__(self, replays: Replays, parts: list[_Part], release: int) -> None:
        self._replays, self._parts, self._release = replays, parts, release
        self._on_the_way: dict[int, set[int]] = {}
        self._parts_run: set[int] = set()
        self.holds: list[tuple[int, int, int]] = []
        self.peaks: list[tuple[int, int]] = []
        self.cost_ns = 0
        for number in sorted((n for n, part in enumerate(parts) if part.back is not None), key=lambda n: parts[n].back):
            self._make(number)

    def _make(self, wanted: int) -> None:
        replays, parts, back = self._replays, self._parts, self._parts[wanted].back
        at = max((number for number in self._on_the_way if number <= wanted), default=0)
        between = (number for number in range(at + 1, wanted) if number not in self._parts_run)
        to_hold = _halves([number for number in between if parts[number].can_be_asked_for(back)])
        self._parts_run.add(wanted)
        counted: set[int] = set()  # of the values, those that are not counted already where they are held
        held_bytes = highest = 0
        for number in range(at, wanted):
            counted, peak = replays.run(parts[number].to_pass, counted, parts[number + 1].crossing)
            highest = max(highest, held_bytes + peak)
            self.cost_ns += replays.ns_of(parts[number].to_pass)
            if number + 1 in to_hold:
                crossing, until = parts[number + 1].crossing, parts[number + 1].back or self._release
                self._on_the_way[number + 1] = set(crossing)
                self.holds += [(storage, back, until) for storage in crossing]
                held_bytes += replays.bytes_of(counted)
                counted = set()
        self._on_the_way.pop(wanted, None)
        _, peak = replays.run(parts[wanted].to_make, counted, parts[wanted].wanted)
        self.cost_ns += replays.ns_of(parts[wanted].to_make)
        self.peaks.append((back - 1, max(highest, held_bytes + peak)))


def _halves(parts: list[int]) -> set[int]:
    """The part in the middle, the one in the middle of those after it, and so on."""
    middle = len(parts) // 2
    return {parts[middle], *_halves(parts[middle + 1 :])} if parts else set()
