"""A CUDA card that records all events of its allocator."""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch

from planner.rewrite.on_gpu import cuda


class Device(cuda.Device, Protocol):
    """A card whose allocations can be recorded."""

    def snapshot(self) -> dict[str, Any]:
        """Returns `torch.cuda.memory._snapshot()`: the events since `begin`, and the current segments."""

    def stop_recording(self) -> None:
        """Stop recording, which would slow down the steps that are timed."""

    def taken_bytes(self) -> int:
        """Returns the requested bytes of all allocations so far."""


class RecordingCuda(cuda.Cuda):
    """The first CUDA card. Recording starts with `begin`."""

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
