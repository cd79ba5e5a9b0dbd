"""Groups the items of a recording by the layers that own them, and computes their indices in the longer recording.

For the words "longer" and "copy" see `layer_copies`.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

from planner.derive.layer_windows import FARTHEST, NotAlikeError, Ticks


class Owned:
    """Items of one kind (ops, storages, saves or calls) by the layers that own them."""

    def __init__(self, owners: list[int | None], ticks: Ticks) -> None:
        self.owners = owners
        self._ticks = ticks
        self.of_layer: dict[int, list[int]] = collections.defaultdict(list)
        """For each layer, the indices of its items."""
        self.slots: list[int] = []
        """Position of each item among the items of its layer."""
        for index, owner in enumerate(owners):
            self.slots.append(0 if owner is None else len(self.of_layer[owner]))
            if owner is not None:
                self.of_layer[owner].append(index)
        self._new_indices: list[list[int]] = []
        """For each item, the index in the longer recording of each of its copies."""
        self._new_in_layer: dict[int, list[int]] = {}
        """For each layer of the longer recording, the indices of its items there."""
        self._new_for: dict[tuple[int, int], list[int]] = {}
        """Caches the results of `new_indices_for`, by the item that is referred to and the layer that refers to it."""

    def arrange(self, starts: Sequence[int]) -> None:
        """Sets the order of the items of the longer recording.

        Args:
            starts: for each item, the tick at which it begins.
        """
        places = sorted(
            (tick, layer, index, copy)
            for index, (start, owner) in enumerate(zip(starts, self.owners, strict=True))
            for copy, (layer, tick) in enumerate(
                zip(self._ticks.layers(owner), self._ticks.moved_all(start, owner), strict=True)
            )
        )
        self._new_indices = [[0] * len(self._ticks.layers(owner)) for owner in self.owners]
        for number, (_, _, index, copy) in enumerate(places):
            self._new_indices[index][copy] = number
        for owner, indices in self.of_layer.items():
            for copy, layer in enumerate(self._ticks.layers(owner)):
                self._new_in_layer[layer] = [self._new_indices[index][copy] for index in indices]

    def in_order(self, copies: Iterable[Sequence[Any]]) -> list[Any]:
        """Returns the items of the longer recording in their order.

        Args:
            copies: for each item of the shorter recording, all its copies.
        """
        ordered: list[Any] = [None] * sum(map(len, self._new_indices))
        for numbers, items in zip(self._new_indices, copies, strict=True):
            for number, item in zip(numbers, items, strict=True):
                ordered[number] = item
        return ordered

    def new_indices(self, index: int) -> list[int]:
        """Returns the index in the longer recording of each copy of an item."""
        return self._new_indices[index]

    def new_indices_for(self, owner: int | None, index: int, *, is_shared: bool = False) -> list[int]:
        """Returns, for each copy of an item, the index in the longer recording of the item that it refers to.

        For example, an op refers to its inputs.

        Args:
            owner: layer of the item that refers to another one; None if it belongs to no layer.
            index: index in the shorter recording of the item that is referred to.
            is_shared: True if an item that belongs to no layer must not refer to the middle layers of the run. It has
                no effect if `owner` is a layer.
        """
        named = self.owners[index]
        if named is None:
            return self._new_indices[index] * len(self._ticks.layers(owner))
        if owner is None:
            run = self._ticks.run
            if is_shared and FARTHEST <= named - run.first < run.kept - FARTHEST:
                raise NotAlikeError
            return self._new_indices[index][:1]
        found = self._new_for.get((index, owner))
        if found is None:
            found = self._new_for[index, owner] = self._new_at_distance(owner, index, named - owner)
        return found

    def _new_at_distance(self, owner: int, index: int, distance: int) -> list[int]:
        """Returns, for each copy of the layer `owner`, the index in the longer recording of an item at this distance.

        It is the item that has the same position in its layer as `index`. The distance is a number of layers.
        """
        if abs(distance) > FARTHEST:
            raise NotAlikeError
        slot = self.slots[index]
        in_layers = [self._new_in_layer.get(layer + distance, ()) for layer in self._ticks.layers(owner)]
        if any(slot >= len(numbers) for numbers in in_layers):
            raise NotAlikeError
        return [numbers[slot] for numbers in in_layers]
