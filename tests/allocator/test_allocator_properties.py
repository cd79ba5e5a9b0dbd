"""Properties of the simulated caching allocator that hold for any stream of requests."""

from __future__ import annotations

import itertools
import random

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.allocator.blocks import Block
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.out_of_memory import OutOfMemory
from planner.allocator.replay import replay
from planner.allocator.settings import AllocatorSettings, round_size
from planner.plan_types.sizes import KIB, MIB

pytestmark = pytest.mark.no_torch

NATIVE = AllocatorSettings()
EXPANDABLE = AllocatorSettings(expandable_segments=True)
SIZES = st.one_of(
    st.integers(1, 2 * KIB),
    st.integers(MIB - KIB, MIB + KIB),
    st.integers(1, 12 * MIB),
    st.integers(1, 80 * MIB),
    st.sampled_from([512, MIB, 10 * MIB, 20 * MIB, 40 * MIB]),
)
STEPS = st.lists(
    st.tuples(st.sampled_from(["malloc", "malloc", "free", "empty"]), SIZES, st.integers(0, 1)), max_size=60
)
SETTINGS = st.sampled_from(
    [
        NATIVE,
        EXPANDABLE,
        AllocatorSettings(max_split_size_bytes=32 * MIB),
        AllocatorSettings(roundup_power2_divisions=(4,) * 16),
        AllocatorSettings(allowed_bytes=300 * MIB, garbage_collection_threshold=0.4),
        AllocatorSettings(expandable_segments=True, large_segment_bytes=32 * MIB),
    ]
)
CAPACITIES = st.sampled_from([None, 64 * MIB, 200 * MIB])


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, options=SETTINGS, capacity_bytes=CAPACITIES)
def test_blocks_never_overlap_and_every_byte_is_accounted_for(
    steps: list, options: AllocatorSettings, capacity_bytes: int | None
) -> None:
    subject = CachingAllocator(options, capacity_bytes)
    live: list[tuple[Block, int, int]] = []
    for action, size_bytes, stream in steps:
        if action == "free" and live:
            subject.free(live.pop(size_bytes % len(live))[0])
        elif action == "empty":
            subject.empty_cache()
        elif action == "malloc":
            try:
                live.append((subject.malloc(size_bytes, stream), size_bytes, stream))
            except OutOfMemory as error:
                assert capacity_bytes is not None or options.allowed_bytes is not None
                assert error.report.allocated_bytes == sum(block.size_bytes for block, _, _ in live)
        _check(subject, live, capacity_bytes)
    for block, _, _ in live:
        subject.free(block)
    subject.empty_cache()
    _check(subject, [], capacity_bytes)
    assert subject.segments() == ()
    assert subject.reserved_bytes == 0


def _check(subject: CachingAllocator, live: list[tuple[Block, int, int]], capacity_bytes: int | None) -> None:
    spans = sorted((block.address, block.address + block.size_bytes) for block, _, _ in live)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(block.size_bytes >= size_bytes for block, size_bytes, _ in live)
    assert subject.allocated_bytes == sum(block.size_bytes for block, _, _ in live)
    assert subject.requested_bytes == sum(size_bytes for _, size_bytes, _ in live)
    shown = subject.segments()
    assert subject.reserved_bytes == sum(segment.size_bytes for segment in shown)
    assert subject.allocated_bytes <= subject.reserved_bytes <= subject.peak_reserved_bytes
    assert capacity_bytes is None or subject.reserved_bytes <= capacity_bytes
    seen = {}
    for segment in shown:
        address = segment.address
        for block, following in zip(segment.blocks, (*segment.blocks[1:], None), strict=True):
            assert block.is_allocated or following is None or following.is_allocated, "free neighbours did not merge"
            if block.is_allocated:
                seen[address] = (block.size_bytes, block.requested_bytes, segment.stream)
            address += block.size_bytes
    assert seen == {block.address: (block.size_bytes, size_bytes, stream) for block, size_bytes, stream in live}


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), options=SETTINGS, capacity_bytes=CAPACITIES)
def test_the_same_stream_gives_the_same_outcome(
    seed: int, options: AllocatorSettings, capacity_bytes: int | None
) -> None:
    stream = _stream(random.Random(seed), length=120)
    outcome = replay(stream, options, capacity_bytes)
    assert outcome == replay(stream, options, capacity_bytes)
    assert outcome.peak_requested_bytes <= outcome.peak_allocated_bytes <= outcome.peak_reserved_bytes


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_capacity_of_the_unlimited_peak_changes_nothing(seed: int) -> None:
    stream = _stream(random.Random(seed), length=120)
    unlimited = replay(stream, NATIVE, None)
    assert replay(stream, NATIVE, unlimited.peak_reserved_bytes) == unlimited


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_expandable_segments_never_hand_out_more_than_the_rounded_requests(seed: int) -> None:
    stream = _stream(random.Random(seed), length=120)
    alive: dict[int, int] = {}
    peak_bytes = 0
    for storage, size_bytes in stream:
        alive[storage] = round_size(max(size_bytes, 1), EXPANDABLE) if size_bytes > 0 else 0
        peak_bytes = max(peak_bytes, sum(alive.values()))
    assert replay(stream, EXPANDABLE, None).peak_allocated_bytes == peak_bytes


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_state_that_is_taken_over_goes_on_as_the_original_would(seed: int) -> None:
    source = random.Random(seed)
    original = CachingAllocator(NATIVE, None)
    live = [original.malloc(source.choice([KIB, 700 * KIB, 3 * MIB, 15 * MIB])) for _ in range(20)]
    for block in source.sample(live, 12):
        original.free(block)
        live.remove(block)
    later = iter(range(1 << 40, 1 << 41, 1 << 30))
    copy = CachingAllocator(NATIVE, None, place=lambda size_bytes: next(later))
    copied = copy.adopt(original.segments())
    assert copy.segments() == original.segments()
    assert set(copied) == {block.address for block in live}
    for block in source.sample(live, 4):
        original.free(block)
        copy.free(copied[block.address])
    for _ in range(3):
        size_bytes = source.choice([KIB, 200 * KIB, MIB + 1])
        addresses = original.malloc(size_bytes).address, copy.malloc(size_bytes).address
        assert addresses[0] == addresses[1] or addresses[1] >= 1 << 40
    assert copy.reserved_bytes == original.reserved_bytes


def test_arrays_and_pairs_give_the_same_outcome() -> None:
    stream = _stream(random.Random(1), length=200)
    table = numpy.array(stream, dtype=numpy.int64)
    expected = replay(stream, NATIVE, None)
    assert replay(table, NATIVE, None) == expected
    assert replay((table[:, 0], table[:, 1]), NATIVE, None) == expected


def _stream(source: random.Random, *, length: int) -> list[tuple[int, int]]:
    alive: dict[int, int] = {}
    events: list[tuple[int, int]] = []
    for storage in range(length):
        if alive and source.random() < 0.45:
            victim = source.choice(sorted(alive))
            events.append((victim, -alive.pop(victim)))
        else:
            size_bytes = source.choice([source.randrange(1, 4 * KIB), source.randrange(1, 3 * MIB), 15 * MIB, 33 * MIB])
            alive[storage] = size_bytes
            events.append((storage, size_bytes))
    return events
