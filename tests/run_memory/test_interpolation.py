"""Steps of other lengths that are predicted, and the numbers in them."""

from __future__ import annotations

import pytest

from planner.run_memory.interpolation import RECORDINGS, lengths_to_record, value_at

LENGTHS = (64, 232, 408, 552, 704, 872, 1024)


def up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


@pytest.mark.parametrize(
    "function",
    [
        lambda n: 7,
        lambda n: 12 * n + 5,
        lambda n: 16 * n * n + 4 * n,
        lambda n: 4 * up(n, 32),
        lambda n: 100 + 3 * n + 4 * up(n, 128),
        lambda n: 2 * n * n + 8 * up(n, 64) + n,
        lambda n: n * up(n, 32) + 9,
    ],
)
def test_a_number_is_predicted_at_every_length(function):
    values = [function(length) for length in LENGTHS]
    assert [value_at(LENGTHS, values, length) for length in (65, 96, 333, 1000)] == [
        function(length) for length in (65, 96, 333, 1000)
    ]


@pytest.mark.parametrize("values", [(1, 2, 4, 8, 16, 32, 64), (1, 2, 3, 4, 5, 6, 8)])
def test_what_no_sum_explains_is_not_predicted(values):
    assert value_at(range(1, 8), values, 9) is None


def test_too_few_recordings_explain_nothing():
    assert value_at((1, 2, 3), (5, 7, 9), 4) is None


def test_few_lengths_are_all_recorded_and_many_are_sampled_with_both_ends():
    assert lengths_to_record([5, 3, 3, 9]) == [3, 5, 9]
    chosen = lengths_to_record(range(10, 1000))
    assert len(chosen) == RECORDINGS
    assert chosen[0] == 10
    assert chosen[-1] == 999
