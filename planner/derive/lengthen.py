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

from planner.derive.layer_windows import FARTHEST, NotAlikeError, Pass, Ticks, Window, in_turn, windows_of
from planner.derive.owned_items import Owned
from planner.recording.repeats.layer_runs import LayerRun
from planner.recording.step_graph import Call, Category, Op, Phase, Save, StepGraph, Storage


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
        self._ops = Owned([self._owner_at(op.tick) for op in graph.ops])
        owners = [self._owner_of_storage(storage) for storage in graph.storages]
        for index in self._passed_on(owners):
            owners[index] = None
        self._storages = Owned(owners)
        self._saves = Owned([self._owner_at(save.pack) for save in graph.saves])
        self._calls = Owned([self._owner_at(call.start) for call in graph.calls])

    def result(self) -> StepGraph:
        """Returns the longer recording. Raises `NotAlikeError` if it cannot be known."""
        graph, ticks = self._graph, self._ticks
        self._compare(self._run.copied, self._run.copied + 1)
        births = [storage.lives[0][0] if storage.lives else 0 for storage in graph.storages]
        for owned, starts in (
            (self._storages, births),
            (self._ops, [op.tick for op in graph.ops]),
            (self._saves, [save.pack for save in graph.saves]),
            (self._calls, [call.start for call in graph.calls]),
        ):
            owned.arrange(
                [
                    ((ticks.moved(starts[index], owned.owners[index], layer), layer or 0, index), index, layer)
                    for index, layer in self._copies(owned)
                ]
            )
        longer = dataclasses.replace(
            graph,
            storages=[self._storage(*place) for place in self._storages.places],
            ops=[self._op(*place) for place in self._ops.places],
            saves=[self._save(*place) for place in self._saves.places],
            calls=[self._call(*place) for place in self._calls.places],
            ticks=ticks.moved(graph.ticks, None, None),
            update_tick=None if graph.update_tick is None else ticks.moved(ticks.end, None, None),
            cache_releases=tuple(ticks.moved(tick, None, None) for tick in graph.cache_releases),
            module_types={name: kind for path, kind in graph.module_types.items() for name in self._with_copies(path)},
            batch_statistics=tuple(name for path in graph.batch_statistics for name in self._with_copies(path)),
            trained=tuple(name for path in graph.trained for name in self._with_copies(path)),
        )
        _check_ticks(graph)
        _check_ticks(longer)
        return longer

    # ---- owners and copies --------------------------------------------------------------------------------------

    def _owner_at(self, tick: int) -> int | None:
        window = self._ticks.window(tick) if tick > self._ticks.begin else None
        return None if window is None else window.layer

    def _owner_of_storage(self, storage: Storage) -> int | None:
        found = self._run.position(storage.name) if storage.category is not Category.INPUT else None
        if found is not None:
            return found[0] if 0 <= found[0] - self._run.first < self._run.kept else None
        return self._owner_at(storage.lives[0][0]) if storage.lives else None

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

    def _copies(self, owned: Owned) -> Iterator[tuple[int, int | None]]:
        """Yields the items of the longer recording: index in the shorter one, and the layer that owns it."""
        for index, owner in enumerate(owned.owners):
            if owner is None:
                yield index, None
            else:
                yield from ((index, layer) for layer in self._layers(owner))

    def _with_copies(self, path: str) -> list[str]:
        """Returns the paths in the longer model of the module or parameter at `path` and of its copies."""
        found = self._run.position(path)
        if found is None:
            return [path]
        owner, rest = found
        return [self._run.path(layer, rest) for layer in self._layers(owner)]

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
            (at(birth, layer), at(death, layer)) for birth, death in storage.lives if self._owner_at(birth) == layer
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
            when = [None if tick is None else at(tick, owner) for tick in _ticks_of(item)]
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

    # ---- the items of the longer recording ----------------------------------------------------------------------

    def _storage(self, index: int, layer: int | None) -> Storage:
        storage, owner = self._graph.storages[index], self._storages.owners[index]
        lives = [
            (self._ticks.moved(birth, user, place), self._ticks.moved(death, user, place))
            for birth, death in storage.lives
            for user, place in ([(owner, layer)] if owner is not None else self._users(birth))
        ]
        name = self._renamed(storage.name, owner, layer) if storage.category is not Category.INPUT else storage.name
        op = self._new_index_or_none(self._ops, storage.op, owner, layer, is_shared=owner is None)
        return dataclasses.replace(storage, lives=sorted(lives, key=lambda life: life[1]), name=name, op=op)

    def _users(self, birth: int) -> list[tuple[int | None, int | None]]:
        """Returns which layers a life of a shared storage belongs to.

        Returns:
            Pairs of a layer in the shorter recording, in which the life begins, and a layer in the longer one that is
            a copy of it; (None, None) if the life begins in no layer.
        """
        owner = self._owner_at(birth)
        if owner is None:
            return [(None, None)]
        return [(owner, layer) for layer in self._layers(owner)]

    def _layers(self, owner: int) -> range:
        """Returns the positions in the longer recording of a layer of the shorter one, and of its copies."""
        layer = self._ticks.new_layer(owner)
        return range(layer, layer + self._run.left_out + 1) if owner == self._run.copied else range(layer, layer + 1)

    def _op(self, index: int, layer: int | None) -> Op:
        op, owner = self._graph.ops[index], self._ops.owners[index]
        # An op that belongs to no layer must not read a tensor of each layer, as a sum over all layers does.
        is_shared = owner is None and self._ticks.begin < op.tick < self._ticks.end
        if is_shared and op.phase is Phase.OPTIMIZER and op.call is None and {*op.outputs} <= {*op.inputs}:
            return self._op_on_gradients(op)

        def storages(indices: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(self._new_index(self._storages, i, owner, layer, is_shared=is_shared) for i in indices)

        return dataclasses.replace(
            op,
            tick=self._ticks.moved(op.tick, owner, layer),
            module=self._renamed(op.module, owner, layer),
            call=self._new_index_or_none(self._calls, op.call, owner, layer, is_shared=is_shared),
            forward_op=self._new_index_or_none(self._ops, op.forward_op, owner, layer, is_shared=is_shared),
            inputs=storages(op.inputs),
            outputs=storages(op.outputs),
            written=storages(op.written),
        )

    def _op_on_gradients(self, op: Op) -> Op:
        """Returns an op that changes the gradients of all layers in place, as the unscaling under fp16 does."""
        if op.kernel is not None or op.flops or len(op.shapes) != len(op.outputs):
            raise NotAlikeError
        moved = [i for i in (*op.inputs, *(op.outputs or op.written)) if self._storages.owners[i] == self._run.copied]
        copied_bytes = sum(self._graph.storages[index].size_bytes for index in moved)

        def storages(indices: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(self._storages.new_index(indices[n], layer) for n, layer in self._in_each_layer(indices))

        return dataclasses.replace(
            op,
            tick=self._ticks.moved(op.tick, None, None),
            inputs=storages(op.inputs),
            outputs=storages(op.outputs),
            written=storages(op.written),
            shapes=tuple(op.shapes[number] for number, _ in self._in_each_layer(op.outputs)),
            moved_bytes=op.moved_bytes + self._run.left_out * copied_bytes,
        )

    def _in_each_layer(self, indices: tuple[int, ...]) -> Iterator[tuple[int, int | None]]:
        """Yields the places of storages in `indices`, each with its layer in the longer recording.

        The storages of the layer that is copied come once for each copy.
        """
        for owner, group in itertools.groupby(range(len(indices)), lambda n: self._storages.owners[indices[n]]):
            places = [*group]
            for layer in (None,) if owner is None else self._layers(owner):
                yield from ((place, layer) for place in places)

    def _save(self, index: int, layer: int | None) -> Save:
        save, owner = self._graph.saves[index], self._saves.owners[index]
        pack, unpack, release, again = (
            None if tick is None else self._ticks.moved(tick, owner, layer) for tick in _ticks_of(save)
        )
        assert pack is not None
        return dataclasses.replace(
            save,
            storage=self._new_index_or_none(self._storages, save.storage, owner, layer, is_shared=owner is None),
            call=self._new_index_or_none(self._calls, save.call, owner, layer, is_shared=owner is None),
            pack=pack,
            unpack=unpack,
            release=release,
            again=again,
        )

    def _call(self, index: int, layer: int | None) -> Call:
        call, owner = self._graph.calls[index], self._calls.owners[index]
        is_shared = owner is None
        return dataclasses.replace(
            call,
            module=self._renamed(call.module, owner, layer),
            parent=self._new_index_or_none(self._calls, call.parent, owner, layer, is_shared=is_shared),
            start=self._ticks.moved(call.start, owner, layer),
            end=self._ticks.moved(call.end, owner, layer),
            inputs=tuple(self._new_index(self._storages, i, owner, layer, is_shared=is_shared) for i in call.inputs),
            made_inputs=tuple(
                self._new_index(self._storages, i, owner, layer, is_shared=is_shared) for i in call.made_inputs
            ),
        )

    def _renamed(self, path: str, owner: int | None, layer: int | None) -> str:
        """Returns the path in the longer model of a module that an item of a layer, or of its copy, names."""
        found = self._run.position(path)
        if found is None:
            return path
        named, rest = found
        if owner is None or layer is None:
            return self._run.path(self._ticks.new_layer(named), rest)
        return self._run.path(layer + named - owner, rest)

    def _new_index_or_none(
        self, owned: Owned, index: int | None, owner: int | None, layer: int | None, *, is_shared: bool
    ) -> int | None:
        """Like `_new_index`, but returns None if `index` is None."""
        return None if index is None else self._new_index(owned, index, owner, layer, is_shared=is_shared)

    def _new_index(self, owned: Owned, index: int, owner: int | None, layer: int | None, *, is_shared: bool) -> int:
        """Returns the new index of an item, `index`, to which an item of `owner` refers, for its copy in `layer`.

        Args:
            is_shared: True if the item belongs to no layer and may refer only to layers at the ends of the run.
        """
        named = owned.owners[index]
        if named is None:
            return owned.new_index(index, None)
        if owner is None or layer is None:
            if is_shared and FARTHEST <= named - self._run.first < self._run.kept - FARTHEST:
                raise NotAlikeError
            return owned.new_index(index, self._ticks.new_layer(named))
        if abs(named - owner) > FARTHEST:
            raise NotAlikeError
        return owned.new_index(index, layer + named - owner)


def _ticks_of(save: Save) -> tuple[int | None, ...]:
    return save.pack, save.unpack, save.release, save.again


def _check_ticks(graph: StepGraph) -> None:
    """Raises `NotAlikeError` if two events of the step, up to its update, have the same tick."""
    begin, end = graph.step_starts[0], graph.before_update_end
    events = [op.tick for op in graph.ops]
    events += [tick for storage in graph.storages for life in storage.lives for tick in life]
    events += [tick for save in graph.saves for tick in _ticks_of(save) if tick is not None]
    events += [tick for call in graph.calls for tick in (call.start, call.end)]
    counted = [tick for tick in events if begin < tick < end]
    if len(set(counted)) != len(counted):
        raise NotAlikeError
