"""Recordings leave memory if there are too many, and derived ones are derived again."""

from __future__ import annotations

import gc
import types
import weakref

from planner.derive.graph_cache import DerivedGraph, GraphCache


def graph(ops: int):
    """Stands for a recording."""
    return types.SimpleNamespace(ops=range(ops))


def test_the_least_recently_used_recordings_are_dropped():
    cache, graphs = GraphCache(10), {name: graph(4) for name in "abc"}
    for name in "ab":
        assert cache.add(name, graphs[name]) is graphs[name]
    assert cache.get("a") is graphs["a"]
    cache.add("c", graphs["c"])
    assert [name in cache for name in "abc"] == [True, False, True]
    assert cache.get("b") is None
    cache.add("b", graph(8))
    assert [name in cache for name in "abc"] == [False, True, False]


def test_the_last_recording_is_kept_whatever_its_size():
    cache = GraphCache(10)
    cache.add("a", graph(4))
    cache.add("b", graph(400))
    assert ("a" in cache, "b" in cache) == (False, True)
    cache.add("b", graph(5))  # replaces it
    cache.add("c", graph(5))
    assert ("b" in cache, "c" in cache) == (True, True)


def test_a_derived_recording_is_derived_again_after_it_was_dropped():
    derived, cache = [], GraphCache(10)

    def derive():
        derived.append(graph(6))
        return derived[-1]

    recording, given = DerivedGraph(derive, cache), DerivedGraph(derive, cache, graph(6))
    assert given() is given() and not derived
    assert recording() is recording() is derived[0]
    assert given() is derived[1]
    assert recording() is derived[2]


def test_a_derived_recording_is_freed_without_garbage_collection():
    gc.collect()
    gc.disable()
    try:
        cache = GraphCache(10)
        recording = DerivedGraph(lambda: graph(6), cache)
        recording()
        gone = weakref.ref(recording), weakref.ref(cache)
        del recording, cache
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()
