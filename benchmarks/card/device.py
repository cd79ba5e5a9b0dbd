"""The CUDA card as the measurement sees it. A test puts another object with these methods in its place."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from profiles.process_memory import ProcessMemory, card_used_bytes, process_memory


class Device(Protocol):
    """What is asked of a card."""

    name: str
    """What tensors are moved to."""

    def begin(self) -> None:
        """Start CUDA in this process, and start to record what the allocator does."""

    def snapshot(self) -> dict[str, Any]:
        """As of `torch.cuda.memory._snapshot()`: events since `begin`, and the segments now."""

    def stop_recording(self) -> None:
        """The steps that are timed are not slowed down by the record."""

    def peaks(self) -> tuple[int, int]:
        """Largest number of bytes allocated and reserved so far."""

    def reserved_bytes(self) -> int:
        """Now."""

    def process_memory(self) -> ProcessMemory:
        """Now."""

    def taken_bytes(self) -> int:
        """Of all allocations so far, as asked for."""

    def milliseconds(self, function: Callable[[], object]) -> float:
        """Wall time of a call and of all that it queued on the card."""


class Cuda:
    """The first CUDA card."""

    name = "cuda"

    def begin(self) -> None:
        self._used_before_bytes = card_used_bytes()
        torch.cuda.init()
        torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=sys.maxsize)

    def snapshot(self) -> dict[str, Any]:
        torch.cuda.synchronize()
        return torch.cuda.memory._snapshot()

    def stop_recording(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)

    def peaks(self) -> tuple[int, int]:
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved()

    def process_memory(self) -> ProcessMemory:
        torch.cuda.synchronize()
        return process_memory(used_before_bytes=self._used_before_bytes)

    def taken_bytes(self) -> int:
        return torch._C._cuda_memoryStats(torch.cuda.current_device())["requested_bytes"]["all"]["allocated"]

    def milliseconds(self, function: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e3
