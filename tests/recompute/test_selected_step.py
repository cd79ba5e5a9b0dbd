"""The predicted allocations of a selection have the peak that the checkpoint problem promises."""

from __future__ import annotations

import random

import pytest

from planner.plan_types.decisions import Accumulation, Precision, StepInBackward
from tests.recompute.test_programs import WORKLOADS
from tests.support.workloads import example, units, what_if

pytestmark = pytest.mark.slow

MODELS = {**WORKLOADS, "flat": lambda: example("flat.py:build", 16), "llama": lambda: example("llama_1b", 2, 64)}
SPLIT = Accumulation(micro_batch_size=2, micro_batches=2)


@pytest.mark.parametrize(
    ("name", "decisions", "sizes"),
    [
        ("sequential", (), (4,)),
        ("sequential", (StepInBackward(),), (4,)),
        ("keeps an output", (), (8,)),
        ("roberta", (Precision(dtype="bf16"),), (8,)),
        ("roberta", (SPLIT,), (2, 2)),
        ("flat", (), (8,)),
        ("u-net", (), (2,)),
        ("llama", (), (2,)),
    ],
)
@pytest.mark.thorough_after(4)
def test_the_predicted_peak_is_the_promised_one(name, decisions, sizes):
    graph, rng = what_if(MODELS[name](), decisions, sizes=sizes), random.Random(0)
    found, exact = units(graph)
    count = len(found.units)
    assert found.two_steps(graph, ()).live_bytes().max() == exact.peak(())
    for _ in range(30):
        chosen = set(rng.sample(range(count), rng.randint(1, min(count, 8))))
        selected = tuple(
            unit
            for unit in chosen
            if not any(unit in path and chosen & {*path} - {unit} for path in found.problem.paths)
        )
        assert found.two_steps(graph, selected).live_bytes().max() == exact.peak(selected), [
            found.units[unit] for unit in selected
        ]
