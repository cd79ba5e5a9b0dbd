"""The CUDA card with a record of all that its allocator does."""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch

from planner.rewrite.on_gpu import cuda


class Device(cuda.Device, Protocol):
    """What is asked of a card, beside what any measurement asks."""

    def snapshot(self) -> dict[str, Any]:
        """As of `torch.cuda.memory._snapshot()`: events since `begin`, and the segments now."""

    def stop_recording(self) -> None:
        """The steps that are timed are not slowed down by the record."""

    def taken_bytes(self) -> int:
        """Of all allocations so far, as asked for."""


class RecordingCuda(cuda.Cuda):
    """The first CUDA card. The record begins with it."""

    def begin(self, cap_bytes: int | None = None) -> None:
        super().begin(cap_bytes)
        torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=sys.maxsize)

    def snapshot(self) -> dict[str, Any]:
        torch.cuda.synchronize()
        return torch.cuda.memory._snapshot()

    def stop_recording(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)

    def taken_bytes(self) -> int:
        return torch._C._cuda_memoryStats(torch.cuda.current_device())["requested_bytes"]["all"]["allocated"]
