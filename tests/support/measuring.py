"""A simulated card: training runs on the CPU, and the allocator's events are invented. Also runs as a process.

python measuring_cases.py NAME RESULT.pickle     like benchmarks.card.measure_case, for a case of `TINY`
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.card import measure_case
from benchmarks.card.cases import CASES, Case
from planner.profiles.process_memory import ProcessMemory

MIB = 1 << 20
CONTEXT_BYTES = 500 * MIB


def small_net() -> tuple[nn.Module, Any, Callable]:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    batch = (torch.randn(32, 64), torch.randint(10, (32,)))
    return model, batch, lambda output, batch: nn.functional.cross_entropy(output, batch[-1])


TINY = {
    "tiny": Case(name="tiny", build=small_net, keep_history=True),
    "tiny-accumulate4": Case(name="tiny-accumulate4", build=small_net, micro_batches=4),
    "tiny-fused": Case(name="tiny-fused", build=small_net, optimizer="adamw-fused"),
}


def snapshot_of(sizes: list[int]) -> dict[str, Any]:
    """Returns a snapshot whose trace takes and frees these signed bytes, all in one 2 GiB segment."""
    trace = [{"action": "segment_alloc", "addr": 4096, "size": 2048 * MIB, "stream": 0, "time_us": 1}]
    address, living = 4096, {}
    for size in sizes:
        if size > 0:
            living.setdefault(size, []).append(address)
            trace.append({"action": "alloc", "addr": address, "size": size, "stream": 0, "user_metadata": ""})
            address += size
        else:
            at = living[-size].pop()
            trace.append({"action": "free_requested", "addr": at, "size": -size, "stream": 0})
            trace.append({"action": "free_completed", "addr": at, "size": -size, "stream": 0})
    trace.append({"action": "snapshot", "size": 0, "stream": 0})
    block = {"size": 2048 * MIB, "requested_size": 1, "state": "active_allocated", "address": 4096}
    segment = {"address": 4096, "total_size": 2048 * MIB, "segment_type": "large", "stream": 0, "blocks": [block]}
    settings = {"expandable_segments": False, "roundup_power2_divisions": {"1": 0}}
    return {"segments": [segment], "device_traces": [trace], "allocator_settings": settings}


class FakeDevice:
    """A device whose steps really run on the CPU; each of them seems to take one more block.

    Args:
        streams: signed bytes after the set-up, and of each step; the last one repeats.
    """

    name = "cpu"

    def __init__(self, streams: list[list[int]]) -> None:
        self._streams, self._asked, self._taken, self.began = streams, 0, 0, 0

    def begin(self) -> None:
        self.began += 1

    def snapshot(self) -> dict[str, Any]:
        self._asked += 1
        return snapshot_of([size for part in self._streams[: self._asked] for size in part])

    def stop_recording(self) -> None:
        self._asked = 99

    def peaks(self) -> tuple[int, int]:
        return 10 * MIB, 20 * MIB

    def reserved_bytes(self) -> int:
        return 20 * MIB

    def process_memory(self) -> ProcessMemory:
        return ProcessMemory(process_bytes=20 * MIB + CONTEXT_BYTES, source="simulated")

    def taken_bytes(self) -> int:
        self._taken += 512
        return self._taken

    def milliseconds(self, function: Callable[[], object]) -> float:
        function()
        return 2.0


if __name__ == "__main__":
    CASES.update(TINY)
    if sys.argv[1] == "broken":
        print("about to fail", file=sys.stderr)
        raise RuntimeError("CUDA error: simulated")
    made_up = FakeDevice([[1024, 2048], [4096, -4096], [512, -512], [512, -512]])
    sys.exit(measure_case.main(sys.argv[1], pathlib.Path(sys.argv[2]), made_up))
