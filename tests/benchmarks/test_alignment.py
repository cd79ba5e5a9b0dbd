"""The alignment of streams has the fewest differences possible, and keeps the order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.card import alignment
from benchmarks.card.alignment import align

STREAMS = st.lists(st.sampled_from([512, -512, 1024, -1024, 2048]), max_size=14)


def most_in_common(one: list[int], other: list[int]) -> int:
    """Returns the length of the longest common subsequence, by dynamic programming."""
    table = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            table[i + 1][j + 1] = max(table[i][j + 1], table[i + 1][j], table[i][j] + (a == b))
    return table[-1][-1]


@settings(deadline=None, max_examples=300)
@given(recorded=STREAMS, rehearsed=STREAMS)
def test_as_many_events_are_matched_as_any_alignment_can(recorded, rehearsed):
    found = align(recorded, rehearsed)
    left = sum(len(difference.recorded) for difference in found.differences)
    assert len(recorded) - left == most_in_common(recorded, rehearsed)
    surplus = sum(len(difference.rehearsed) for difference in found.differences)
    assert len(rehearsed) - surplus == len(recorded) - left


@settings(deadline=None, max_examples=100)
@given(recorded=STREAMS, rehearsed=STREAMS)
def test_the_differences_turn_the_rehearsed_stream_into_the_recorded_one(recorded, rehearsed):
    differences_turn_one_into_the_other(recorded, rehearsed)


def differences_turn_one_into_the_other(recorded: list[int], rehearsed: list[int]) -> None:
    changed, done = [], 0
    found = align(recorded, rehearsed)
    for difference in found.differences:
        changed += rehearsed[done : difference.at_event]
        assert tuple(rehearsed[difference.at_event :][: len(difference.rehearsed)]) == difference.rehearsed
        changed += difference.recorded
        done = difference.at_event + len(difference.rehearsed)
    assert changed + rehearsed[done:] == recorded
    missing = sum(size for difference in found.differences for size in difference.recorded if size > 0)
    assert found.matched_bytes + missing == found.recorded_bytes


def test_small_insertions_into_layers_that_are_alike_are_all_that_differs():
    layer = [4096, 512, 4096, -512, 8192, 4096, -8192]
    rehearsed = layer * 40 + [-4096] * 40
    recorded = [
        event for place, event in enumerate(rehearsed) for event in ((event, 33, -33), (event,))[place % 29 > 0]
    ]
    found = align(recorded, rehearsed)
    assert {difference.recorded for difference in found.differences} == {(33, -33)}


@settings(deadline=None, max_examples=200)
@given(recorded=STREAMS, rehearsed=STREAMS, most=st.integers(1, 4))
def test_streams_with_little_in_common_are_aligned_in_pieces(recorded, rehearsed, most):
    """Such an alignment is valid, but not always the best."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alignment, "MOST_DIFFERENCES", most)
        differences_turn_one_into_the_other(recorded, rehearsed)
