"""Puts the layers that a rehearsal left out into its recording.

The recording is of a model with a few layers of a run of identical ones (`recording.repeats.layer_runs`). A *window*
is a range of ticks that belongs to one layer. A layer has one window for each forward (from its call to the call of the
next layer), one for each backward, and one for each time at which the layers, in turn, free what they held. The last
layer's window of a forward ends with its call: what follows belongs to no layer. Each op, storage, save and call
belongs to a layer (its *owner*) or to none. Its ticks are described by the place in a window, and by the distance of
the window's layer from the owner: a storage that the next layer frees in its forward dies in a window at distance 1.

The two layers in the middle must agree in all this. Then each layer that was left out gets a copy of what the first of
them has. The result has the same memory curve as a recording of the whole model, tick by tick, from the first op of the
forward to the update (tests compare the two). An update after the backward is not lengthened: `graft_update` replaces
it. Updates inside of the backward are lengthened with it.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from planner.derive.layer_copies import LayerCopies, ticks_of
from planner.derive.layer_windows import FARTHEST, NotAlikeError, Pass, Ticks, Window, in_turn, windows_of
from planner.derive.owned_items import Owned
from planner.recording.repeats.layer_runs import LayerRun
from planner.recording.step_graph import Call, Category, Op, Save, StepGraph, Storage


def lengthened(graph: StepGraph, run: LayerRun) -> StepGraph | None:
    """Returns the recording with all layers of a run; None if it cannot be known from those that were rehearsed.

    Args:
        graph: a what-if recording of one step of the shortened model, whose optimizer state existed before the step.
    """
    if not graph.primed or graph.steps != 1:
        return None
    try:
        return _Lengthening(graph, run).result()
    except NotAlikeError:
        return None


class _Lengthening:
    def __init__(self, graph: StepGraph, run: LayerRun) -> None:
        self._graph, self._run = graph, run
        windows = windows_of(graph, run)
        self._ticks = Ticks(graph, run, windows)
        self._ticks = Ticks(graph, run, [*windows, *self._releases()])
        self._ops = Owned([self._ticks.layer_at(op.tick) for op in graph.ops], self._ticks)
        owners = [self._owner_of_storage(storage) for storage in graph.storages]
        for index in self._passed_on(owners):
            owners[index] = None
        self._storages = Owned(owners, self._ticks)
        self._saves = Owned([self._ticks.layer_at(save.pack) for save in graph.saves], self._ticks)
        self._calls = Owned([self._ticks.layer_at(call.start) for call in graph.calls], self._ticks)

    def result(self) -> StepGraph:
        """Returns the longer recording. Raises `NotAlikeError` if it cannot be known."""
        graph, ticks = self._graph, self._ticks
        self._compare(self._run.copied, self._run.copied + 1)
        copies = LayerCopies(graph, ticks, ops=self._ops, storages=self._storages, saves=self._saves, calls=self._calls)
        longer = dataclasses.replace(
            graph,
            storages=copies.storages(),
            ops=copies.ops(),
            saves=copies.saves(),
            calls=copies.calls(),
            ticks=ticks.moved(graph.ticks),
            update_tick=None if graph.update_tick is None else ticks.moved(ticks.end),
            cache_releases=tuple(ticks.moved(tick) for tick in graph.cache_releases),
            module_types={name: kind for path, kind in graph.module_types.items() for name in copies.names(path)},
            batch_statistics=tuple(name for path in graph.batch_statistics for name in copies.names(path)),
            trained=tuple(name for path in graph.trained for name in copies.names(path)),
        )
        _check_ticks(graph)
        _check_ticks(longer)
        return longer

    # ---- owners -------------------------------------------------------------------------------------------------

    def _owner_of_storage(self, storage: Storage) -> int | None:
        found = self._run.position(storage.name) if storage.category is not Category.INPUT else None
        if found is not None:
            return found[0] if 0 <= found[0] - self._run.first < self._run.kept else None
        return self._ticks.layer_at(storage.lives[0][0]) if storage.lives else None

    def _passed_on(self, owners: Sequence[int | None]) -> set[int]:
        """Returns the storages that one layer makes and all others use, such as a gradient that is summed in place."""
        return {
            index
            for op, user in zip(self._graph.ops, self._ops.owners, strict=True)
            for index in (*op.inputs, *op.outputs)
            if user is not None and (owner := owners[index]) is not None and abs(owner - user) > FARTHEST
        }

    def _releases(self) -> Iterator[Window]:
        """Yields the windows in which the layers free, one after the other, what they held during a pass.

        At the end of autocast, for example, the copies of all weights are freed.
        """
        kept = [*range(self._run.first, self._run.first + self._run.kept)]
        deaths: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
        for storage in self._graph.storages:
            owner = self._owner_of_storage(storage)
            if owner is None:
                continue
            for _, death in storage.lives:
                if self._ticks.begin < death < self._ticks.end and self._ticks.window(death) is None:
                    deaths[self._ticks.windows_until(death)].append((death, owner))
        for number, outside in deaths.items():
            turns = [
                [tick for tick, _ in group] for _, group in itertools.groupby(sorted(outside), key=lambda pair: pair[1])
            ]
            layers = [owner for owner, _ in itertools.groupby(owner for _, owner in sorted(outside))]
            for first in range(len(layers) - len(kept) + 1):
                order = layers[first : first + len(kept)]
                if order in (kept, kept[::-1]):
                    starts = [ticks[0] for ticks in turns[first : first + len(kept)]]
                    stops = [*starts[1:], turns[first + len(kept) - 1][-1] + 1]
                    yield from in_turn(order, starts, stops, Pass(f"release {number}", first, order == kept))

    # ---- are two layers alike? ----------------------------------------------------------------------------------

    def _compare(self, one: int, other: int) -> None:
        """Raises `NotAlikeError` if the items of two layers differ in anything but their layer."""
        for owned, items in (
            (self._storages, self._graph.storages),
            (self._ops, self._graph.ops),
            (self._saves, self._graph.saves),
            (self._calls, self._graph.calls),
        ):
            first, second = owned.of_layer[one], owned.of_layer[other]
            if len(first) != len(second):
                raise NotAlikeError
            for index, same in zip(first, second, strict=True):
                if self._described(items[index], one) != self._described(items[same], other):
                    raise NotAlikeError
        for storage, owner in zip(self._graph.storages, self._storages.owners, strict=True):
            if owner is None and self._lives_in(storage, one) != self._lives_in(storage, other):
                raise NotAlikeError

    def _lives_in(self, storage: Storage, layer: int) -> list[tuple[object, ...]]:
        """Returns the lives of a shared storage that begin in the windows of a layer."""
        at = self._ticks.relative
        return [
            (at(birth, layer), at(death, layer))
            for birth, death in storage.lives
            if self._ticks.layer_at(birth) == layer
        ]

    def _described(self, item: Any, owner: int) -> tuple[object, ...]:
        """Returns a description of an item that is the same in all layers that are alike."""
        at = self._ticks.relative
        if isinstance(item, Storage):
            lives = [(at(birth, owner), at(death, owner)) for birth, death in item.lives]
            made_by = self._relative(self._ops, item.op, owner)
            return item.size_bytes, lives, item.category, made_by, self._name(item.name, owner), item.shape, item.stream
        if isinstance(item, Op):
            used = [
                [self._relative(self._storages, index, owner) for index in indices]
                for indices in (item.inputs, item.outputs, item.written)
            ]
            calls = self._relative(self._calls, item.call, owner), self._relative(self._ops, item.forward_op, owner)
            rest = (item.name, item.phase, item.flops, item.moved_bytes, item.host_bytes, item.dtype, item.shapes)
            return (
                *rest,
                item.kernel,
                item.collective,
                item.draws_random_numbers,
                used,
                calls,
                at(item.tick, owner),
                self._name(item.module, owner),
            )
        if isinstance(item, Save):
            when = [None if tick is None else at(tick, owner) for tick in ticks_of(item)]
            return (
                self._relative(self._storages, item.storage, owner),
                self._relative(self._calls, item.call, owner),
                when,
                item.is_of_next_op,
            )
        assert isinstance(item, Call)
        inputs = [
            [self._relative(self._storages, index, owner) for index in indices]
            for indices in (item.inputs, item.made_inputs)
        ]
        return (
            self._name(item.module, owner),
            self._relative(self._calls, item.parent, owner),
            inputs,
            at(item.start, owner),
            at(item.end, owner),
            item.obstacle,
            item.has_hooks,
        )

    @staticmethod
    def _relative(owned: Owned, index: int | None, owner: int) -> object:
        """Returns a description of what an item of a layer refers to, the same in all layers that are alike."""
        if index is None:
            return None
        layer = owned.owners[index]
        return index if layer is None else (layer - owner, owned.slots[index])

    def _name(self, path: str, owner: int) -> object:
        found = self._run.position(path)
        return path if found is None else (found[0] - owner, found[1])


def _check_ticks(graph: StepGraph) -> None:
    """Raises `NotAlikeError` if two events of the step, up to its update, have the same tick."""
    begin, end = graph.step_starts[0], graph.before_update_end
    events = [op.tick for op in graph.ops]
    events += [tick for storage in graph.storages for life in storage.lives for tick in life]
    events += [tick for save in graph.saves for tick in ticks_of(save) if tick is not None]
    events += [tick for call in graph.calls for tick in (call.start, call.end)]
    counted = [tick for tick in events if begin < tick < end]
    if len(set(counted)) != len(counted):
        raise NotAlikeError
