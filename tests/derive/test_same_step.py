"""Two recordings have the same step only if all their events are the same."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from planner.derive.same_step import is_same_step
from planner.recording.step_graph import StepGraph
from tests.support.workloads import example, plain, what_if


@functools.cache
def recorded(record) -> StepGraph:
    return record(example("roberta_12", 2, 32), ())


@pytest.mark.parametrize("record", [plain, what_if])
def test_a_step_is_the_same_as_itself(record):
    graph = recorded(record)
    assert is_same_step(dataclasses.replace(graph, ops=[*graph.ops]), graph)
    assert not is_same_step(None, graph)


@pytest.mark.parametrize("name", ["saves", "calls"])  # the last ops belong to the update, which is not compared
def test_steps_with_different_numbers_of_events_are_different(name):
    graph = recorded(what_if)
    shorter = dataclasses.replace(graph, **{name: getattr(graph, name)[:-1]})
    assert not is_same_step(shorter, graph)
    assert not is_same_step(graph, shorter)


@pytest.mark.parametrize("name", ["ops", "saves", "calls"])
def test_steps_that_differ_in_one_event_are_different(name):
    graph = recorded(what_if)
    items = [*getattr(graph, name)]
    middle = len(items) // 2
    items[middle] = dataclasses.replace(items[middle - 1])
    assert not is_same_step(dataclasses.replace(graph, **{name: items}), graph)
