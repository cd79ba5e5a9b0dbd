"""Predicts when the storages of a step are alive if some units are selected, without a rehearsal of that step.

The memory curve of a selection is known from the checkpoint problem, but the allocator's slack depends on the order in
which blocks are allocated and freed. This order is derived here from a what-if recording, by the effects of units that
`recompute.units` describes. The result has two steps: in the first one, cuBLAS allocates its workspaces, and the update
creates the optimizer state, which splits free blocks of the allocator's cache.

Where it is not exact: the storages of a recomputed module are placed in the order of its forward, but the replay of a
segment is represented by blocks that are alive at the same time, and whose sizes add up to the peak of the replay.
Scratch memory that the first update needs is left out.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

from planner.estimate.add_workspaces import allocated_in_first_step
from planner.recompute.holds import Options
from planner.recompute.recompute_cost import Rerun
from planner.recording.step_graph import Category, Save, StepGraph, Storage, merged_spans

_Spans = list[tuple[int, int]]


def two_selected_steps(graph: StepGraph, options: Options, selected: Collection[int]) -> StepGraph:
    """Returns a recording of two steps that has storages only, with the times for which they are probably alive.

    Args:
        graph: a what-if recording of one step, with the calls to which `options` refer.
        options: the units that apply to each call.
        selected: numbers of the selected units.
    """
    step = _Selected(graph, options, selected)
    spans, recomputed = step.spans()
    storages, fine = [*graph.storages, *recomputed], step.fine
    spans += [storage.lives for storage in recomputed]
    begin, end = graph.step_starts[0] * fine, graph.ticks * fine
    last = 2 * end + 1  # What the second step frees at its end dies one tick earlier, so that the recording frees it.
    made_at = {index: tick * fine for index, tick in allocated_in_first_step(graph).items()}
    made_at |= {index: tick * fine + fine - 1 for index, tick in _updates(graph).items()}
    lives: list[_Spans] = []
    for index, (storage, alive) in enumerate(zip(storages, spans, strict=True)):
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
        for storage, of_one in zip(storages, lives, strict=True)
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
    """The step of a recording in which some units are selected."""

    def __init__(self, graph: StepGraph, options: Options, selected: Collection[int]) -> None:
        self._graph = graph
        self.fine = graph.ticks + 2
        """Number of fine ticks into which a tick of the recording is divided, so that a recompute fits into one."""
        self._reruns: dict[int, list[Rerun]] = {}
        for call, of_call in options.items():
            if reruns := [option.rerun for option in of_call if option.unit in selected]:
                self._reruns[call] = reruns
        self._saves: dict[int, list[Save]] = defaultdict(list)
        """The saves in each call that is recomputed or offloaded."""
        for save in graph.saves:
            for call in graph.enclosing(save.call):
                if call in self._reruns:
                    self._saves[call].append(save)
        made = (index for index, storage in enumerate(graph.storages) if storage.lives and storage.op is not None)
        self._births = sorted((graph.storages[index].lives[0][0], index) for index in made)

    def spans(self) -> tuple[list[_Spans], list[Storage]]:
        """Returns the ranges of fine ticks in which each storage is alive, and the storages that only recomputes make.

        The lives of these storages are in fine ticks, too.
        """
        graph, fine = self._graph, self.fine
        made_again: dict[tuple[int, int], int] = {}
        temporary = [storage for call in self._reruns for storage in self._recomputed(call, made_again)]
        spans: list[_Spans] = [[(start * fine, stop * fine) for start, stop in s.lives] for s in graph.storages]
        for save in graph.saves:
            if save.storage is None:
                continue
            reruns = [rerun for call in graph.enclosing(save.call) for rerun in self._reruns.get(call, ())]
            release = graph.ticks if save.release is None else save.release
            backs = [min(rerun.back(save), release) for rerun in reruns if not rerun.keeps(save)]
            start = max([save.pack, *backs])
            read = release if save.unpack is None or not reruns else min(save.unpack, release)
            stop = read if any(rerun.gives_away(save.storage) for rerun in reruns) else release
            if stop > start:
                spans[save.storage].append((made_again.get((save.storage, start), start * fine), stop * fine))
        for reruns in self._reruns.values():
            for rerun in reruns:
                for storage, start, stop in rerun.holds:
                    spans[storage].append((start * fine, stop * fine))
        return [merged_spans([span for span in of_one if span[0] < span[1]]) for of_one in spans], temporary

    def _recomputed(self, call: int, made_again: dict[tuple[int, int], int]) -> Iterator[Storage]:
        """Yields the storages that only the recomputes of a call need, with lives in fine ticks.

        Args:
            made_again: receives the fine tick at which a recompute makes a saved storage again, by the storage and the
                tick at which the saved tensor is back.
        """
        graph, fine = self._graph, self.fine
        begin, saved = graph.calls[call].start, {save.storage: save for save in self._saves[call]}
        last = max((save.pack for save in self._saves[call]), default=begin)
        for rerun in self._reruns[call]:
            for at, peak_bytes in rerun.peaks:
                first, end = (bisect_right(self._births, (tick, math.inf)) for tick in (begin, last))
                made = [(birth, index) for birth, index in self._births[first:end] if index not in rerun.kept]
                if graph.calls[call].segment is not None:
                    for size in _parts([graph.storages[index].size_bytes for _, index in made], peak_bytes):
                        lives = [(at * fine + 1, at * fine + 2)]
                        yield Storage(size_bytes=size, lives=lives, category=Category.ACTIVATION, op=None)
                    continue
                for birth, index in made:
                    again, storage = at * fine + 1 + birth - begin, graph.storages[index]
                    if index in saved:
                        made_again[index, rerun.back(saved[index])] = again
                    else:
                        alive_ticks = max(min(storage.lives[0][1], last) - birth, 1)
                        yield dataclasses.replace(storage, lives=[(again, again + alive_ticks)])


def _parts(sizes: Iterable[int], total: int) -> Iterator[int]:
    """Yields sizes in their order while their sum is below the total, and then the rest of the total."""
    for size in sizes:
        if size >= total:
            break
        yield size
        total -= size
    yield total
