"""Replays of recorded histories of the real CUDA caching allocator: every address and every segment as recorded.

`PLANNER_SHARED_DATA` names the folder that holds `allocator_traces/*.json.gz`, snapshots of
`torch.cuda.memory._record_memory_history` without stack frames (see `planner/snapshot/file.py`).
"""

from __future__ import annotations

import dataclasses
import os
import pathlib

import pytest

from planner.allocator.replay import replay
from planner.allocator.settings import AllocatorSettings
from planner.plan_types.sizes import MIB
from planner.snapshot import Action, History, load, recorded_stream, replay_history
from planner.snapshot.result import Counts

pytestmark = pytest.mark.no_torch

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
    assert history.settings == expected.settings
    assert history.notes == ()
    failed = [event.size_bytes for event in history.events if event.action is Action.OOM]
    assert failed == [size for size in (expected.out_of_memory_bytes,) if size is not None]
    result = replay_history(history)
    assert result.starts_empty == expected.starts_empty
    assert result.counts == Counts(
        allocations=expected.allocations,
        failed_requests=len(failed),
        taken=expected.segments,
        given_back=expected.released,
    )
    assert result.addresses == ()
    assert result.driver == ()
    assert result.simulated.peak_reserved_bytes == expected.peak_reserved_mib * MIB
    assert result.recorded == dataclasses.replace(result.simulated, peak_allocated_bytes=None)
    assert result.retries == expected.retries
    assert [pair.simulated for pair in result.segments] == list(history.segments)
    assert result.is_equal


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("name", [name for name, expected in HISTORIES.items() if expected.starts_empty])
def test_peak_reserved_needs_only_the_order_and_sizes_of_births_and_deaths(name: str, descending: bool) -> None:
    expected, history = HISTORIES[name], _history(name)
    stream = recorded_stream(history)
    outcome = replay(stream, expected.settings, expected.capacity_bytes, descending=descending)
    assert outcome.peak_reserved_bytes == expected.peak_reserved_mib * MIB
    assert outcome.out_of_memory_event == _failed_birth(history)
    assert outcome.retries == expected.retries


def test_the_recorded_out_of_memory_happens_at_its_event_and_not_with_more_memory() -> None:
    name = "Constructor-Sun_memory_snapshot_b5ef67_gpu1"
    expected, history = HISTORIES[name], _history(name)
    events = recorded_stream(history)
    outcome = replay(events, EXPANDABLE, expected.capacity_bytes)
    assert outcome.out_of_memory.asked_bytes == expected.out_of_memory_bytes
    assert outcome.out_of_memory_event == _failed_birth(history)
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


def _history(name: str) -> History:
    path = _folder() / f"{name}.json.gz"
    if not path.is_file():
        pytest.skip(f"allocator_traces/{name}.json.gz is not there")
    return load(path)


def _failed_birth(history: History) -> int | None:
    """Index in the stream of births and deaths of the request that failed; None where none did."""
    stream = [
        event.action for event in history.events if event.action in (Action.ALLOC, Action.FREE_COMPLETED, Action.OOM)
    ]
    return stream.index(Action.OOM) if Action.OOM in stream else None
