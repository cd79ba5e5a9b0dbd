"""Histories that the simulator makes: written as PyTorch's snapshots, and read and replayed like those of a card."""

from __future__ import annotations

import pathlib
import pickle
import pickletools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.allocator.out_of_memory import OutOfMemory
from planner.allocator.replay import replay
from planner.allocator.settings import AllocatorSettings
from planner.plan_types.sizes import MIB
from planner.snapshot import Action, Frame, Origin, load, replay_history, simulate, write_snapshot

pytestmark = pytest.mark.no_torch

# `unpickle` in pytorch's torch/utils/viz/MemoryViz.js
READ_BY_THE_VISUALIZER = set(
    "APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPUT BINUNICODE DICT EMPTY_DICT EMPTY_LIST EMPTY_TUPLE "
    "FRAME LIST LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE NONE PROTO SETITEM SETITEMS "
    "SHORT_BINUNICODE STOP TUPLE TUPLE1 TUPLE2 TUPLE3".split()
)
LEAST_AND_MOST = (1, 40 * MIB)


@st.composite
def requests(draw) -> list[tuple[int, int]]:
    """A sequence of allocations and frees in which each storage is freed at most once."""
    alive: list[int] = []
    found = []
    for number in range(draw(st.integers(1, 40))):
        found.append((number, draw(st.integers(*LEAST_AND_MOST))))
        alive.append(number)
        while alive and draw(st.booleans()):
            found.append((alive.pop(draw(st.integers(0, len(alive) - 1))), 0))
    return found


def origins(count: int) -> list[Origin]:
    return [Origin(frames=(Frame("aten.mm.default", "model.py", 7),), time_us=number) for number in range(count)]


def written(folder: pathlib.Path, found: list[tuple[int, int]], **options) -> pathlib.Path:
    history = simulate(found, None, **options)
    path = folder / "step.pickle"
    write_snapshot(path, history, origins(len(found)))
    return path


@given(found=requests(), descending=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_written_history_is_read_unchanged_and_replays_to_the_byte(tmp_path_factory, found, descending):
    folder = tmp_path_factory.mktemp("snapshot")
    history = load(written(folder, found, descending=descending))
    assert history == simulate(found, None, descending=descending).history
    result = replay_history(history)
    assert result.is_equal and result.starts_empty
    outcome = replay(found, AllocatorSettings(), None, descending=descending)
    assert result.recorded.peak_reserved_bytes == outcome.peak_reserved_bytes
    assert result.recorded.peak_requested_bytes == outcome.peak_requested_bytes
    assert simulate(found, None, descending=descending).peak_allocated_request == outcome.peak_allocated_event


def test_segments_that_a_full_card_releases_are_events_of_the_request_that_needs_them():
    found = [(0, 30 * MIB), (0, 0), (1, 40 * MIB)]
    history = simulate(found, 50 * MIB)
    actions = [(event.action, request) for event, request in zip(history.history.events, history.requests, strict=True)]
    assert actions[-3:] == [(Action.SEGMENT_FREE, 2), (Action.SEGMENT_ALLOC, 2), (Action.ALLOC, 2)]
    assert replay_history(history.history, capacity_bytes=50 * MIB).is_equal


def test_a_request_that_does_not_fit_is_an_error():
    with pytest.raises(OutOfMemory):
        simulate([(0, 30 * MIB)], 10 * MIB)


def test_a_snapshot_uses_only_the_opcodes_that_the_visualizer_on_the_web_reads(tmp_path):
    found = [(number, (number + 1) * MIB) for number in range(300)]
    opcodes = {code.name for code, _, _ in pickletools.genops(written(tmp_path, found).read_bytes())}
    assert opcodes <= READ_BY_THE_VISUALIZER


def test_live_blocks_carry_the_stack_trace_of_their_allocation(tmp_path):
    found = [(0, 5 * MIB), (1, 5 * MIB), (0, 0)]
    history = simulate(found, None)
    of_each = [Origin(frames=(Frame(f"op {number}"),), time_us=number, remark="activations") for number in range(3)]
    write_snapshot(tmp_path / "step.pickle", history, of_each)
    data = pickle.loads((tmp_path / "step.pickle").read_bytes())
    blocks = [block for segment in data["segments"] for block in segment["blocks"]]
    live = [block for block in blocks if block["state"] == "active_allocated"]
    assert [block["frames"][0]["name"] for block in live] == ["op 1"]
    entries = [entry for entry in data["device_traces"][0] if entry["action"] == "alloc"]
    assert [(entry["size"], entry["time_us"], entry["user_metadata"]) for entry in entries] == [
        (5 * MIB, 0, "activations"),
        (5 * MIB, 1, "activations"),
    ]
    assert {address for address in history.live} == {block["address"] for block in live}
