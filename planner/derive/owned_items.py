"""The items of a recording by the layers that own them, and their numbers in a recording of more layers."""

from __future__ import annotations

import collections

from planner.derive.layer_windows import NotAlikeError


class Owned:
    """Items of one kind (ops, storages, saves or calls) by the layers that own them."""

    def __init__(self, owners: list[int | None]) -> None:
        self.owners = owners
        self.of_layer: dict[int, list[int]] = collections.defaultdict(list)
        """For each layer, the indices of its items."""
        self.slots: list[int] = []
        """The number of each item among those of its layer."""
        for index, owner in enumerate(owners):
            self.slots.append(0 if owner is None else len(self.of_layer[owner]))
            if owner is not None:
                self.of_layer[owner].append(index)
        self.places: list[tuple[int, int | None]] = []
        """The items of the longer recording in their order: index in the shorter one, and position of the layer."""
        self._new_indices: dict[tuple[int | None, int], int] = {}

    def arrange(self, order: list[tuple[tuple[int, ...], int, int | None]]) -> None:
        """Sets the order of the items of the longer recording. Each has a key for sorting, an index and a layer."""
        self.places = [(index, layer) for _, index, layer in sorted(order, key=lambda item: item[0])]
        for number, (index, layer) in enumerate(self.places):
            self._new_indices[layer, index if layer is None else self.slots[index]] = number

    def new_index(self, index: int, layer: int | None) -> int:
        """Returns the index in the longer recording of an item, or of its copy in a layer."""
        found = self._new_indices.get((layer, index if layer is None else self.slots[index]))
        if found is None:
            raise NotAlikeError
        return found
