"""Replays of recorded histories of the real CUDA caching allocator: every address and every segment as recorded.

`PLANNER_SHARED_DATA` names the folder that holds `allocator_traces/*.json.gz`. Such a file is a snapshot of
`torch.cuda.memory._record_memory_history` without stack frames: `events` are [action, address, size, stream, operator]
in order, `segments_at_end` are [address, size, pool, stream, is_expandable, [[block size, requested, state], ...]].
A history may start in the middle of a run; its first state is found by undoing the events from the last one.
"""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import os
import pathlib

import pytest

from planner.allocator import AllocatorSettings, CachingAllocator, OutOfMemory, replay
from planner.allocator_blocks import Block, Segment, SegmentBlock
from planner.allocator_settings import LARGEST_SMALL_BYTES, SMALL_SEGMENT_BYTES, round_size
from planner.sizes import MIB

NATIVE = AllocatorSettings()
EXPANDABLE = AllocatorSettings(expandable_segments=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    """What a history holds, and what its replay has to give besides every single address."""

    allocations: int
    segments: int
    """Segments taken from the driver, or stretches of pages mapped."""
    released: int = 0
    """Segments given back, or stretches of pages unmapped."""
    peak_reserved_mib: int
    starts_empty: bool = True
    settings: AllocatorSettings = NATIVE
    out_of_memory_bytes: int | None = None
    """The rounded request that failed on the real card."""
    retries: int = 0
    """How often the card was full. Its size is not recorded; the peak of reserved stands in for it."""

    @property
    def capacity_bytes(self) -> int | None:
        return self.peak_reserved_mib * MIB if self.retries else None


HISTORIES = {
    "Constructor-Sun_memory_snapshot_b5ef67_gpu0": Expected(
        allocations=2434, segments=175, peak_reserved_mib=8146, settings=EXPANDABLE
    ),
    # This card ran full: one request was served after pages were unmapped, the next one was refused for good.
    "Constructor-Sun_memory_snapshot_b5ef67_gpu1": Expected(
        allocations=199,
        segments=40,
        released=6,
        peak_reserved_mib=80302,
        settings=EXPANDABLE,
        out_of_memory_bytes=5_308_694_528,
        retries=2,
    ),
    "Constructor-Sun_memory_snapshot_b5ef67_gpu2": Expected(
        allocations=392, segments=78, peak_reserved_mib=20870, settings=EXPANDABLE
    ),
    # This card ran full as well, and giving back ten free segments made room.
    "HugePandaCoder_my_snapshot_007209": Expected(
        allocations=1023, segments=16, released=11, peak_reserved_mib=21166, starts_empty=False, retries=1
    ),
    "NiuHuangxiaozi_forward_and_backward_memory_snapshot_100_9ab7a6": Expected(
        allocations=3853, segments=65, peak_reserved_mib=750
    ),
    "NiuHuangxiaozi_forward_and_backward_memory_snapshot_150_16edf3": Expected(
        allocations=3907, segments=80, peak_reserved_mib=1014
    ),
    "NiuHuangxiaozi_forward_and_backward_memory_snapshot_200_cee681": Expected(
        allocations=3907, segments=83, peak_reserved_mib=1326
    ),
    "NiuHuangxiaozi_forward_and_backward_memory_snapshot_200_mixed_precision_4ed700": Expected(
        allocations=4404, segments=88, peak_reserved_mib=1150
    ),
    "NiuHuangxiaozi_forward_memory_snapshot_100_baf850": Expected(allocations=785, segments=31, peak_reserved_mib=442),
    "NiuHuangxiaozi_forward_memory_snapshot_150_f1c4f9": Expected(allocations=785, segments=44, peak_reserved_mib=636),
    "NiuHuangxiaozi_forward_memory_snapshot_200_b4768e": Expected(allocations=785, segments=48, peak_reserved_mib=902),
    "NiuHuangxiaozi_forward_memory_snapshot_200_mixed_precision_7b5db6": Expected(
        allocations=995, segments=47, peak_reserved_mib=708
    ),
    "kkaitlyn111_2.7B_ctx128_forward_mixed": Expected(
        allocations=2703, segments=461, peak_reserved_mib=23122, starts_empty=False
    ),
    "kkaitlyn111_2.7B_ctx128_fullstep": Expected(
        allocations=6770, segments=782, released=430, peak_reserved_mib=58280, starts_empty=False
    ),
    "silmont2000_memory_forward_bf16_128_d9ecf8": Expected(
        allocations=937, segments=0, peak_reserved_mib=822, starts_empty=False
    ),
    "silmont2000_memory_forward_fp32_128_769df2": Expected(
        allocations=681, segments=0, peak_reserved_mib=582, starts_empty=False
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_every_address_and_segment_is_as_recorded(name: str) -> None:
    expected, history = HISTORIES[name], _history(name)
    allocator = _Replay(history, expected).run()
    assert allocator.peak_reserved_bytes == expected.peak_reserved_mib * MIB
    assert allocator.retries == expected.retries
    final = [
        [segment.address, segment.size_bytes, [[block.size_bytes, block.is_allocated] for block in segment.blocks]]
        for segment in allocator.segments()
    ]
    recorded = [
        [address, size_bytes, [[block_bytes, state != "inactive"] for block_bytes, _, state in blocks]]
        for address, size_bytes, _, _, _, blocks in history["segments_at_end"]
    ]
    assert final == recorded


@pytest.mark.parametrize("name", [name for name, expected in HISTORIES.items() if expected.starts_empty])
def test_peak_reserved_needs_only_the_order_and_sizes_of_births_and_deaths(name: str) -> None:
    expected = HISTORIES[name]
    events, failed_event = _births_and_deaths(_history(name))
    outcome = replay(events, expected.settings, expected.capacity_bytes)
    assert outcome.peak_reserved_bytes == expected.peak_reserved_mib * MIB
    assert outcome.out_of_memory_event == failed_event
    assert outcome.retries == expected.retries


def test_the_recorded_out_of_memory_happens_at_its_event_and_not_with_more_memory() -> None:
    name = "Constructor-Sun_memory_snapshot_b5ef67_gpu1"
    expected = HISTORIES[name]
    events, failed_event = _births_and_deaths(_history(name))
    outcome = replay(events, EXPANDABLE, expected.capacity_bytes)
    assert outcome.out_of_memory.asked_bytes == expected.out_of_memory_bytes
    assert outcome.out_of_memory_event == failed_event
    roomy = replay(events, EXPANDABLE, expected.capacity_bytes + 2 * expected.out_of_memory_bytes)
    assert roomy.out_of_memory_event is None


def test_every_history_of_the_folder_has_an_expectation() -> None:
    names = {path.name.removesuffix(".json.gz") for path in _folder().glob("*.json.gz")}
    assert names == set(HISTORIES)


def _folder() -> pathlib.Path:
    shared = os.environ.get("PLANNER_SHARED_DATA")
    if not shared:
        pytest.skip("PLANNER_SHARED_DATA is not set: it names the folder with allocator_traces/")
    folder = pathlib.Path(shared) / "allocator_traces"
    if not folder.is_dir():
        pytest.skip("PLANNER_SHARED_DATA names a folder without allocator_traces/")
    return folder


def _history(name: str) -> dict:
    path = _folder() / f"{name}.json.gz"
    if not path.is_file():
        pytest.skip(f"allocator_traces/{name}.json.gz is not there")
    with gzip.open(path) as file:
        return json.load(file)


class _Replay:
    """One history run through the simulator, held against the record after each event."""

    def __init__(self, history: dict, expected: Expected) -> None:
        self._events = history["events"]
        self._expected = expected
        self._addresses: list[int] = []
        """Where the next segments or ranges go, as recorded."""
        self._released: dict[int, int] = {}
        """Segments given back since the last allocation, as recorded: address and size."""
        self._allocator = CachingAllocator(
            expected.settings, expected.capacity_bytes, place=lambda size_bytes: self._addresses.pop(0)
        )
        start = _start_segments(history)
        assert (start == []) == expected.starts_empty
        self._live: dict[int, Block] = self._allocator.adopt(start)
        self._reserved_bytes = self._allocator.reserved_bytes
        self._counts = {"alloc": 0, "taken": 0, "released": 0, "oom": 0}

    def run(self) -> CachingAllocator:
        pools_with_a_range: set[int] = set()
        for action, address, size_bytes, stream, _ in self._events:
            match action:
                case "alloc":
                    self._check_malloc(address, size_bytes, stream)
                case "free_completed":
                    self._allocator.free(self._live.pop(address))
                case "oom":
                    self._check_out_of_memory(size_bytes, stream)
                case "segment_alloc" | "segment_map":
                    page_bytes = SMALL_SEGMENT_BYTES if size_bytes == SMALL_SEGMENT_BYTES else 20 * MIB
                    if action == "segment_alloc" or page_bytes not in pools_with_a_range:
                        self._addresses.append(address)
                    pools_with_a_range.add(page_bytes)
                    self._counts["taken"] += 1
                    self._reserved_bytes += size_bytes
                case "segment_free" | "segment_unmap":
                    if action == "segment_free":
                        self._released[address] = size_bytes
                    self._counts["released"] += 1
                    self._reserved_bytes -= size_bytes
        assert self._counts == {
            "alloc": self._expected.allocations,
            "taken": self._expected.segments,
            "released": self._expected.released,
            "oom": int(self._expected.out_of_memory_bytes is not None),
        }
        return self._allocator

    def _check_malloc(self, address: int, size_bytes: int, stream: int) -> None:
        before = self._segments() if self._released else {}
        taken = set(self._addresses)
        if self._released and self._counts["alloc"] == 0:
            # The history starts inside a release; why it happened is not recorded, that it took every free segment is.
            self._allocator.empty_cache()
        block = self._allocator.malloc(size_bytes, stream)
        kept = self._segments().keys() - taken if self._released else set()
        assert {at: size for at, size in before.items() if at not in kept} == self._released
        assert block.address == address
        assert not self._addresses, "the record takes a segment here, the simulator did not"
        assert self._allocator.reserved_bytes == self._reserved_bytes
        self._live[address] = block
        self._released = {}
        self._counts["alloc"] += 1

    def _segments(self) -> dict[int, int]:
        return {segment.address: segment.size_bytes for segment in self._allocator.segments()}

    def _check_out_of_memory(self, size_bytes: int, stream: int) -> None:
        with pytest.raises(OutOfMemory) as caught:
            self._allocator.malloc(size_bytes, stream)
        assert caught.value.report.asked_bytes == size_bytes == self._expected.out_of_memory_bytes
        self._counts["oom"] += 1


def _births_and_deaths(history: dict) -> tuple[list[tuple[int, int]], int | None]:
    """The history without addresses, and the index of the request that failed."""
    events: list[tuple[int, int]] = []
    storages: dict[int, int] = {}
    failed_event = None
    for action, address, size_bytes, _, _ in history["events"]:
        if action == "alloc":
            storages[address] = len(events)
            events.append((storages[address], size_bytes))
        elif action == "free_completed":
            events.append((storages.pop(address), -size_bytes))
        elif action == "oom":
            failed_event = len(events)
            events.append((failed_event, size_bytes))
    return events, failed_event


def _start_segments(history: dict) -> list[Segment]:
    """The state before the first event, by undoing all events from the last state. Empty for expandable segments."""
    segments: dict[int, tuple[int, bool, int]] = {}
    live: dict[int, tuple[int | None, int]] = {}
    for address, size_bytes, pool, stream, _, blocks in history["segments_at_end"]:
        segments[address] = (size_bytes, pool == "small", stream)
        for block_bytes, requested_bytes, state in blocks:
            if state != "inactive":
                live[address] = (block_bytes, requested_bytes)
            address += block_bytes
    mapped_bytes = sum(size_bytes for size_bytes, _, _ in segments.values())
    for action, address, size_bytes, stream, _ in reversed(history["events"]):
        match action:
            case "alloc":
                del live[address]
            case "free_completed":
                live[address] = (None, size_bytes)
            case "segment_alloc":
                del segments[address]
            case "segment_free":
                segments[address] = (size_bytes, size_bytes == SMALL_SEGMENT_BYTES, stream)
            case "segment_map":
                mapped_bytes -= size_bytes
            case "segment_unmap":
                mapped_bytes += size_bytes
    if mapped_bytes == 0:
        assert not live
        return []
    return [_start_segment(history, address, *facts, live) for address, facts in sorted(segments.items())]


def _start_segment(
    history: dict, address: int, size_bytes: int, is_small: bool, stream: int, live: dict[int, tuple[int | None, int]]
) -> Segment:
    blocks: list[SegmentBlock] = []
    position, end = address, address + size_bytes
    inside = sorted(start for start in live if address <= start < end)
    for start, following in itertools.pairwise([*inside, end]):
        if start > position:
            blocks.append(SegmentBlock(size_bytes=start - position, requested_bytes=0, is_allocated=False))
        block_bytes, requested_bytes = live[start]
        if block_bytes is None:
            block_bytes = _unseen_block_bytes(history, start, requested_bytes, following, is_small=is_small)
        blocks.append(SegmentBlock(size_bytes=block_bytes, requested_bytes=requested_bytes, is_allocated=True))
        position = start + block_bytes
    if position < end:
        blocks.append(SegmentBlock(size_bytes=end - position, requested_bytes=0, is_allocated=False))
    return Segment(address=address, stream=stream, is_small=is_small, blocks=tuple(blocks))


def _unseen_block_bytes(history: dict, start: int, requested_bytes: int, following: int, *, is_small: bool) -> int:
    """Size of a block that was live before the first event and died during the history.

    In the large pool it may hold up to 1 MiB more than the rounded request. A gap of at most 1 MiB before the next
    live block is such a rest, since no free block of that pool is so small; in a longer gap, the first allocation
    that starts near the block, before it dies, shows where the free block after it begins.
    """
    rounded_bytes = round_size(requested_bytes, NATIVE)
    gap_bytes = following - start - rounded_bytes
    if is_small or gap_bytes == 0:
        return rounded_bytes
    if gap_bytes <= LARGEST_SMALL_BYTES:
        return rounded_bytes + gap_bytes
    for action, address, *_ in history["events"]:
        if action == "free_completed" and address == start:
            break
        if action == "alloc" and 0 <= address - start - rounded_bytes <= LARGEST_SMALL_BYTES:
            return address - start
    return rounded_bytes
