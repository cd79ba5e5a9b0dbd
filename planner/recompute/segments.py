"""Cuts long forwards into segments that can be recomputed one at a time, at places where few bytes cross.

A module that computes everything in one forward has no submodules to checkpoint. Its ops are numbered in execution
order. A *place* is a position between two ops; a tensor crosses it if it was made before the place and is read after
it. A forward may be cut at the places where the crossing bytes have a local minimum. The segments form a binary tree:
each segment is halved at one of its cheapest cuts, near the middle of its saved bytes. So there are segments of every
length, from the whole forward to the ops between two neighboring cuts. This generalizes the evenly spaced segments of
Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174), to forwards whose layers differ.

A module that calls many submodules is cut between the calls. Its segments are recomputed in parts, one part at a time,
and only the shortest segments, which are not cut further, as a whole. Each part is recomputed from the inputs of an
earlier part, and only few of these inputs are alive at the same time. So these segments fit into budgets that are too
small for checkpoints of the submodules: memory grows with the logarithm of the number of parts, as in Chen et al.,
section 4.4, and in Griewank 1992, "Achieving logarithmic growth of temporal and spatial complexity in reverse automatic
differentiation". A shortest segment that is just the call of a submodule is left out: the submodule is a unit already.
Others also have ops of the outer module, such as the concatenation before each block of a U-Net, whose result a
checkpoint of the block would keep.

Such a segment may also keep the outputs of its products (`recompute.kept_products`) and be divided after each product,
and so may the whole forward of a block that runs several products. Then no product runs again. The ops between two
products, such as a norm and an activation, run again just before backward needs their outputs. If the whole block were
recomputed at once, the outputs of all these ops would be in memory at the same time.

The cuts are not optimal in two respects. They are places in execution order and not minimum cuts of the graph: two
branches that run one after the other are cut at the same place. And segments are halved greedily.

The crossing bytes of all places are computed in one sweep over the ops, which takes 0.1 to 0.6 ms for the 106 to 796
ops of examples/roberta_84m, flat and llama_1b. `networkx.cut_size` takes 16 to 90 ms for 50 places, and importing
networkx takes 80 ms (CPU times, networkx 3.6.1).
"""

from __future__ import annotations

import dataclasses
from bisect import bisect, bisect_left
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from planner.recompute.divided_calls import blocks, calls_with_many_calls, long_calls
from planner.recording.module_calls import WITHOUT_GRADIENTS, ops_in
from planner.recording.step_graph import Call, Save, StepGraph

_MIN_SEGMENT_SHARE = 1 / 100
"""Minimum fraction of all saved bytes that a segment must save for being cut into halves."""
_LEVELS = 3
"""Number of times that the forward of a module with many submodules is halved into segments."""
_GOOD_CUT = 1.2
"""Maximum ratio of the bytes that cross a cut to the bytes that cross the segment's cheapest cut.

Among the cuts that satisfy it, the cut closest to the middle of the saved bytes is taken.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """The ops of a forward whose numbers are in [start, stop)."""

    start: int
    stop: int
    split_points: tuple[int, ...]
    """Numbers of the ops at which the segment may be divided into parts."""
    only_divided: bool
    """True if the segment may be recomputed only in parts, and not as a whole."""


def with_segments(graph: StepGraph) -> StepGraph:
    """Returns the recording with the segments of long forwards added as calls.

    A module is cut only if all its calls can be cut and have the same number of ops. All calls are cut at the same op
    numbers, because a plan applies to every call of a module.
    """
    long, many, others = long_calls(graph), calls_with_many_calls(graph), blocks(graph)
    saved_bytes = _SavedBytes(graph)
    ops_of = {call: ops_in(graph, call) for call in (*long, *(many - long), *(others - many - long))}
    by_module: dict[str, list[int]] = defaultdict(list)
    for call in ops_of:
        by_module[graph.calls[call].module].append(call)
    calls_of: dict[str, list[int]] = defaultdict(list)
    for index, made in enumerate(graph.calls):
        if made.obstacle != WITHOUT_GRADIENTS:
            calls_of[made.module].append(index)
    inner_calls = _inner_calls(graph)
    segments: dict[int, tuple[Segment, ...]] = {}
    for module, usable in by_module.items():
        calls = calls_of[module]
        if calls == sorted(usable) and len({len(ops_of[call]) for call in calls}) == 1:
            first = calls[0]
            if first not in long | many:
                segments |= dict.fromkeys(calls, (_whole(ops_of[first]),))
                continue
            cuts = _Cuts(graph, ops_of[first], [graph.calls[inner] for inner in inner_calls[first]], saved_bytes)
            segments |= dict.fromkeys(calls, cuts.segments() if first in long else cuts.divided_segments())
    return _with_calls(graph, ops_of, segments) if any(segments.values()) else graph


def position_of(save: Save, ticks: Sequence[int]) -> int:
    """Returns the position of the op that a tensor was saved for, in a list of ops that begin at these ticks."""
    return bisect(ticks, save.pack) - (0 if save.is_of_next_op else 1)


def _whole(ops: Sequence[int]) -> Segment:
    """Returns a whole forward as one segment, which may be recomputed only in parts."""
    return Segment(start=0, stop=len(ops), split_points=(), only_divided=True)


def _inner_calls(graph: StepGraph) -> dict[int, list[int]]:
    """Returns, for each call, the indices of the calls that it makes directly."""
    inner: dict[int, list[int]] = defaultdict(list)
    for index, call in enumerate(graph.calls):
        if call.parent is not None:
            inner[call.parent].append(index)
    return inner


class _SavedBytes:
    """Bytes saved up to a tick. A storage counts when it is saved first."""

    def __init__(self, graph: StepGraph) -> None:
        packs: dict[int, int] = {}
        for save in graph.saves:
            if save.storage is not None:
                packs.setdefault(save.storage, save.pack)
        ticks = np.fromiter(packs.values(), np.int64, len(packs))
        sizes = np.fromiter((graph.storages[storage].size_bytes for storage in packs), np.int64, len(packs))
        order = np.argsort(ticks, kind="stable")
        self._ticks = ticks[order]
        self._sums = np.concatenate(([0], np.cumsum(sizes[order])))
        self.total = int(self._sums[-1])

    def until(self, ticks: np.ndarray) -> np.ndarray:
        """Returns int64[ticks]: bytes saved at these ticks or before them."""
        until: np.ndarray = self._sums[np.searchsorted(self._ticks, ticks, side="right")]
        return until


class _Cuts:
    """The places at which one call may be cut, and the tree of segments between them.

    Place p is before op number p of the call.

    Args:
        graph: a what-if recording.
        ops: indices of the call's ops in the order of their numbers (`ops_in`).
        inner: the calls that it makes directly.
        saved_bytes: the bytes that the step saves.
    """

    def __init__(self, graph: StepGraph, ops: list[int], inner: Sequence[Call], saved_bytes: _SavedBytes) -> None:
        self._crossing = _crossing_bytes(graph, ops)
        # Bytes saved by the ops before each place (a running sum). A storage counts at the op that saved it first, and
        # what is saved later counts at the last op.
        ticks = np.array([graph.ops[op].tick for op in ops])
        self._saved = np.zeros(len(ops) + 1, dtype=np.int64)
        if ops:
            until = saved_bytes.until(ticks)
            self._saved[1:] = np.append(until[1:], saved_bytes.total) - until[0]
        self._least = _MIN_SEGMENT_SHARE * saved_bytes.total
        self._calls = {tuple(np.searchsorted(ticks, [call.start, call.end])) for call in inner}
        self._allowed = self._minima() - self._inside_submodules()

    def segments(self) -> tuple[Segment, ...]:
        """All segments; a segment comes before the segments inside of it.

        The whole forward may be recomputed only in parts: running it again at once would reach the original peak.
        """
        segments: list[Segment] = []
        self._halve(0, len(self._crossing) - 1, segments, depth=len(self._crossing))
        return tuple(
            dataclasses.replace(segment, only_divided=not number)
            for number, segment in enumerate(segments)
            if number or segment.split_points
        )

    def divided_segments(self) -> tuple[Segment, ...]:
        """The whole forward, its halves, down to `_LEVELS` levels, and the shortest segments of all levels.

        Those that are cut may be recomputed only in parts (`only_divided`). Segments that are the call of a submodule
        are left out.
        """
        segments: list[Segment] = []
        self._halve(0, len(self._crossing) - 1, segments, depth=_LEVELS)
        return tuple(
            dataclasses.replace(segment, only_divided=bool(segment.split_points))
            for segment in segments
            if (segment.start, segment.stop) not in self._calls
        )

    def _halve(self, start: int, stop: int, segments: list[Segment], *, depth: int) -> list[int]:
        """Cuts ops [start, stop) into halves recursively.

        Args:
            start, stop: op numbers.
            segments: the list to which the segments are appended: those of `depth` levels of halving, and the
                innermost halves.
            depth: levels of halving that become segments. Deeper levels only give split points.

        Returns:
            Numbers of the first ops of the innermost halves; empty if the ops save nothing.
        """
        saved_bytes = self._saved[stop] - self._saved[start]
        if not saved_bytes:
            return []
        position, begins = len(segments), [start]
        cuts = sorted(cut for cut in self._allowed if start < cut < stop)
        is_cut = bool(cuts) and saved_bytes >= self._least
        if depth >= 0 or not is_cut:
            segments.append(Segment(start=start, stop=stop, split_points=(), only_divided=False))
        if is_cut:
            # Of the cuts that are nearly as cheap as the cheapest one, take the one that halves the saved bytes best.
            least = min(self._crossing[cut] for cut in cuts)
            middle = (self._saved[start] + self._saved[stop]) / 2
            good = [cut for cut in cuts if self._crossing[cut] <= _GOOD_CUT * least]
            cut = min(good, key=lambda cut: (abs(self._saved[cut] - middle), cut))
            before = self._halve(start, cut, segments, depth=depth - 1)
            after = self._halve(cut, stop, segments, depth=depth - 1)
            begins = [*before, *after]
        if depth >= 0 and is_cut:
            split_points = tuple(begin for begin in begins if begin > start)
            segments[position] = dataclasses.replace(segments[position], split_points=split_points)
        return begins

    def _minima(self) -> set[int]:
        """Places where no more bytes cross than at the places before and after it."""
        crossing = self._crossing
        return {
            place
            for place in range(1, len(crossing) - 1)
            if crossing[place] <= crossing[place - 1] and crossing[place] <= crossing[place + 1]
        }

    def _inside_submodules(self) -> set[int]:
        """Places inside of the calls of submodules."""
        return {place for first, last in self._calls for place in range(first + 1, last)}


def _crossing_bytes(graph: StepGraph, ops: list[int]) -> np.ndarray:
    """Returns int64[ops + 1]: for each place, bytes of the storages that are made before it and read after it."""
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


def _with_calls(graph: StepGraph, ops_of: dict[int, list[int]], segments: dict[int, tuple[Segment, ...]]) -> StepGraph:
    """Returns the recording with the segments added as calls.

    A segment becomes the parent of the calls inside of it, and the call of the tensors saved inside of it.

    Args:
        ops_of: for each call that is cut, indices of its ops in the order of their numbers.
        segments: for each call that is cut, its segments.
    """
    calls = [dataclasses.replace(call) for call in graph.calls]
    nested: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # by call: (first op, op after last, new call)
    inner_calls = _inner_calls(graph)
    ticks_of = {index: [graph.ops[op].tick for op in ops_of[index]] for index in segments}
    for index, of_call in segments.items():
        ticks = [*ticks_of[index], graph.calls[index].end]
        for segment in of_call:
            around = [known for known in nested[index] if known[0] <= segment.start and segment.stop <= known[1]]
            parent = around[-1][2] if around else index
            nested[index].append((segment.start, segment.stop, len(calls)))
            calls.append(
                Call(
                    module=graph.calls[index].module,
                    parent=parent,
                    start=ticks[segment.start],
                    end=ticks[segment.stop],
                    inputs=(),
                    made_inputs=(),
                    obstacle=None,
                    segment=(segment.start, segment.stop),
                    split_points=segment.split_points,
                    only_divided=segment.only_divided,
                )
            )
        for number in inner_calls[index]:
            inner = calls[number]
            inner.parent = _innermost(nested[index], bisect_left(ticks, inner.start), index)
    saves = []
    for save in graph.saves:
        if save.call is not None and save.call in segments:
            call = _innermost(nested[save.call], position_of(save, ticks_of[save.call]), save.call)
            save = dataclasses.replace(save, call=call)
        saves.append(save)
    return dataclasses.replace(graph, calls=calls, saves=saves)


def _innermost(nested: list[tuple[int, int, int]], number: int, otherwise: int) -> int:
    """Returns the call of the innermost segment that contains op `number`, or `otherwise` if no segment does.

    Args:
        nested: (first op, op after the last, index of the call) of each segment, outer before inner.
    """
    around = [call for start, stop, call in nested if start <= number < stop]
    return around[-1] if around else otherwise
