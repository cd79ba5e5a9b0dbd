"""The batches that are made of samples of different lengths."""

from __future__ import annotations

import random

import pytest

from planner.run_memory.batches import (
    BatchShape,
    batches_of_samples,
    batches_of_tokens,
    coarser,
    grouped,
    largest_first,
)

pytestmark = pytest.mark.no_torch


def lengths(batches: list[BatchShape]) -> list[int]:
    return [shape.length for shape in batches]


def test_a_batch_has_the_length_of_its_longest_sample_padded_and_cut():
    options = {"batch_size": 2, "seed": 0, "multiple": 8, "longest": 64, "steps": 6}
    batches = batches_of_samples([1, 9, 2, 70], **options)
    assert len(batches) == 6
    assert set(batches) <= {(2, 8), (2, 16), (2, 64)}
    assert batches == batches_of_samples([1, 9, 2, 70], **options)


def test_the_longest_sample_is_in_a_batch_of_every_epoch():
    batches = lengths(batches_of_samples(range(1, 101), batch_size=10, seed=1, steps=30))
    assert [max(batches[start : start + 10]) for start in (0, 10, 20)] == [100] * 3


def test_samples_grouped_by_length_need_less_padding_and_begin_with_the_longest():
    source = random.Random(0)
    samples = [source.randrange(10, 1000) for _ in range(2000)]
    plain = lengths(batches_of_samples(samples, batch_size=4, seed=0, steps=500))
    by_length = lengths(batches_of_samples(samples, batch_size=4, seed=0, steps=500, arrange=grouped))
    assert by_length[0] == max(samples)
    assert sum(by_length) < 0.75 * sum(plain)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_batches_of_tokens_stay_within_the_limit_and_take_as_many_samples_as_they_can(parts):
    source = random.Random(0)
    samples = [source.randrange(10, 500) for _ in range(5000)]
    batches = batches_of_tokens(samples, most_tokens=2000, parts=parts, seed=0, multiple=8, longest=400, steps=5000)
    assert all(shape.samples % parts == 0 and shape.tokens <= 2000 for shape in batches)
    assert all(shape.tokens + parts * shape.length > 2000 for shape in batches)
    epoch = next(number for number in range(1, 5000) if sum(shape.samples for shape in batches[:number]) > 4990)
    assert sum(shape.tokens for shape in batches[:epoch]) < 1.05 * sum(min(length, 400) for length in samples)
    assert max(lengths(batches)) == 400


def test_a_sample_beyond_the_limit_is_refused():
    with pytest.raises(ValueError, match="2 samples of 90 tokens exceed 100 tokens"):
        batches_of_tokens([90, 10], most_tokens=100, parts=2, seed=0, steps=3)


def test_the_largest_batch_moves_to_the_front():
    batches = [BatchShape(2, 3), BatchShape(2, 9), BatchShape(8, 4), BatchShape(8, 4)]
    assert largest_first(batches) == [(8, 4), (2, 3), (2, 9), (8, 4)]


def test_lengths_are_made_coarse_until_few_differ():
    assert coarser(range(1, 1025), 64) == 16
    assert coarser([5, 7], 64) == 1
