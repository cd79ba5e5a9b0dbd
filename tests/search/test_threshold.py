"""The galloping search for a threshold."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.search.threshold import first_true

pytestmark = pytest.mark.no_torch


@given(count=st.integers(0, 200), threshold=st.integers(0, 220), guess=st.integers(-5, 220))
def test_it_finds_the_threshold_wherever_the_guess_is_and_asks_few_questions(count, threshold, guess):
    asked: list[int] = []

    def holds(number: int) -> bool:
        asked.append(number)
        return number >= threshold

    assert first_true(count, holds, guess=guess) == min(threshold, count)
    assert all(0 <= number < count for number in asked)
    distance = abs(min(max(guess, 0), max(count - 1, 0)) - min(threshold, count))
    assert len(asked) <= 2 * math.log2(distance + 1) + 3
    assert len(asked) == len(set(asked))


def test_a_right_guess_takes_two_questions():
    asked: list[int] = []
    assert first_true(100, lambda number: bool(asked.append(number)) or number >= 40, guess=40) == 40
    assert asked == [40, 39]
