"""A child process sends its recording pickled: field by field, so that the parent takes little memory to read it."""

from __future__ import annotations

import dataclasses
import pickle
import tracemalloc

import pytest

from planner.recording.step_graph import StepGraph
from tests.support.workloads import example, plain, what_if


@pytest.mark.parametrize("record", [plain, what_if])
@pytest.mark.parametrize("name", [("roberta_12", 2, 32), ("unet.py:build", 2)], ids=["RoBERTa", "U-Net"])
def test_a_pickled_recording_is_the_same(record, name):
    graph = record(example(*name), ())
    again = pickle.loads(pickle.dumps(graph))
    assert again == graph
    for op in again.ops:
        op.tick += 1  # each op is an object of its own
    assert [op.tick for op in again.ops] == [op.tick + 1 for op in graph.ops]


def test_names_of_modules_are_texts_also_if_a_phase_or_a_category_has_this_name():
    """`Phase.BACKWARD` equals "backward", because it is a `StrEnum`."""
    graph = plain(example("roberta_12", 2, 32), ())
    ops = [dataclasses.replace(op, module=op.phase.value) for op in graph.ops]
    storages = [dataclasses.replace(storage, name=storage.category.value) for storage in graph.storages]
    again = pickle.loads(pickle.dumps(dataclasses.replace(graph, ops=ops, storages=storages)))
    assert {type(op.module) for op in again.ops} | {type(storage.name) for storage in again.storages} == {str}
    assert all(op.phase is old.phase for op, old in zip(again.ops, ops, strict=True))
    assert all(storage.category is old.category for storage, old in zip(again.storages, storages, strict=True))


def test_equal_texts_and_shapes_are_one_object():
    graph = plain(example("roberta_12", 2, 32), ())
    again = pickle.loads(pickle.dumps(graph))
    for field in ("name", "source", "shapes", "inputs", "outputs"):
        values = [getattr(op, field) for op in again.ops]
        assert len({id(value) for value in values}) == len({*values})


def test_a_recording_without_items_is_pickled():
    graph = plain(example("roberta_12", 2, 32), ())
    empty = dataclasses.replace(graph, ops=[], storages=[], saves=[], calls=[])
    assert pickle.loads(pickle.dumps(empty)) == empty


def test_reading_a_recording_takes_little_more_memory_than_the_recording():
    sent = pickle.dumps(plain(example("roberta_12", 2, 32), ()))
    tracemalloc.start()
    try:
        graph: StepGraph = pickle.loads(sent)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert graph.ops and peak < 1.75 * held
