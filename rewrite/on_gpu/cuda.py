"""The CUDA card as a measurement sees it. A test puts another object with these methods in its place."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from planner.errors import MeasurementError
from planner.plan_types.sizes import format_size
from planner.profiles.process_memory import ProcessMemory, card_used_bytes, process_memory


class Device(Protocol):
    """What is asked of a card."""

    name: str
    """What tensors are moved to."""

    def begin(self, cap_bytes: int | None = None) -> None:
        """Start CUDA in this process. The allocator may then take `cap_bytes` from the driver; None: all there is."""

    def title(self) -> str:
        """What the driver calls the card."""

    def peaks(self) -> tuple[int, int]:
        """Largest number of bytes allocated and reserved so far."""

    def allocated_bytes(self) -> int:
        """Now."""

    def reserved_bytes(self) -> int:
        """Now."""

    def process_memory(self) -> ProcessMemory:
        """Now."""

    def milliseconds(self, function: Callable[[], object]) -> float:
        """Wall time of a call and of all that it queued on the card."""


class Cuda:
    """The first CUDA card."""

    name = "cuda"

    def begin(self, cap_bytes: int | None = None) -> None:
        if torch.version.cuda is None or not torch.cuda.is_available():
            raise MeasurementError("there is no CUDA card here: what a plan promises is measured on one")
        self._used_before_bytes = card_used_bytes()
        torch.cuda.init()
        if cap_bytes is None:
            return
        card_bytes = torch.cuda.get_device_properties(0).total_memory
        if cap_bytes > card_bytes:
            raise MeasurementError(
                f"the budget leaves {format_size(cap_bytes)} beside the context, and this card has "
                f"{format_size(card_bytes)}: give a budget that it has"
            )
        torch.cuda.set_per_process_memory_fraction(cap_bytes / card_bytes, 0)

    def title(self) -> str:
        return torch.cuda.get_device_name(0)

    def peaks(self) -> tuple[int, int]:
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated()

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved()

    def process_memory(self) -> ProcessMemory:
        torch.cuda.synchronize()
        return process_memory(used_before_bytes=self._used_before_bytes)

    def milliseconds(self, function: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e3
