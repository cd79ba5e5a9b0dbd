"""The simulated caching allocator: cases computed by hand from pytorch's rules."""

from __future__ import annotations

import pickle

import pytest

from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.out_of_memory import OutOfMemory
from planner.allocator.replay import replay
from planner.allocator.settings import AllocatorSettings, round_size, segment_size
from planner.plan_types.sizes import GIB, KIB, MIB

pytestmark = pytest.mark.no_torch

NATIVE = AllocatorSettings()
EXPANDABLE = AllocatorSettings(expandable_segments=True)
LIMITED_SPLITS = AllocatorSettings(max_split_size_bytes=32 * MIB)


def allocator(settings: AllocatorSettings = NATIVE, capacity_bytes: int | None = None) -> CachingAllocator:
    return CachingAllocator(settings, capacity_bytes)


# Sizes.


@pytest.mark.parametrize(
    ("size_bytes", "rounded_bytes"), [(1, 512), (512, 512), (513, 1024), (MIB - 1, MIB), (MIB + 1, MIB + 512)]
)
def test_requests_are_rounded_up_to_512_bytes(size_bytes: int, rounded_bytes: int) -> None:
    assert round_size(size_bytes, NATIVE) == rounded_bytes
    subject = allocator()
    assert subject.malloc(size_bytes).size_bytes == rounded_bytes
    assert subject.requested_bytes == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "segment_bytes"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (21 * MIB, 22 * MIB),
    ],
)
def test_segments_are_2_mib_for_small_20_mib_for_medium_and_whole_2_mib_steps_for_large_requests(
    size_bytes: int, segment_bytes: int
) -> None:
    assert segment_size(size_bytes, NATIVE) == segment_bytes
    subject = allocator()
    subject.malloc(size_bytes)
    assert subject.reserved_bytes == segment_bytes


def test_the_segment_for_medium_requests_can_be_set() -> None:
    subject = allocator(AllocatorSettings(large_segment_bytes=64 * MIB))
    subject.malloc(5 * MIB)
    assert subject.reserved_bytes == 64 * MIB


def test_power_of_two_divisions_round_to_steps_between_powers() -> None:
    steps_of_four = AllocatorSettings(roundup_power2_divisions=(4,) * 16)
    # Four steps between 1024 and 2048 MiB are 1024, 1280, 1536 and 1792; small sizes keep their 512 bytes.
    assert round_size(1200 * MIB, steps_of_four) == 1280 * MIB
    assert round_size(1024 * MIB, steps_of_four) == 1024 * MIB
    assert round_size(1200, steps_of_four) == 1536
    only_from_4_mib = AllocatorSettings(roundup_power2_divisions=(0, 0, *(2,) * 14))
    assert round_size(3 * MIB + 1, only_from_4_mib) == 3 * MIB + 512
    assert round_size(5 * MIB, only_from_4_mib) == 6 * MIB


@pytest.mark.parametrize(
    "options",
    [
        {"roundup_power2_divisions": (4,)},
        {"roundup_power2_divisions": (3,) * 16},
        {"max_split_size_bytes": 20 * MIB - 1},
    ],
)
def test_settings_that_pytorch_refuses_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        AllocatorSettings(**options)


# Split, fit, merge.


def test_the_small_pool_splits_off_every_rest() -> None:
    subject = allocator()
    first, second = subject.malloc(MIB - 512), subject.malloc(MIB)
    assert second.address == first.address + MIB - 512
    assert subject.malloc(512).address == second.address + MIB
    assert subject.reserved_bytes == 2 * MIB


def test_the_large_pool_splits_off_only_more_than_one_mebibyte() -> None:
    subject = allocator()
    assert subject.malloc(21 * MIB).size_bytes == 22 * MIB
    assert subject.allocated_bytes == 22 * MIB
    assert subject.requested_bytes == 21 * MIB
    assert subject.malloc(21 * MIB - 512).size_bytes == 21 * MIB - 512


def test_small_and_large_requests_never_share_a_segment() -> None:
    subject = allocator()
    subject.malloc(2 * MIB)
    subject.malloc(KIB)
    assert [(segment.is_small, segment.size_bytes) for segment in subject.segments()] == [
        (False, 20 * MIB),
        (True, 2 * MIB),
    ]


def test_streams_never_share_memory() -> None:
    subject = allocator()
    subject.free(subject.malloc(12 * MIB, stream=1))
    subject.malloc(12 * MIB, stream=2)
    assert subject.reserved_bytes == 24 * MIB


def test_the_smallest_free_block_that_fits_is_taken_and_ties_go_to_the_lowest_address() -> None:
    subject = allocator()
    large, medium, twin = (subject.malloc(size * MIB) for size in (40, 20, 20))
    for block in (twin, large, medium):
        subject.free(block)
    assert subject.malloc(20 * MIB).address == medium.address
    assert subject.malloc(20 * MIB).address == twin.address
    assert subject.malloc(20 * MIB).address == large.address


def test_freed_blocks_merge_with_free_neighbours_on_both_sides() -> None:
    subject = allocator()
    blocks = [subject.malloc(5 * MIB) for _ in range(4)]
    for index in (0, 2, 1):
        subject.free(blocks[index])
    assert [block.size_bytes for block in subject.segments()[0].blocks] == [15 * MIB, 5 * MIB]
    assert subject.malloc(14 * MIB).address == blocks[0].address
    assert subject.reserved_bytes == 20 * MIB


def test_segments_of_their_own_do_not_merge_with_each_other() -> None:
    subject = allocator()
    for block in [subject.malloc(10 * MIB), subject.malloc(10 * MIB)]:
        subject.free(block)
    subject.malloc(20 * MIB)
    assert subject.reserved_bytes == 40 * MIB


def test_blocks_above_the_split_limit_serve_only_large_requests_of_nearly_their_size() -> None:
    subject = allocator(LIMITED_SPLITS)
    at_the_limit = subject.malloc(32 * MIB)
    oversize = subject.malloc(64 * MIB)
    subject.free(at_the_limit)
    subject.free(oversize)
    assert subject.malloc(16 * MIB).address != at_the_limit.address
    assert subject.malloc(16 * MIB).address != oversize.address
    assert subject.malloc(44 * MIB).address != oversize.address
    taken = subject.malloc(46 * MIB)
    assert (taken.address, taken.size_bytes) == (oversize.address, 64 * MIB)


# Giving back, and running out.


def test_a_full_card_gives_back_free_segments_and_tries_again() -> None:
    subject = allocator(capacity_bytes=64 * MIB)
    subject.free(subject.malloc(30 * MIB))
    subject.malloc(30 * MIB)
    subject.free(subject.malloc(20 * MIB))
    subject.malloc(34 * MIB)
    assert subject.retries == 1
    assert subject.reserved_bytes == 64 * MIB
    assert subject.peak_reserved_bytes == 64 * MIB


def test_a_segment_with_a_live_block_cannot_be_given_back() -> None:
    subject = allocator(capacity_bytes=40 * MIB)
    kept, freed = subject.malloc(2 * MIB), subject.malloc(18 * MIB)
    subject.free(freed)
    with pytest.raises(OutOfMemory) as caught:
        subject.malloc(22 * MIB)
    report = caught.value.report
    assert (report.asked_bytes, report.capacity_bytes) == (22 * MIB, 40 * MIB)
    assert (report.allocated_bytes, report.reserved_bytes) == (2 * MIB, 20 * MIB)
    assert len(str(caught.value).splitlines()) == 1
    subject.free(kept)
    assert subject.malloc(22 * MIB).size_bytes == 22 * MIB
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.report == caught.value.report and str(again) == str(caught.value)


def test_a_full_card_gives_back_one_oversize_block_before_it_gives_back_everything() -> None:
    subject = allocator(LIMITED_SPLITS, capacity_bytes=200 * MIB)
    oversize, other = subject.malloc(100 * MIB), subject.malloc(30 * MIB)
    subject.free(oversize)
    subject.free(other)
    subject.malloc(76 * MIB)
    assert subject.retries == 0
    assert subject.reserved_bytes == (30 + 76) * MIB


def test_the_memory_fraction_is_a_limit_as_well() -> None:
    limited = AllocatorSettings(allowed_bytes=24 * MIB)
    with pytest.raises(OutOfMemory, match=r"24\.0 MiB"):
        allocator(limited, capacity_bytes=GIB).malloc(25 * MIB)
    # The fraction is checked against the whole segment, even where expandable segments need one page only.
    expandable = AllocatorSettings(allowed_bytes=30 * MIB, expandable_segments=True)
    subject = allocator(expandable)
    subject.malloc(19 * MIB)
    with pytest.raises(OutOfMemory):
        subject.malloc(12 * MIB)


def test_garbage_collection_gives_back_the_oldest_free_segments_first() -> None:
    collecting = AllocatorSettings(allowed_bytes=100 * MIB, garbage_collection_threshold=0.5)
    subject = allocator(collecting)
    old, young, kept = subject.malloc(20 * MIB), subject.malloc(22 * MIB), subject.malloc(24 * MIB)
    subject.free(old)
    subject.free(young)
    subject.free(subject.malloc(22 * MIB))
    subject.malloc(28 * MIB)
    sizes = [segment.size_bytes for segment in subject.segments()]
    assert sizes == [22 * MIB, 24 * MIB, 28 * MIB]
    assert kept.is_allocated
    assert subject.retries == 0


def test_garbage_collection_gives_back_free_segments_of_the_same_age() -> None:
    subject = allocator(AllocatorSettings(allowed_bytes=100 * MIB, garbage_collection_threshold=0.5))
    first, second = subject.malloc(30 * MIB), subject.malloc(30 * MIB)
    subject.free(first)
    subject.free(second)
    subject.malloc(32 * MIB)
    assert [segment.size_bytes for segment in subject.segments()] == [32 * MIB]


def test_a_refilled_hole_joins_the_free_space_behind_it() -> None:
    subject = allocator(EXPANDABLE)
    hole = subject.malloc(70 * MIB)
    subject.malloc(10 * MIB)
    subject.free(hole)
    # Pages 0 to 2 go, 10 MiB stay free in front of the live block.
    subject.empty_cache()
    taken = subject.malloc(45 * MIB)
    assert taken.address == hole.address
    assert [block.size_bytes for block in subject.segments()[0].blocks] == [45 * MIB, 25 * MIB, 10 * MIB]


def test_empty_cache_gives_back_free_segments_only() -> None:
    subject = allocator()
    subject.malloc(12 * MIB)
    subject.free(subject.malloc(14 * MIB))
    subject.empty_cache()
    assert subject.reserved_bytes == 12 * MIB


def test_peaks_stay_when_memory_is_given_back() -> None:
    subject = allocator()
    subject.free(subject.malloc(30 * MIB))
    subject.empty_cache()
    subject.malloc(12 * MIB)
    assert (subject.reserved_bytes, subject.peak_reserved_bytes) == (12 * MIB, 30 * MIB)
    assert (subject.allocated_bytes, subject.peak_allocated_bytes) == (12 * MIB, 30 * MIB)


# Expandable segments.


def test_expandable_segments_map_whole_pages_and_waste_no_rest() -> None:
    subject = allocator(EXPANDABLE)
    first, second = subject.malloc(21 * MIB), subject.malloc(18 * MIB)
    assert first.size_bytes == 21 * MIB
    assert second.address == first.address + 21 * MIB
    assert subject.reserved_bytes == 40 * MIB
    subject.malloc(KIB)
    assert subject.reserved_bytes == 42 * MIB


def test_a_free_end_of_an_expandable_segment_grows_by_what_is_missing() -> None:
    subject = allocator(EXPANDABLE)
    subject.malloc(10 * MIB)
    tail = subject.malloc(30 * MIB)
    subject.free(tail)
    assert subject.malloc(50 * MIB).address == tail.address
    assert subject.reserved_bytes == 60 * MIB


def test_expandable_segments_prefer_a_hole_to_the_end_that_can_still_grow() -> None:
    subject = allocator(EXPANDABLE)
    hole = subject.malloc(30 * MIB)
    subject.malloc(5 * MIB)
    last = subject.malloc(10 * MIB)
    subject.free(hole)
    # 15 MiB are free after `last`, a tighter fit; but they could grow to the end of the range.
    assert subject.malloc(12 * MIB).address == hole.address
    assert subject.malloc(20 * MIB).address == last.address + 10 * MIB


def test_expandable_segments_unmap_only_whole_free_pages_and_refill_the_hole() -> None:
    subject = allocator(EXPANDABLE, capacity_bytes=80 * MIB)
    first, hole, last = subject.malloc(10 * MIB), subject.malloc(55 * MIB), subject.malloc(5 * MIB)
    subject.free(hole)
    subject.empty_cache()
    assert [(s.address - first.address, s.size_bytes) for s in subject.segments()] == [
        (0, 20 * MIB),
        (60 * MIB, 20 * MIB),
    ]
    assert subject.malloc(50 * MIB).address == first.address + 10 * MIB
    assert subject.reserved_bytes == 80 * MIB
    subject.free(last)
    with pytest.raises(OutOfMemory):
        subject.malloc(21 * MIB)


def test_expandable_segments_join_the_space_of_freed_blocks_that_segments_of_their_own_must_give_back() -> None:
    stream = [(0, 30 * MIB), (1, 30 * MIB), (0, 0), (1, 0), (2, 60 * MIB)]
    assert replay(stream, EXPANDABLE, 100 * MIB).retries == 0
    assert replay(stream, NATIVE, 100 * MIB).retries == 1


# Replay.


def test_replay_reports_the_peaks_and_the_event_of_the_peak() -> None:
    outcome = replay([(7, 12 * MIB), (8, MIB), (7, -12 * MIB), (9, 12 * MIB), (8, 0)], NATIVE, None)
    assert outcome.peak_allocated_bytes == outcome.peak_requested_bytes == 13 * MIB
    assert outcome.peak_allocated_event == 1
    assert outcome.peak_reserved_bytes == 14 * MIB
    assert outcome.out_of_memory_event is None
    assert (outcome.final_allocated_bytes, outcome.final_reserved_bytes) == (12 * MIB, 14 * MIB)
    assert (outcome.final_fragments, outcome.final_fragment_bytes) == (0, 0)


def test_replay_ends_at_the_birth_that_does_not_fit() -> None:
    outcome = replay([(0, 12 * MIB), (1, 12 * MIB), (0, 0), (2, 12 * MIB)], NATIVE, 20 * MIB)
    assert outcome.out_of_memory_event == 1
    assert outcome.out_of_memory.asked_bytes == 12 * MIB
    assert outcome.peak_allocated_bytes == 12 * MIB


def test_free_blocks_beside_live_ones_are_fragments() -> None:
    outcome = replay([(0, 5 * MIB), (1, 5 * MIB), (0, 0)], NATIVE, None)
    assert (outcome.final_fragments, outcome.final_fragment_bytes) == (2, 15 * MIB)


SPLIT_EITHER_SEGMENT = [
    *((block, 5 * MIB) for block in range(8)),  # two full segments of 20 MiB
    (0, 0),
    (4, 0),
    (8, 5 * MIB),  # fits the hole of either segment: the lower one is filled
    (1, 0),
    (2, 0),
    (3, 0),  # now the first segment is free, if it was the upper one
    (9, 18 * MIB),
]


def test_of_holes_that_are_equally_large_the_driver_decides_by_the_order_of_its_addresses() -> None:
    ascending = replay(SPLIT_EITHER_SEGMENT, NATIVE, None)
    descending = replay(SPLIT_EITHER_SEGMENT, NATIVE, None, descending=True)
    assert ascending.peak_reserved_bytes == 58 * MIB
    assert descending.peak_reserved_bytes == 40 * MIB


def test_storages_without_bytes_take_nothing_and_numbers_may_be_reused() -> None:
    outcome = replay([(0, 0), (0, 0), (1, KIB), (1, -KIB), (1, 2 * KIB)], NATIVE, None)
    assert outcome.peak_allocated_bytes == 2 * KIB
    assert replay([], NATIVE, 0).peak_allocated_event is None


@pytest.mark.parametrize("stream", [[(0, KIB), (0, KIB)], [(0, -KIB)]])
def test_a_stream_that_contradicts_itself_is_refused_with_its_event(stream: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=rf"event {len(stream) - 1} \w+ storage 0"):
        replay(stream, NATIVE, None)


def test_a_block_cannot_be_freed_twice_and_nothing_cannot_be_allocated() -> None:
    subject = allocator()
    block = subject.malloc(KIB)
    subject.free(block)
    with pytest.raises(ValueError, match="free already"):
        subject.free(block)
    with pytest.raises(ValueError, match="0 bytes"):
        subject.malloc(0)


def test_a_request_beyond_the_card_is_answered_if_memory_has_no_limit():
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True), None, card_bytes=100 * MIB)
    assert allocator.malloc(500 * MIB).size_bytes == 500 * MIB
    with pytest.raises(OutOfMemory):
        CachingAllocator(AllocatorSettings(expandable_segments=True), 100 * MIB).malloc(500 * MIB)
