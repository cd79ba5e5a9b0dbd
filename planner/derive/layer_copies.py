"""Makes the items of a recording of all layers from those of a recording of a few layers.

The *shorter* recording is of a model with a few layers of a run of identical layers; the *longer* one is of the model
with all of them. An item (op, storage, save or call) of the layer that is copied has several copies in the longer
recording: one for this layer, and one for each layer that was left out. Every other item has one copy. The ticks of the
copies, and the indices of what they refer to, are computed for all copies at once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from planner.derive.layer_windows import NotAlikeError, Ticks
from planner.derive.owned_items import Owned
from planner.recording.step_graph import Call, Category, Op, Phase, Save, StepGraph, Storage


class LayerCopies:
    """The items of a longer recording.

    Args:
        graph: the shorter recording.
        ticks: converts its ticks.
        ops, storages, saves, calls: the items of each kind by the layers that own them. The constructor calls their
            `arrange`.

    Raises:
        NotAlikeError: the longer recording cannot be derived, for example because an op before the update uses tensors
            of all layers, or because an item refers to an item of a layer that is more than `FARTHEST` layers away.
            Each method may raise it, too.
    """

    def __init__(
        self, graph: StepGraph, ticks: Ticks, *, ops: Owned, storages: Owned, saves: Owned, calls: Owned
    ) -> None:
        self._graph, self._run, self._ticks = graph, ticks.run, ticks
        self._ops, self._storages, self._saves, self._calls = ops, storages, saves, calls
        self._paths: dict[tuple[str, int | None], list[str]] = {}
        """Caches the results of `_renamed`, by path and owner."""
        storages.arrange([storage.lives[0][0] if storage.lives else 0 for storage in graph.storages])
        ops.arrange([op.tick for op in graph.ops])
        saves.arrange([save.pack for save in graph.saves])
        calls.arrange([call.start for call in graph.calls])

    def storages(self) -> list[Storage]:
        return self._storages.in_order(map(self._storage, self._graph.storages, self._storages.owners))

    def ops(self) -> list[Op]:
        return self._ops.in_order(map(self._op, self._graph.ops, self._ops.owners))

    def saves(self) -> list[Save]:
        return self._saves.in_order(map(self._save, self._graph.saves, self._saves.owners))

    def calls(self) -> list[Call]:
        return self._calls.in_order(map(self._call, self._graph.calls, self._calls.owners))

    def names(self, path: str) -> list[str]:
        """Returns the paths in the longer model of the copies of the module or parameter at `path`."""
        found = self._run.position(path)
        if found is None:
            return [path]
        owner, rest = found
        return [self._run.path(layer, rest) for layer in self._ticks.layers(owner)]

    def _storage(self, storage: Storage, owner: int | None) -> list[Storage]:
        lives = self._lives(storage, owner)
        is_input = storage.category is Category.INPUT
        return _copies(
            storage,
            lives=[sorted(copy, key=lambda life: life[1]) for copy in lives],
            name=[storage.name] * len(lives) if is_input else self._renamed(storage.name, owner),
            op=self._new_index_or_none(self._ops, owner, storage.op, is_shared=True),
        )

    def _lives(self, storage: Storage, owner: int | None) -> list[list[tuple[int, int]]]:
        """Returns the lives of each copy of a storage.

        A storage that belongs to no layer has one copy. If one of its lives begins in the window of a layer, this copy
        gets the life once for each copy of that layer.
        """
        if owner is not None:
            lives = [self._moved_life(life, owner) for life in storage.lives]
            return [list(copy) for copy in zip(*lives, strict=True)] or [[] for _ in self._ticks.layers(owner)]
        return [[life for one in storage.lives for life in self._moved_life(one, self._ticks.layer_at(one[0]))]]

    def _moved_life(self, life: tuple[int, int], owner: int | None) -> list[tuple[int, int]]:
        birth, death = (self._ticks.moved_all(tick, owner) for tick in life)
        return list(zip(birth, death, strict=True))

    def _op(self, op: Op, owner: int | None) -> list[Op]:
        # An op that belongs to no layer must not read a tensor of each layer, as a sum over all layers does.
        is_shared = owner is None and self._ticks.begin < op.tick < self._ticks.end
        if is_shared and op.phase is Phase.OPTIMIZER and op.call is None and {*op.outputs} <= {*op.inputs}:
            return [self._op_on_gradients(op)]
        storages = self._storages
        return _copies(
            op,
            tick=self._ticks.moved_all(op.tick, owner),
            module=self._renamed(op.module, owner),
            call=self._new_index_or_none(self._calls, owner, op.call, is_shared=is_shared),
            forward_op=self._new_index_or_none(self._ops, owner, op.forward_op, is_shared=is_shared),
            inputs=self._new_indices(storages, owner, op.inputs, is_shared=is_shared),
            outputs=self._new_indices(storages, owner, op.outputs, is_shared=is_shared),
            written=self._new_indices(storages, owner, op.written, is_shared=is_shared),
        )

    def _op_on_gradients(self, op: Op) -> Op:
        """Returns an op that changes the gradients of all layers in place, as the unscaling under fp16 does."""
        if op.kernel is not None or op.flops or len(op.shapes) != len(op.outputs):
            raise NotAlikeError
        moved = [i for i in (*op.inputs, *(op.outputs or op.written)) if self._storages.owners[i] == self._run.copied]
        copied_bytes = sum(self._graph.storages[index].size_bytes for index in moved)

        def storages(indices: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(self._storages.new_indices(indices[n])[copy] for n, copy in self._in_each_layer(indices))

        return dataclasses.replace(
            op,
            tick=self._ticks.moved(op.tick),
            inputs=storages(op.inputs),
            outputs=storages(op.outputs),
            written=storages(op.written),
            shapes=tuple(op.shapes[number] for number, _ in self._in_each_layer(op.outputs)),
            moved_bytes=op.moved_bytes + self._run.left_out * copied_bytes,
        )

    def _in_each_layer(self, indices: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Yields pairs of a position in `indices` and the number of a copy.

        The position of a storage of the copied layer is yielded once for each copy, copy after copy.
        """
        for owner, group in itertools.groupby(range(len(indices)), lambda n: self._storages.owners[indices[n]]):
            places = [*group]
            for copy in range(len(self._ticks.layers(owner))):
                yield from ((place, copy) for place in places)

    def _save(self, save: Save, owner: int | None) -> list[Save]:
        pack, unpack, release, again = (
            [None] * len(self._ticks.layers(owner)) if tick is None else self._ticks.moved_all(tick, owner)
            for tick in ticks_of(save)
        )
        return _copies(
            save,
            storage=self._new_index_or_none(self._storages, owner, save.storage, is_shared=True),
            call=self._new_index_or_none(self._calls, owner, save.call, is_shared=True),
            pack=pack,
            unpack=unpack,
            release=release,
            again=again,
        )

    def _call(self, call: Call, owner: int | None) -> list[Call]:
        return _copies(
            call,
            module=self._renamed(call.module, owner),
            parent=self._new_index_or_none(self._calls, owner, call.parent, is_shared=True),
            start=self._ticks.moved_all(call.start, owner),
            end=self._ticks.moved_all(call.end, owner),
            inputs=self._new_indices(self._storages, owner, call.inputs, is_shared=True),
            made_inputs=self._new_indices(self._storages, owner, call.made_inputs, is_shared=True),
        )

    def _renamed(self, path: str, owner: int | None) -> list[str]:
        """Returns, for each copy of an item of a layer, the path in the longer model of the module at `path`."""
        renamed = self._paths.get((path, owner))
        if renamed is None:
            found, layers = self._run.position(path), self._ticks.layers(owner)
            if found is None:
                renamed = [path] * len(layers)
            elif owner is None:
                renamed = self.names(path)[:1]
            else:
                named, rest = found
                renamed = [self._run.path(layer + named - owner, rest) for layer in layers]
            self._paths[path, owner] = renamed
        return renamed

    def _new_index_or_none(
        self, owned: Owned, owner: int | None, index: int | None, *, is_shared: bool
    ) -> Sequence[int | None]:
        """Like `Owned.new_indices_for`, but returns None for each copy if `index` is None."""
        if index is None:
            return [None] * len(self._ticks.layers(owner))
        return owned.new_indices_for(owner, index, is_shared=is_shared)

    def _new_indices(
        self, owned: Owned, owner: int | None, indices: tuple[int, ...], *, is_shared: bool
    ) -> list[tuple[int, ...]]:
        """Returns, for each copy of an item, the indices in the longer recording of the items that it refers to."""
        if not indices:
            return [()] * len(self._ticks.layers(owner))
        return [*zip(*[owned.new_indices_for(owner, index, is_shared=is_shared) for index in indices], strict=True)]


def ticks_of(save: Save) -> tuple[int | None, ...]:
    """Returns the ticks at which a tensor is saved, read, released, and read by a second backward."""
    return save.pack, save.unpack, save.release, save.again


def _copies(item: Any, **values: Sequence[object]) -> list[Any]:
    """Returns copies of an item, each with other values of some fields.

    Args:
        values: for each of these fields, the values of all copies.
    """
    make = type(item)
    same = {field.name: getattr(item, field.name) for field in dataclasses.fields(item) if field.name not in values}
    return [make(**same, **dict(zip(values, copy, strict=True))) for copy in zip(*values.values(), strict=True)]
