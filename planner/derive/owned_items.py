"""The items of a recording by the layers that own them, and their numbers in a recording of more layers."""

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
        """The number of each item among those of its layer."""
        for index, owner in enumerate(owners):
            self.slots.append(0 if owner is None else len(self.of_layer[owner]))
            if owner is not None:
                self.of_layer[owner].append(index)
        self._numbers: list[list[int]] = []
        """For each item, the index in the longer recording of each of its copies."""
        self._numbers_in_layer: dict[int, list[int]] = {}
        """For each layer of the longer recording, the indices of its items there."""
        self._numbers_named: dict[tuple[int, int], list[int]] = {}
        """What `named_by` has found, by the item and the layer that names it."""

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
        self._numbers = [[0] * len(self._ticks.layers(owner)) for owner in self.owners]
        for number, (_, _, index, copy) in enumerate(places):
            self._numbers[index][copy] = number
        for owner, indices in self.of_layer.items():
            for copy, layer in enumerate(self._ticks.layers(owner)):
                self._numbers_in_layer[layer] = [self._numbers[index][copy] for index in indices]

    def in_order(self, copies: Iterable[Sequence[Any]]) -> list[Any]:
        """Returns the items of the longer recording in their order.

        Args:
            copies: for each item of the shorter recording, all its copies.
        """
        ordered: list[Any] = [None] * sum(map(len, self._numbers))
        for numbers, items in zip(self._numbers, copies, strict=True):
            for number, item in zip(numbers, items, strict=True):
                ordered[number] = item
        return ordered

    def numbers(self, index: int) -> list[int]:
        """Returns the index in the longer recording of each copy of an item."""
        return self._numbers[index]

    def named_by(self, owner: int | None, index: int, *, is_shared: bool = False) -> list[int]:
        """Returns the index in the longer recording of what each copy of an item names, such as an op its input.

        Args:
            owner: layer of the item that names another one; None if it belongs to no layer.
            index: index in the shorter recording of the item that is named.
            is_shared: True if an item of no layer may name only layers at the ends of the run.
        """
        named = self.owners[index]
        if named is None:
            return self._numbers[index] * len(self._ticks.layers(owner))
        if owner is None:
            run = self._ticks.run
            if is_shared and FARTHEST <= named - run.first < run.kept - FARTHEST:
                raise NotAlikeError
            return self._numbers[index][:1]
        found = self._numbers_named.get((index, owner))
        if found is None:
            found = self._numbers_named[index, owner] = self._named_by_layer(owner, index, named - owner)
        return found

    def _named_by_layer(self, owner: int, index: int, distance: int) -> list[int]:
        if abs(distance) > FARTHEST:
            raise NotAlikeError
        slot = self.slots[index]
        in_layers = [self._numbers_in_layer.get(layer + distance, ()) for layer in self._ticks.layers(owner)]
        if any(slot >= len(numbers) for numbers in in_layers):
            raise NotAlikeError
        return [numbers[slot] for numbers in in_layers]
