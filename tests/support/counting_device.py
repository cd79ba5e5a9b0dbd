"""A simulated card: the CPU, with every storage counted and a memory limit. Also runs as a process.

python counting_device.py PLAN.json RESULT.json ...     like planner.rewrite.on_gpu.worker
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import weakref
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.profiles.process_memory import ProcessMemory
from planner.rewrite.on_gpu import worker


class Counting(TorchDispatchMode):
    """Counts the bytes of live storages. Raises an error as CUDA's allocator does if they would exceed the cap."""

    def __init__(self, cap_bytes: int | None) -> None:
        super().__init__()
        self._cap_bytes = cap_bytes
        self._seen: set[int] = set()
        self.live_bytes = self.peak_bytes = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                self.note(leaf)
        return out

    def note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        if self._cap_bytes is not None and self.live_bytes + size > self._cap_bytes:
            raise torch.OutOfMemoryError(f"made up: tried to allocate {size} bytes\n with {self.live_bytes} in use")
        self._seen.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live_bytes -= size


class CountingCpu:
    """Implements `planner.rewrite.on_gpu.cuda.Device`. Storages that exist when it begins count as moved to the card.

    Args:
        beside_bytes: simulated memory of the process in addition to its tensors.
        grows_bytes: simulated bytes that are added to the counted ones.
    """

    name = "cpu"

    def __init__(self, *, beside_bytes: int = 0, grows_bytes: int = 0) -> None:
        self._beside_bytes, self._grows_bytes = beside_bytes, grows_bytes
        self._until_it_ends = contextlib.ExitStack()

    def begin(self, cap_bytes: int | None = None) -> None:
        self._mode = Counting(cap_bytes)
        gc.collect()
        tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
        for tensor in tensors:
            if not tensor.is_meta:
                self._mode.note(tensor)
        self._until_it_ends.enter_context(self._mode)

    def end(self) -> None:
        self._until_it_ends.close()

    def title(self) -> str:
        return "a CPU that counts"

    def peaks(self) -> tuple[int, int]:
        return self._mode.peak_bytes + self._grows_bytes, self._mode.peak_bytes + self._grows_bytes

    def allocated_bytes(self) -> int:
        return self._mode.live_bytes

    def reserved_bytes(self) -> int:
        return self._mode.peak_bytes

    def process_memory(self) -> ProcessMemory:
        return ProcessMemory(process_bytes=self._mode.peak_bytes + self._beside_bytes, source="counted")

    def milliseconds(self, function: Callable[[], object]) -> float:
        began = time.perf_counter()
        function()
        return (time.perf_counter() - began) * 1e3


if __name__ == "__main__":
    sys.exit(worker.main(sys.argv[1:], CountingCpu()))
