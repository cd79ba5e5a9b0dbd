"""Predicts when the storages of a step are alive if some units are selected, without a rehearsal of that step.

The memory curve of a selection is known from the checkpoint problem, but the allocator's slack depends on the order in
which blocks are allocated and freed. This order is derived here from a what-if recording, by the effects of units that
`recompute.units` describes. The result has two steps: in the first one, cuBLAS allocates its workspaces, and the update
creates the optimizer state, which splits free blocks of the allocator's cache.

Storages that a recompute makes are placed in the order in which it makes them, and are freed as in the recorded forward
of a module, or after their last use in the replay of a segment. Scratch memory that the first update needs is left out,
and the two numbers of a gradient scaler are made again in each step.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable

from planner.estimate.add_workspaces import allocated_in_first_step
from planner.recompute.holds import Options
from planner.recompute.recompute_cost import Rerun
from planner.recompute.replay_memory import Block, ReplayMemory, SegmentReplay
from planner.recording.step_graph import Category, Save, StepGraph, merged_spans
from planner.workspaces.gemm import GEMM_OPS

_Spans = list[tuple[int, int]]


def two_selected_steps(graph: StepGraph, options: Options, selected: Collection[int]) -> StepGraph:
    """Returns a recording of two steps that has storages only, with the times for which they are probably alive.

    Args:
        graph: a what-if recording of one step, with the calls to which `options` refer.
        options: the units that apply to each call.
        selected: numbers of the selected units.
    """
    step = _Selected(graph, options, selected)
    fine = step.fine
    begin, end = graph.step_starts[0] * fine, graph.ticks * fine
    last = 2 * end + 1  # What the second step frees at its end dies one tick earlier, so that the recording frees it.
    made_at = {
        index: min([tick * fine, *(step.products if is_autograd else ())])  # autograd's thread runs the recomputes, too
        for index, (tick, is_autograd) in allocated_in_first_step(graph).items()
    }
    made_at |= {index: tick * fine + fine - 1 for index, tick in _updates(graph).items()}
    lives: list[_Spans] = []
    for index, (storage, alive) in enumerate(zip(step.storages, step.spans, strict=True)):
        in_step = [span for span in alive if span[1] > begin]
        if any(start <= begin and stop >= end for start, stop in in_step):
            lives.append([(made_at.get(index, 0), last)])
            continue
        # A step of the user's own may leave gradients to the next step. The first step has none.
        first = [span for span in in_step if span[0] > begin or storage.category is not Category.GRADIENT]
        is_left = any(start <= begin for start, _ in in_step)
        second = ((start + end, last if is_left and stop >= end else stop + end) for start, stop in in_step)
        lives.append([*first, *second])
    starts = (begin, begin + end)
    ticks = sorted({0, *starts, last, *(tick for of_one in lives for span in of_one for tick in span)})
    number = {tick: index for index, tick in enumerate(ticks)}
    storages = [
        dataclasses.replace(storage, op=None, lives=[(number[start], number[stop]) for start, stop in of_one])
        for storage, of_one in zip(step.storages, lives, strict=True)
    ]
    return dataclasses.replace(
        graph,
        storages=storages,
        ops=[],
        saves=[],
        calls=[],
        ticks=number[last],
        steps=2,
        update_tick=None,
        step_starts=tuple(number[start] for start in starts),
        cache_releases=(),
    )


def _updates(graph: StepGraph) -> dict[int, int]:
    """Returns the ticks at which the first step creates the optimizer state, by the indices of its storages.

    It is created when the update begins. If the update cannot be separated from the backward, each storage is created
    by the first op that uses it.
    """
    states = {index for index, storage in enumerate(graph.storages) if storage.category is Category.OPTIMIZER_STATE}
    if graph.update_tick is not None:
        return dict.fromkeys(states, min(graph.update_tick, graph.ticks - 1))
    created = dict.fromkeys(states, graph.ticks - 1)
    for op in reversed(graph.ops):
        if op.tick > graph.step_starts[0]:
            created.update((index, op.tick - 1) for index in (*op.inputs, *op.outputs) if index in states)
    return created


class _Selected:
    """The storages of a step in which some units are selected, with the times for which they are alive.

    Times are in fine ticks: each tick of the recording is divided into `fine` of them, so that a recompute fits into
    one tick.
    """

    def __init__(self, graph: StepGraph, options: Options, selected: Collection[int]) -> None:
        self._graph = graph
        self.fine = 2 * (graph.ticks + len(graph.storages)) + 2
        self.storages = list(graph.storages)
        """Storages of the recording, and after them those that only recomputes need."""
        self.spans: list[_Spans] = [[(a * self.fine, b * self.fine) for a, b in s.lives] for s in graph.storages]
        """The ranges of fine ticks in which each of `storages` is alive."""
        self.products: list[int] = []
        """Fine ticks at which recomputes run matrix products, for which cuBLAS needs its workspace."""
        self._made_again: dict[tuple[int, int], int] = {}
        """Maps (storage, tick after a recompute) to the fine tick at which the recompute makes this storage, if the
        storage outlives the recompute."""
        self._reruns: dict[int, list[Rerun]] = {}
        for call, of_call in options.items():
            if reruns := [option.rerun for option in of_call if option.unit in selected]:
                self._reruns[call] = reruns
        made = (index for index, storage in enumerate(graph.storages) if storage.lives and storage.op is not None)
        self._births = sorted((graph.storages[index].lives[0][0], index) for index in made)
        self._recompute()
        self._hold()
        self.spans = [merged_spans([span for span in of_one if span[0] < span[1]]) for of_one in self.spans]

    def _recompute(self) -> None:
        """Adds the storages that the recomputes make."""
        saves: dict[int, list[Save]] = defaultdict(list)  # by call
        for save in self._graph.saves:
            for call in self._graph.enclosing(save.call):
                if call in self._reruns:
                    saves[call].append(save)
        memory = ReplayMemory(self._graph, [storage.size_bytes for storage in self._graph.storages])
        for call, reruns in self._reruns.items():
            for rerun in reruns:
                for at, _ in rerun.peaks:
                    for storage in rerun.copied:
                        self.spans[storage].append((at * self.fine + 1, (at + 1) * self.fine))
                    if self._graph.calls[call].segment is None:
                        self._run_again(call, saves[call], rerun, at)
                for replay in rerun.replays:
                    self._replay(replay, memory.blocks(replay))

    def _run_again(self, call: int, saves: list[Save], rerun: Rerun, at: int) -> None:
        """Adds the storages that a call of a module makes if it runs again at a tick, up to its last save."""
        graph, begin, end = self._graph, self._graph.calls[call].start, self._graph.calls[call].end
        saved = {save.storage: save for save in saves}
        last = max((save.pack for save in saves), default=begin)
        first, after = (bisect_right(self._births, (tick, math.inf)) for tick in (begin, last))
        kept_ops = {graph.storages[index].op for index in rerun.kept}
        for birth, index in self._births[first:after]:
            start, death = at * self.fine + 1 + birth - begin, graph.storages[index].lives[0][1]
            # The recompute ends at the last save. What dies after the call in the forward, such as autocast's copies of
            # weights, dies there.
            stop = start + max((death if death <= end else last) - birth, 1)
            if index in rerun.kept:
                self.spans[index].append((at * self.fine, stop))
            if index in saved:
                self._made_again[index, rerun.back(saved[index])] = start
            elif graph.storages[index].op not in kept_ops:
                self._add(index, start, stop)
            if graph.storages[index].op not in kept_ops:
                self._note_product(index, start)

    def _replay(self, replay: SegmentReplay, blocks: Iterable[Block]) -> None:
        """Adds the storages that a replay of a segment makes."""
        begin, after = replay.at * self.fine + 1, replay.at + 1  # a fine tick, and a tick of the recording
        for block in blocks:
            start = begin + block.start
            self._note_product(block.storage, start)
            if block.storage in replay.inputs:
                stop = after * self.fine if block.stop is None else begin + block.stop
                self.spans[block.storage].append((begin - 1, stop))
            elif block.stop is None:
                self._made_again[block.storage, after] = start
            else:
                self._add(block.storage, start, begin + block.stop)

    def _add(self, index: int, start: int, stop: int) -> None:
        """Adds a copy of a storage that only a recompute needs."""
        self.storages.append(self._graph.storages[index])
        self.spans.append([(start, stop)])

    def _note_product(self, index: int, start: int) -> None:
        """Notes the fine tick at which a recompute makes a storage, if a matrix product makes it."""
        op = self._graph.storages[index].op
        if op is not None and self._graph.ops[op].name in GEMM_OPS:
            self.products.append(start)

    def _hold(self) -> None:
        """Adds the spans in which autograd or a selected unit holds storages of the recording."""
        graph = self._graph
        for save in graph.saves:
            if save.storage is None:
                continue
            reruns = [rerun for call in graph.enclosing(save.call) for rerun in self._reruns.get(call, ())]
            release = graph.ticks if save.release is None else save.release
            backs = [min(rerun.back(save), release) for rerun in reruns if not rerun.keeps(save)]
            start = max([save.pack, *backs])
            read = release if save.unpack is None or not reruns else min(save.unpack, release)
            stop = read if any(rerun.gives_away(save.storage) for rerun in reruns) else release
            if any(birth == stop + 1 for birth, _ in graph.storages[save.storage].lives):
                stop += 1  # backward gets the tensor in this tick, and its recorded life begins in the next one
            self._keep(save.storage, start, stop)
        for rerun in itertools.chain.from_iterable(self._reruns.values()):
            for hold in rerun.holds:
                self._keep(*hold)

    def _keep(self, storage: int, start: int, stop: int) -> None:
        """Adds the span of a storage from `start`, or from the recompute that makes it for this tick, until `stop`."""
        if start < stop:
            first = self._made_again.get((storage, start), start * self.fine)
            self.spans[storage].append((first, stop * self.fine))
