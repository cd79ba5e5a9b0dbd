"""Workspaces that do not fit: PyTorch tries the next algorithm, and remembers which one ran."""

from __future__ import annotations

from planner.allocator.replay import replay
from planner.allocator.settings import AllocatorSettings
from planner.plan_types.sizes import MIB
from planner.workspaces.registry import Trials

NATIVE = AllocatorSettings()
SEVERAL = Trials((100 * MIB, 40 * MIB, 0), "a convolution")


def test_the_first_size_that_fits_is_taken():
    stream = [(0, 50 * MIB), (1, 100 * MIB), (1, 0)]
    for capacity, taken in ((150, {}), (149, {1: 40 * MIB}), (90, {1: 40 * MIB}), (89, {1: 0})):
        outcome = replay(stream, NATIVE, capacity * MIB, trials={1: SEVERAL})
        assert outcome.out_of_memory_event is None and outcome.taken == taken
        assert outcome.peak_allocated_bytes == 50 * MIB + taken.get(1, 100 * MIB)
        assert bool(outcome.retries) is bool(taken)
    assert replay(stream, NATIVE, 89 * MIB).out_of_memory_event == 1


def test_a_cached_block_is_released_before_the_next_size_is_tried():
    stream = [(0, 60 * MIB), (0, 0), (1, 100 * MIB), (1, 0)]
    assert not replay(stream, NATIVE, 120 * MIB, trials={1: SEVERAL}).taken


def test_the_size_that_fitted_last_is_tried_first_by_the_same_convolution():
    """Also if the first size would fit again: PyTorch remembers the algorithm that ran."""
    stream = [(0, 50 * MIB), (1, 100 * MIB), (1, 0), (0, 0), (2, 100 * MIB), (2, 0), (3, 100 * MIB), (3, 0)]
    other = Trials(SEVERAL.sizes_bytes, "another convolution")
    outcome = replay(stream, NATIVE, 120 * MIB, trials={1: SEVERAL, 2: SEVERAL, 3: other})
    assert outcome.taken == {1: 40 * MIB, 2: 40 * MIB}


def test_all_sizes_are_tried_again_if_the_one_that_fitted_last_does_not_fit():
    stream = [(0, 50 * MIB), (1, 100 * MIB), (1, 0), (2, 60 * MIB), (3, 100 * MIB), (3, 0)]
    outcome = replay(stream, NATIVE, 120 * MIB, trials={1: SEVERAL, 3: SEVERAL})
    assert outcome.taken == {1: 40 * MIB, 3: 0}


def test_the_step_fails_only_if_the_smallest_size_does_not_fit():
    stream = [(0, 50 * MIB), (1, 100 * MIB), (1, 0)]
    large = Trials((100 * MIB, 40 * MIB), "a convolution")
    outcome = replay(stream, NATIVE, 80 * MIB, trials={1: large})
    assert outcome.out_of_memory_event == 1 and outcome.out_of_memory.asked_bytes == 100 * MIB
