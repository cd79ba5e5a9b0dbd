"""Snapshots of the caching allocator: read from files nobody should trust, and replayed to the last segment.

No file here comes from a card. `tests.support.card` is the simulator itself, writing down what it does the way pytorch
does, so it tests the reading and the search for the start; `test_allocator_histories.py` holds the simulator against
real cards.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pathlib
import pickle
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from planner.allocator.replay import replay
from planner.allocator.settings import AllocatorSettings
from planner.errors import SnapshotError
from planner.estimate.allocation_stream import signed_sizes
from planner.plan_types.sizes import GIB, MIB
from planner.snapshot import load, main, recorded_stream, replay_history
from tests.support.card import EXPANDABLE, NATIVE, Card, named

pytestmark = pytest.mark.no_torch

ROOT = pathlib.Path(__file__).parents[2]


def _worked(settings: AllocatorSettings = NATIVE, capacity_bytes: int | None = None, *, seed: int = 0) -> Card:
    """A card after a hundred random requests on two streams, with `empty_cache` now and then."""
    card, generator, live = Card(settings, capacity_bytes, seed=seed), random.Random(seed), []
    for _ in range(100):
        chance = generator.random()
        if chance < 0.03:
            card.empty_cache()
        elif chance < 0.45 and live:
            card.free(live.pop(generator.randrange(len(live))))
        else:
            largest = generator.choice([MIB, 10 * MIB, 60 * MIB])
            block = card.malloc(generator.randint(1, largest), generator.choice([0, 0, 94_000_123_456]))
            live += [block] if block is not None else []
    return card


def _written(data: object, path: pathlib.Path) -> pathlib.Path:
    path.write_bytes(pickle.dumps(data))
    return path


@pytest.mark.parametrize("capacity_bytes", [None, 300 * MIB, 8 * GIB])
@pytest.mark.parametrize("seed", range(12))
def test_a_record_that_begins_anywhere_is_replayed_block_by_block(tmp_path, capacity_bytes, seed):
    card = _worked(capacity_bytes=capacity_bytes, seed=seed)
    for first in (0, random.Random(seed).randrange(len(card.trace) - 1)):
        result = replay_history(load(_written(card.snapshot(first_event=first), tmp_path / "snapshot.pickle")))
        assert result.is_equal, (result.addresses[:3], result.driver[:3])


@pytest.mark.parametrize("seed", range(12))
def test_expandable_segments_of_two_streams_are_replayed_from_an_empty_card(tmp_path, seed):
    card = _worked(EXPANDABLE, 8 * GIB, seed=seed)
    result = replay_history(load(_written(card.snapshot(), tmp_path / "snapshot.pickle")))
    assert result.is_equal, (result.addresses[:3], result.driver[:3])
    assert result.starts_empty


def test_an_address_range_is_as_long_as_a_card_and_not_as_what_was_reserved(tmp_path):
    card = Card(EXPANDABLE, 8 * GIB)
    block, _ = card.malloc(100 * MIB), card.malloc(100 * MIB)
    card.free(block)
    card.empty_cache()
    card.malloc(180 * MIB)
    assert replay_history(load(_written(card.snapshot(), tmp_path / "snapshot.pickle"))).is_equal


def test_giving_back_because_the_card_is_full_is_distinguished_from_a_call_of_empty_cache(tmp_path):
    full, emptied = Card(NATIVE, 100 * MIB), Card(NATIVE, None)
    for card in (full, emptied):
        card.free(card.malloc(60 * MIB))
    full.malloc(80 * MIB)
    emptied.empty_cache()
    emptied.malloc(30 * MIB)
    for card, retries in ((full, 1), (emptied, 0)):
        result = replay_history(load(_written(card.snapshot(), tmp_path / "snapshot.pickle")))
        assert (result.is_equal, result.retries) == (True, retries)


def test_a_request_that_failed_must_fail_again(tmp_path):
    card = Card(NATIVE, 100 * MIB)
    card.malloc(70 * MIB)
    assert card.malloc(50 * MIB) is None
    history = load(_written(card.snapshot(), tmp_path / "snapshot.pickle"))
    assert replay_history(history).is_equal
    roomy = replay_history(history, capacity_bytes=GIB)
    (found,) = roomy.addresses
    assert (found.recorded_address, found.size_bytes) == (None, 50 * MIB)
    assert found.simulated_address is not None
    with pytest.raises(SnapshotError, match="give the memory of the card"):
        replay_history(load(_written(card.snapshot(first_event=1), tmp_path / "late.pickle")), capacity_bytes=MIB)


def test_an_allocator_of_other_rules_is_found_out(tmp_path):
    data = _worked().snapshot()
    data["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = "large_segment_size_mb:40,max_non_split_rounding_mb:64"
    history = load(_written(data, tmp_path / "snapshot.pickle"))
    assert history.settings.large_segment_bytes == 40 * MIB
    assert history.settings.max_non_split_rounding_bytes == 64 * MIB
    result = replay_history(history)
    assert not result.is_equal
    assert result.driver and not all(pair.is_equal for pair in result.segments)


def test_settings_are_read_as_newer_versions_write_them(tmp_path):
    data = Card(NATIVE, None).snapshot()
    data["device_traces"][0].append({"action": "oom", "device_free": 0, "size": 512, "stream": 0})
    data["allocator_settings"] |= {
        "max_split_size": 64 * MIB,
        "garbage_collection_threshold": 0.8,
        "roundup_power2_divisions": {str(1 << power): 4 for power in range(16)},
    }
    history = load(_written(data, tmp_path / "snapshot.pickle"))
    assert history.settings.max_split_size_bytes == 64 * MIB
    assert history.settings.roundup_power2_divisions == (4,) * 16
    assert any("garbage_collection_threshold is not simulated" in note for note in history.notes)


def test_births_and_deaths_are_those_of_the_record_and_what_lived_before_comes_first(tmp_path):
    card = Card(NATIVE, None)
    old, _ = card.malloc(3 * MIB), card.malloc(700)
    first = len(card.trace)
    card.free(old)
    card.malloc(5 * MIB)
    ids, sizes = recorded_stream(load(_written(card.snapshot(first_event=first), tmp_path / "snapshot.pickle")))
    signed = signed_sizes(ids, sizes, granularity_bytes=512)
    assert sorted(signed[:2]) == sorted([3 * MIB, 1024])
    assert signed[2:] == [-3 * MIB, 5 * MIB]
    assert replay((ids, sizes), NATIVE, None).final_allocated_bytes == 5 * MIB + 1024


@pytest.mark.parametrize("names_pools", [False, True])
def test_private_pools_are_left_out_and_reported(tmp_path, names_pools):
    card, graph = _worked(seed=3), Card(NATIVE, None, seed=4)
    graph.malloc(3 * MIB)
    graph.malloc(30 * MIB)
    data, private = card.snapshot(), graph.snapshot()
    taken = {segment["address"] for segment in data["segments"]}
    assert taken.isdisjoint(segment["address"] for segment in private["segments"])
    data["segments"] += [{**segment, "segment_pool_id": (0, 1)} for segment in private["segments"]]
    inside = [{**entry, "pool_id": (0, 1)} if names_pools else entry for entry in private["device_traces"][0][:-1]]
    data["device_traces"][0][40:40] = inside
    history = load(_written(data, tmp_path / "snapshot.pickle"))
    assert replay_history(history).is_equal
    (note,) = history.notes
    assert note.startswith("2 segments and 4 events of private pools")


def test_expandable_segments_in_use_at_the_start_are_refused(tmp_path):
    data = _worked(EXPANDABLE, 8 * GIB).snapshot(first_event=60)
    with pytest.raises(SnapshotError, match="begin to record before the first allocation"):
        replay_history(load(_written(data, tmp_path / "snapshot.pickle")))


@pytest.mark.parametrize("gone", ["alloc", "free_completed"])
def test_a_record_with_a_gap_is_refused(tmp_path, gone):
    data = _worked().snapshot()
    trace = data["device_traces"][0]
    address = next(entry["addr"] for entry in trace if entry["action"] == "free_completed")
    del trace[[(entry["action"], entry.get("addr")) for entry in trace].index((gone, address))]
    with pytest.raises(SnapshotError, match="events are missing in the record"):
        replay_history(load(_written(data, tmp_path / "snapshot.pickle")))


def test_the_device_is_chosen_by_its_number(tmp_path):
    first, second = _worked(seed=1).snapshot(), _worked(seed=2).snapshot()
    for segment in second["segments"]:
        segment["device"] = 2
    data = {**first, "segments": first["segments"] + second["segments"]}
    data["device_traces"] = [first["device_traces"][0], [], second["device_traces"][0]]
    path = _written(data, tmp_path / "snapshot.pickle")
    assert replay_history(load(path, device=2)).is_equal
    (note,) = load(path).notes
    assert note == "devices 0, 2 have events, and device 0 is shown: choose another with --device"
    with pytest.raises(SnapshotError, match="no events of device 1: choose one of the devices 0, 2"):
        load(path, device=1)


class _Malicious:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_would_run_a_command_is_refused_and_runs_nothing(tmp_path, protocol):
    path, trap = tmp_path / "snapshot.pickle", tmp_path / "trap"
    path.write_bytes(pickle.dumps({"segments": [_Malicious(f"touch {trap}")], "device_traces": [[]]}, protocol))
    with pytest.raises(SnapshotError, match=r"would load '(posix|nt)\.system'.*do not trust this file"):
        load(path)
    assert not trap.exists()


@pytest.mark.parametrize("value", [pathlib.Path("x"), AllocatorSettings(), {1, 2}, b"text", [1], None])
def test_other_pickles_are_refused(tmp_path, value):
    with pytest.raises(SnapshotError):
        load(_written(value, tmp_path / "snapshot.pickle"))
    with pytest.raises(SnapshotError):
        load(_written({"segments": value, "device_traces": [[value]]}, tmp_path / "snapshot.pickle"))


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\x80", b"{", b"{}", b"\x1f\x8bnot gzip", b"\x80\x05N.", b"[" * 9999]
)
def test_files_of_another_kind_are_refused_with_one_line(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(SnapshotError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_snapshot_that_is_cut_anywhere_is_refused(tmp_path):
    whole = pickle.dumps(_worked().snapshot())
    path = tmp_path / "snapshot.pickle"
    for size in range(0, len(whole), max(len(whole) // 40, 1)):
        path.write_bytes(whole[:size])
        with pytest.raises(SnapshotError):
            load(path)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.thorough
def test_a_snapshot_with_a_changed_value_is_replayed_or_refused(tmp_path_factory, data):
    snapshot = _worked(capacity_bytes=300 * MIB, seed=data.draw(st.integers(0, 3))).snapshot()
    place = snapshot
    while isinstance(place, (dict, list)) and place:
        holder, key = place, data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        place = holder[key]
    holder[key] = data.draw(
        st.one_of(st.integers(-9, 1 << 48), st.none(), st.text(max_size=3), st.just([]), st.floats())
    )
    path = tmp_path_factory.mktemp("changed") / "snapshot.pickle"
    _written(snapshot, path)
    with contextlib.suppress(SnapshotError):
        str(planner.explain(path))
        replay_history(load(path))


@pytest.mark.parametrize(
    "name", ["NiuHuangxiaozi_forward_memory_snapshot_100_baf850", "HugePandaCoder_my_snapshot_007209"]
)
def test_a_history_in_json_and_its_snapshot_are_the_same(tmp_path, shared_data, name):
    path = shared_data / "allocator_traces" / f"{name}.json.gz"
    if not path.is_file():
        pytest.skip(f"allocator_traces/{name}.json.gz is not there")
    data = json.loads(gzip.decompress(path.read_bytes()))
    segments = [
        named("address total_size segment_type stream is_expandable blocks", facts) for facts in data["segments_at_end"]
    ]
    for segment in segments:
        blocks = [named("size requested_size state", facts) for facts in segment["blocks"]]
        segment |= {"device": 0, "segment_pool_id": (0, 0), "blocks": blocks}
    trace = [named("action addr size stream", facts[:4]) for facts in data["events"]]
    snapshot = {"segments": segments, "device_traces": [trace], "allocator_settings": data["settings"]}
    pickled = load(_written(snapshot, tmp_path / "snapshot.pickle"))
    assert pickled == load(path)
    assert replay_history(pickled).is_equal


def test_the_command_tells_by_its_exit_code_whether_all_is_equal(tmp_path, capsys):
    card = _worked(capacity_bytes=300 * MIB)
    path = str(_written(card.snapshot(), tmp_path / "snapshot.pickle"))
    assert main([path, "--device", "0", "--capacity", "300MiB"]) == 0
    reported = capsys.readouterr().out
    assert "addresses that differ: 0 of" in reported
    assert "all equal" in reported
    assert all(f"{segment.address:#x}" in reported for segment in card.segments())
    data = card.snapshot()
    data["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = "large_segment_size_mb:40"
    assert main([str(_written(data, tmp_path / "other.pickle"))]) == 1
    reported = capsys.readouterr().out
    assert "the simulation differs from the record" in reported
    assert "missing" in reported


@pytest.mark.parametrize(
    "arguments", [["missing.pickle"], [], ["{file}", "--capacity", "much"], ["{file}", "--device", "7"], ["{folder}"]]
)
def test_the_command_refuses_bad_input_with_one_line_and_code_2(tmp_path, capsys, arguments):
    path = _written(_worked().snapshot(), tmp_path / "snapshot.pickle")
    assert main([argument.format(file=path, folder=tmp_path) for argument in arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("snapshot: ")
    assert shown.err.count("\n") == 1


def test_the_command_runs_as_a_module_where_the_output_is_plain_text(tmp_path):
    path = _written(_worked().snapshot(), tmp_path / "snapshot.pickle")
    command = [sys.executable, "-m", "planner.snapshot", str(path)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:replace"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "all equal" in done.stdout
