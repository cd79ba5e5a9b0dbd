"""Files of lengths, and the batches that are made of them."""

from __future__ import annotations

import random

import pytest

from planner.errors import WorkloadError
from planner.run_memory.lengths import batch_lengths, coarser, grouped, longest_first, read_lengths

pytestmark = pytest.mark.no_torch


@pytest.mark.parametrize(
    "text",
    ["5\n3\n3\n", "5 1\n3 2\n", "5,1\n3,2", "5\t1\n3\t2\n", "[5, 3, 3]", '{"5": 1, "3": 2}', "[[5, 1], [3, 2]]"],
)
def test_each_form_gives_the_lengths(tmp_path, text):
    (tmp_path / "lengths").write_text(text)
    assert read_lengths(tmp_path / "lengths") == [5, 3, 3]


@pytest.mark.parametrize("text", ["", "a", "3 4 5", "[0]", "[1.5]", "{", "-2", "[true]", '{"5": {"6": 7}}', "[null]"])
def test_other_content_is_refused_with_the_forms(tmp_path, text):
    (tmp_path / "lengths").write_text(text)
    with pytest.raises(WorkloadError, match="one length per line") as refused:
        read_lengths(tmp_path / "lengths")
    assert "int()" not in str(refused.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_lengths(tmp_path / "none")


def test_a_batch_has_the_length_of_its_longest_sample_padded_and_cut():
    batches = batch_lengths([1, 9, 2, 70], batch_size=2, seed=0, multiple=8, longest=64, steps=6)
    assert len(batches) == 6
    assert set(batches) <= {8, 16, 64}
    assert batches == batch_lengths([1, 9, 2, 70], batch_size=2, seed=0, multiple=8, longest=64, steps=6)


def test_the_longest_sample_is_in_a_batch_of_every_epoch():
    batches = batch_lengths(range(1, 101), batch_size=10, seed=1, steps=30)
    assert [max(batches[start : start + 10]) for start in (0, 10, 20)] == [100] * 3


def test_samples_grouped_by_length_need_less_padding_and_begin_with_the_longest():
    source = random.Random(0)
    samples = [source.randrange(10, 1000) for _ in range(2000)]
    plain = batch_lengths(samples, batch_size=4, seed=0, steps=500)
    by_length = batch_lengths(samples, batch_size=4, seed=0, steps=500, arrange=grouped)
    assert by_length[0] == max(samples)
    assert sum(by_length) < 0.75 * sum(plain)


def test_the_longest_batch_moves_to_the_front():
    assert longest_first([3, 9, 4]) == [9, 3, 4]


def test_lengths_are_made_coarse_until_few_differ():
    assert coarser(range(1, 1025), 64) == 16
    assert coarser([5, 7], 64) == 1
