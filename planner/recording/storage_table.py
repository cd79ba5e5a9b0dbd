"""The storages of one device during a recording, and the clock that counts the ticks of events.

A storage is registered when the recorder sees the first tensor on it. A weak reference to the `UntypedStorage` records
its death at the moment at which PyTorch frees the memory.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from planner.recording.step_graph import Category, Storage
from planner.virtual_gpu import sparse_tensors, streams


class StorageTable:
    """Numbers the storages of a device and records their lives in ticks.

    Args:
        device: type of the device whose memory is watched, such as 'vgpu' or 'cpu'.
        virtual: True if the tensors on that device are fakes.
    """

    def __init__(self, device: str, *, virtual: bool) -> None:
        self.device, self.virtual = device, virtual
        self.tick = 0
        """Tick of the last event."""
        self.storages: list[Storage] = []
        self.cache_releases: list[int] = []
        """Ticks at which the program called `torch.cuda.empty_cache`."""
        self.birth_op: int | None = None
        """Index of the op that new storages are attributed to; None during the setup."""
        self._alive: dict[int, tuple[int, int, weakref.ref]] = {}  # storage pointer -> (index, birth, finalizer)
        self._freed: dict[int, tuple[int, weakref.ref]] = {}
        """Storages that were resized to 0: pointer -> (index, finalizer)."""

    def next_tick(self) -> int:
        """Advances the clock by one event and returns its tick."""
        self.tick += 1
        return self.tick

    def note_cache_release(self) -> None:
        """Notes that the program releases the allocator's cache now."""
        self.cache_releases.append(self.next_tick())

    def watches(self, tensor: torch.Tensor) -> bool:
        """True if the tensor's memory belongs to the watched device."""
        return isinstance(tensor, FakeTensor) is self.virtual and tensor.device.type == self.device

    def storage_of(
        self, tensor: torch.Tensor, *, category: Category = Category.TEMPORARY, adopt: int | None = None
    ) -> int | None:
        """Returns the index of a tensor's storage, and registers the storage as born now if it is new.

        Args:
            tensor: any tensor.
            category: category of the storage if it is new.
            adopt: index of a storage that was recorded before. If the tensor's storage is new, it gets this index, and
                its life becomes one more life of that storage. None gives a new storage a new index.

        Returns:
            The index; None if the tensor has no elements, is sparse, or is on another device.
        """
        if not self.watches(tensor) or tensor.layout is not torch.strided:
            return None
        untyped = tensor.untyped_storage()
        size_bytes = untyped.nbytes()
        if size_bytes == 0:
            return None
        pointer = untyped._cdata
        known = self._alive.get(pointer)
        if known is not None:
            return known[0]
        birth = self.next_tick()
        if adopt is None:
            index = len(self.storages)
            self.storages.append(
                Storage(
                    size_bytes=size_bytes,
                    lives=[],
                    category=category,
                    op=self.birth_op,
                    shape=tuple(tensor.shape),
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    stream=streams.current().number,
                )
            )
        else:
            index = adopt

        self.begins(untyped, index, birth)
        return index

    def begins(self, untyped: torch.UntypedStorage, index: int, birth: int) -> None:
        """Notes that a life of storage number `index` began at tick `birth`; it ends when the memory is freed."""
        pointer = untyped._cdata

        def died(_: weakref.ref) -> None:
            if pointer in self._alive:  # else its memory was freed before, by a resize
                self._ends(pointer)
            self._freed.pop(pointer, None)

        self._alive[pointer] = (index, birth, weakref.ref(untyped, died))

    def resized(self, untyped: torch.UntypedStorage) -> None:
        """Notes that a storage has another size now: one life ends and, unless the size is 0, another begins."""
        pointer, size_bytes = untyped._cdata, untyped.nbytes()
        if pointer in self._alive:
            index, _, finalizer = self._ends(pointer)
        elif pointer in self._freed:
            index, finalizer = self._freed.pop(pointer)
        else:
            return  # of another device, or never seen: it is registered when an op uses it
        if not size_bytes:
            self._freed[pointer] = index, finalizer
            return
        if size_bytes != self.storages[index].size_bytes:
            self.storages.append(dataclasses.replace(self.storages[index], size_bytes=size_bytes, lives=[]))
            index = len(self.storages) - 1
        self._alive[pointer] = index, self.next_tick(), finalizer

    @property
    def has_freed_storages(self) -> bool:
        """True if tensors exist whose storage was resized to 0, so that their values are lost."""
        return bool(self._freed)

    def freed_storage_of(self, tensor: torch.Tensor) -> Storage | None:
        """Returns the storage of a tensor if it was resized to 0; None for any other tensor."""
        if not self.watches(tensor) or tensor.layout is not torch.strided or not tensor.numel():
            return None
        untyped = tensor.untyped_storage()
        freed = None if untyped.nbytes() else self._freed.get(untyped._cdata)
        return None if freed is None else self.storages[freed[0]]

    def _ends(self, pointer: int) -> tuple[int, int, weakref.ref]:
        """Ends the life of the storage at a pointer, and returns its entry."""
        entry = self._alive.pop(pointer)
        self.storages[entry[0]].lives.append((entry[1], self.next_tick()))
        return entry

    def held_bytes(self) -> int:
        """Returns the bytes of all storages that are alive now."""
        return sum(self.storages[index].size_bytes for index, _, _ in self._alive.values())

    def lives(self) -> Iterator[tuple[int, int, int | None]]:
        """Yields the index, birth and death of each life of the storages so far. The death is None if it is alive."""
        for index, storage in enumerate(self.storages):
            yield from ((index, birth, death) for birth, death in storage.lives)
        yield from ((index, birth, None) for index, birth, _ in self._alive.values())

    def mark(self, tensor: torch.Tensor | None, category: Category, *, name: str = "") -> None:
        """Sets category and name of a tensor's storage. A sparse tensor has storages for its indices and its values."""
        tensor = None if tensor is None else local_part(tensor)
        if tensor is not None and tensor.is_sparse:
            of_model = sparse_tensors.has_elements(tensor)
            for part in sparse_tensors.parts_of(tensor):
                index = self.storage_of(part)
                if index is not None and (of_model or self.storages[index].op is not None):
                    self._describe(index, category, name)
        elif tensor is not None and (index := self.storage_of(tensor)) is not None:
            self._describe(index, category, name)

    def mark_if_temporary(self, tensor: torch.Tensor, category: Category, name: str = "") -> None:
        """Sets category and name of a tensor's storage if it has no other category yet."""
        index = self.storage_of(tensor)
        if index is not None and self.storages[index].category is Category.TEMPORARY:
            self._describe(index, category, name)

    def _describe(self, index: int, category: Category, name: str) -> None:
        """Sets the category of a storage, and its name if it has none, so that tied weights keep their first name."""
        storage = self.storages[index]
        storage.category, storage.name = category, storage.name or name

    def close(self, ticks: int) -> None:
        """Ends the recording: the lives of storages that are still alive end at tick `ticks`."""
        for index, birth, _finalizer in self._alive.values():
            self.storages[index].lives.append((birth, ticks))
        self._alive.clear()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a DTensor that this rank has, also if a collective still makes it; else the tensor itself."""
    local: Any = getattr(tensor, "_local_tensor", tensor)
    return local.elem if type(local).__name__ == "AsyncCollectiveTensor" else local
