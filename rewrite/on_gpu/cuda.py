"""The interface to the card on which a plan is measured. Tests replace it by an object with the same methods."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from planner.errors import MeasurementError
from planner.plan_types.sizes import format_size
from planner.profiles.process_memory import ProcessMemory, card_used_bytes, process_memory


class Device(Protocol):
    """A card on which memory and time can be measured."""

    name: str
    """Name of the torch device that tensors are moved to, such as 'cuda'."""

    def begin(self, cap_bytes: int | None = None) -> None:
        """Initialize the device in this process.

        Args:
            cap_bytes: maximum number of bytes that the allocator may reserve; None for no cap.
        """

    def title(self) -> str:
        """Return the driver's name for the card."""

    def peaks(self) -> tuple[int, int]:
        """Return the peaks so far: (bytes that tensors used, bytes that the allocator held)."""

    def allocated_bytes(self) -> int:
        """Return the bytes that tensors use now."""

    def reserved_bytes(self) -> int:
        """Return the bytes that the allocator holds now."""

    def process_memory(self) -> ProcessMemory:
        """Return the memory of this process on the card now, as the driver counts it."""

    def milliseconds(self, function: Callable[[], object]) -> float:
        """Call the function and return its wall time in milliseconds, including all work that it queued on the card."""


class Cuda:
    """The first CUDA card."""

    name = "cuda"

    def begin(self, cap_bytes: int | None = None) -> None:
        if torch.version.cuda is None or not torch.cuda.is_available():
            raise MeasurementError("there is no CUDA card here: run this on a machine that has one")
        self._used_before_bytes = card_used_bytes()
        torch.cuda.init()
        if cap_bytes is None:
            return
        card_bytes = torch.cuda.get_device_properties(0).total_memory
        if cap_bytes > card_bytes:
            raise MeasurementError(
                f"the budget leaves {format_size(cap_bytes)} for the allocator, but this card has "
                f"{format_size(card_bytes)} in all: give a smaller budget"
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
