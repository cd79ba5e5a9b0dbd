"""A rehearsal compared with a real run: one recorder watches the same two steps rehearsed, and run on the CPU.

Everything is equal, to the byte and in order: ops, storages, births and deaths. What differs has a test of its own,
which says why and by exactly how much.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from planner.recording.step_graph import Op, StepGraph, Storage
from tests.support.truth import CASES, rehearsal, truth

pytestmark = pytest.mark.slow

EXCEPTIONS = ("in-place, sliced", "bf16 autocast")
"""Each has its own test below."""


@pytest.mark.parametrize("name", [name for name in CASES if name not in EXCEPTIONS])
@pytest.mark.thorough_after(2)
def test_a_rehearsal_is_what_really_happens_op_by_op_and_byte_by_byte(name):
    real, rehearsed = truth(CASES[name]), rehearsal(CASES[name])
    for op, other in zip(real.ops, rehearsed.ops, strict=False):
        assert _comparable(op) == _comparable(other)
    assert len(real.ops) == len(rehearsed.ops)
    assert real.storages == rehearsed.storages
    assert real.calls == rehearsed.calls
    assert np.array_equal(real.live_bytes(), rehearsed.live_bytes())


def _comparable(op: Op) -> Op:
    """A constant becomes a tensor by this op: a new one in a rehearsal, really the same. A CPU has no link to cross."""
    op = dataclasses.replace(op, host_bytes=0)
    return dataclasses.replace(op, inputs=()) if op.name == "aten.lift_fresh.default" else op


def test_the_truth_is_no_rehearsal():
    model, batch, _ = CASES["tied weights"].build()
    graph = truth(CASES["tied weights"])
    assert sum(op.name == "aten.nll_loss_forward.default" for op in graph.ops) == 2
    assert graph.live_bytes()[-1] >= sum(p.nbytes for p in model.parameters()) + batch.nbytes


# ---- exceptions ---------------------------------------------------------------------------------------------------


def test_writing_into_a_slice_makes_other_views_but_the_same_kernels_and_bytes():
    """Autograd takes a view of a real tensor again by its strides; for tensor subclasses it replays the slicing."""
    real, rehearsed = truth(CASES["in-place, sliced"]), rehearsal(CASES["in-place, sliced"])
    assert _kernels(real) == _kernels(rehearsed)
    assert [storage.size_bytes for storage in real.storages] == [storage.size_bytes for storage in rehearsed.storages]
    views = [[op.name for op in graph.ops if op.is_view] for graph in (real, rehearsed)]
    assert views[0].count("aten.as_strided.default") - views[1].count("aten.as_strided.default") == 2
    assert views[1].count("aten.slice.Tensor") - views[0].count("aten.slice.Tensor") == 4


def _kernels(graph: StepGraph) -> list[tuple]:
    live = graph.live_bytes()
    return [(op.name, op.phase, op.shapes, int(live[op.tick])) for op in graph.ops if not op.is_view]


def test_under_autocast_storages_that_die_in_one_op_may_die_in_another_order():
    """On a CPU, the statistics of a layer normalization are fp32 although its input is bf16."""
    real, rehearsed = truth(CASES["bf16 autocast"]), rehearsal(CASES["bf16 autocast"])
    assert _kernels(real) == _kernels(rehearsed)
    assert _lives(real) == _lives(rehearsed)


def _lives(graph: StepGraph) -> list[tuple[int, int | None, tuple[int, ...]]]:
    """Returns for each storage: its bytes, the op that made it, and the ops after which it died."""
    ticks = [op.tick for op in graph.ops]

    def life(storage: Storage) -> tuple[int, int | None, tuple[int, ...]]:
        ends = tuple(int(np.searchsorted(ticks, stop)) for _, stop in storage.lives)
        return storage.size_bytes, storage.op, ends

    return [life(storage) for storage in graph.storages]
