"""A simulated card that records its history of allocations in the form of PyTorch's snapshots."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence

from planner.allocator.blocks import Block, Segment, SegmentBlock
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.out_of_memory import OutOfMemory
from planner.allocator.settings import AllocatorSettings
from planner.plan_types.sizes import GIB, MIB

PAGE_BYTES = 2 * MIB
NATIVE = AllocatorSettings()
EXPANDABLE = AllocatorSettings(expandable_segments=True)


def named(names: str, facts: Sequence) -> dict:
    return dict(zip(names.split(), facts, strict=True))


class Card(CachingAllocator):
    """A stand-in for a card, which records its history as PyTorch does. Its segments are in no order.

    Attributes:
        frames: the stack trace that the next events get, innermost frame first, as (name, file, line).
    """

    def __init__(self, settings: AllocatorSettings, capacity_bytes: int | None, *, seed: int = 0) -> None:
        places = [
            place << 43 if settings.expandable_segments else (1 << 46) + 64 * place * GIB for place in range(1, 999)
        ]
        if not settings.expandable_segments:
            random.Random(seed).shuffle(places)
        super().__init__(settings, capacity_bytes, place=lambda size_bytes: places.pop(0))
        self.is_expandable = settings.expandable_segments
        self.capacity_bytes = capacity_bytes
        self.frames: list[tuple[str, str, int]] = [("step", "train.py", 1)]
        self.trace: list[dict] = []
        self._noted: dict[int, tuple[int, int]] = {}

    def malloc(self, size_bytes: int, stream: int = 0) -> Block | None:
        block = None
        reported = {"action": "oom", "size": -(-size_bytes // 512) * 512, "stream": stream}
        with contextlib.suppress(OutOfMemory):
            block = super().malloc(size_bytes, stream)
            reported = {"action": "alloc", "addr": block.address, "size": size_bytes, "stream": stream}
        self._note()
        if block is None:
            reported["device_free"] = self.capacity_bytes - self.reserved_bytes
        self.trace.append(reported | {"frames": self._frames()})
        return block

    def free(self, block: Block) -> None:
        reported = {"addr": block.address, "size": block.requested_bytes, "stream": block.pool.stream}
        super().free(block)
        self.trace += [{"action": "free_requested", **reported}, {"action": "free_completed", **reported}]

    def empty_cache(self) -> None:
        self._note()
        super().empty_cache()
        self._note()

    def snapshot(self, *, first_event: int = 0) -> dict:
        frames = {entry["addr"]: entry["frames"] for entry in self.trace if entry["action"] == "alloc"}
        state = {False: "inactive", True: "active_allocated"}
        for entry in self.trace:
            entry.setdefault("frames", [])
            entry["time_us"] = 1
        return {
            "segments": [
                {
                    "device": 0,
                    "address": segment.address,
                    "total_size": segment.size_bytes,
                    "stream": segment.stream,
                    "segment_type": "small" if segment.is_small else "large",
                    "segment_pool_id": (0, 0),
                    "is_expandable": self.is_expandable,
                    "blocks": [
                        named(
                            "size requested_size state",
                            (block.size_bytes, block.requested_bytes, state[block.is_allocated]),
                        )
                        | {"frames": frames.get(address, []) if block.is_allocated else []}
                        for address, block in _with_addresses(segment)
                    ],
                }
                for segment in self.segments()
            ],
            "device_traces": [[*self.trace[first_event:], {"action": "snapshot", "addr": 0, "size": 0, "stream": 0}]],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1},
        }

    def _frames(self) -> list[dict]:
        return [named("name filename line", frame) for frame in self.frames]

    def _note(self) -> None:
        """Write down what was given back or taken since the last time: never both, for a release is noted alone."""
        unit = PAGE_BYTES if self.is_expandable else None
        now = {
            address: (unit or segment.size_bytes, segment.stream)
            for segment in self.segments()
            for address in range(segment.address, segment.address + segment.size_bytes, unit or segment.size_bytes)
        }
        kind = ("unmap", "map") if self.is_expandable else ("free", "alloc")
        for action, ours, others in ((kind[0], self._noted, now), (kind[1], now, self._noted)):
            runs: list[dict] = []
            for address in sorted(ours.keys() - others.keys()):
                size_bytes, stream = ours[address]
                if unit and runs and runs[-1]["addr"] + runs[-1]["size"] == address:
                    runs[-1]["size"] += size_bytes
                else:
                    runs.append({"action": f"segment_{action}", "addr": address, "size": size_bytes, "stream": stream})
            self.trace += runs
        self._noted = now


def _with_addresses(segment: Segment) -> Iterator[tuple[int, SegmentBlock]]:
    address = segment.address
    for block in segment.blocks:
        yield address, block
        address += block.size_bytes
