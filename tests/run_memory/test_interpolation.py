"""Steps for batches of other shapes that are predicted, and the numbers in them."""

from __future__ import annotations

import pytest

from planner.run_memory.batches import BatchShape
from planner.run_memory.interpolation import RECORDINGS, Formulas, shapes_to_record

SAME = tuple(BatchShape(6, length) for length in (64, 232, 408, 552, 704, 872, 1024))
SEVERAL = (*SAME, *(BatchShape(2048 // length, length) for length in (40, 128, 296, 680)))
ASKED = [BatchShape(6, 65), BatchShape(21, 96), BatchShape(6, 333), BatchShape(2, 1000)]


def up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


@pytest.mark.parametrize(
    "function",
    [
        lambda n, x: 7,
        lambda n, x: 12 * x + 5,
        lambda n, x: 16 * x * x + 4 * x,
        lambda n, x: 4 * up(x, 32),
        lambda n, x: 100 + 3 * x + 4 * up(x, 128),
        lambda n, x: 2 * x * x + 8 * up(x, 64) + x,
        lambda n, x: x * up(x, 32) + 9,
    ],
)
@pytest.mark.parametrize("known", [SAME, SEVERAL])
def test_a_number_is_predicted_at_every_length(function, known):
    formulas = Formulas(known)
    values = tuple(function(*shape) for shape in known)
    assert [formulas.value_at(values, shape) for shape in ASKED] == [function(*shape) for shape in ASKED]


@pytest.mark.parametrize(
    "function",
    [
        lambda n, x: 8 * n,
        lambda n, x: 4 * n * x,
        lambda n, x: 100 + 3 * x + 12 * n * x,
        lambda n, x: 2 * x * x + 8 * n * x * x,
        lambda n, x: 16 * n * up(x, 32),
        lambda n, x: 4096 + 6 * n * x + 2 * n * up(x, 64) * x,
    ],
)
def test_a_number_is_predicted_for_every_number_of_samples(function):
    formulas = Formulas(SEVERAL)
    values = tuple(function(*shape) for shape in SEVERAL)
    assert [formulas.value_at(values, shape) for shape in ASKED] == [function(*shape) for shape in ASKED]


@pytest.mark.parametrize(
    ("known", "function"),
    [
        (SAME, lambda n, x: 2**x),
        (SEVERAL, lambda n, x: up(n * x, 100)),
        (SEVERAL, lambda n, x: n * n * x),
    ],
)
def test_what_no_sum_explains_is_not_predicted(known, function):
    assert Formulas(known).value_at(tuple(function(*shape) for shape in known), BatchShape(6, 90)) is None


def test_too_few_recordings_explain_nothing():
    assert Formulas(SAME[:3]).value_at((5, 7, 9), BatchShape(6, 4)) is None


def test_few_shapes_are_all_recorded_and_many_are_sampled_with_both_ends():
    few = [BatchShape(4, length) for length in (3, 5, 9)]
    assert shapes_to_record([*few, few[1]]) == few
    chosen = shapes_to_record([BatchShape(4, length) for length in range(10, 1000)])
    assert len(chosen) == RECORDINGS
    assert (chosen[0].length, chosen[-1].length) == (10, 999)


def test_a_few_more_shapes_are_recorded_where_the_number_of_samples_differs():
    by_tokens = [BatchShape(8192 // length, length) for length in range(16, 1032, 64)]
    chosen = shapes_to_record(by_tokens, recorded=SAME)
    assert len(chosen) == 4
    assert shapes_to_record([*by_tokens, *SAME]) == [*SAME, *chosen]
    assert len(shapes_to_record(by_tokens)) == 11


def test_steps_with_one_sample_are_recorded_apart():
    shapes = [*SAME, *(BatchShape(1, length) for length in range(8, 800, 8))]
    assert [sum(shape.samples == 1 for shape in shapes_to_record(given)) for given in (shapes, SAME)] == [7, 0]
    single = [BatchShape(3, length) for length in range(8, 800, 8)]
    assert len(shapes_to_record(single, recorded=SAME, parts=2)) == RECORDINGS
