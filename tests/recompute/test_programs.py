"""A program that recordings with different updates share gives each of them what a program of its own would give."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from planner.derive.cut_update import cut_update
from planner.derive.graft_optimizer import graft_update
from planner.plan_types.decisions import Accumulation, Optimizer, OptimizerKernel, Precision
from planner.plan_types.recompute_decisions import StepInBackward
from planner.recompute.programs import Programs
from planner.recording.step_graph import StepGraph
from planner.rewrite.rehearse import start_update
from planner.search.curve import CompiledProblem
from planner.workload.workload import workload
from tests.support.workloads import BARE, example, some_units, transformer, units, what_if

pytestmark = pytest.mark.slow

OTHERS = (Optimizer(), OptimizerKernel(kernel="fused"), OptimizerKernel(kernel="for-loop"))


class KeepsAnOutput(torch.nn.Module):
    """Autograd holds what this module saves for an output without a use until the step ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x):
        self.last = self.second(torch.tanh(self.first(x))).exp()
        return torch.tanh(self.first(x)).square().mean()


def roberta():
    return transformer(
        "roberta", "RobertaForMaskedLM", batch_size=8, seq_len=32, num_hidden_layers=2, vocab_size=512, hidden_size=96
    )


WORKLOADS = {
    "roberta": roberta,
    "keeps an output": lambda: workload(KeepsAnOutput(), torch.zeros(8, 64)),
    "u-net": lambda: example("unet.py:build", 8),
    "sequential": lambda: example("sequential.py:build", 64),
}


def grafted(name: str, decisions, sizes) -> list[StepGraph]:
    """Returns recordings of one step with different updates."""
    work = WORKLOADS[name]()
    split = (Accumulation(micro_batch_size=sizes[0], micro_batches=2),) if len(sizes) > 1 else ()
    step = what_if(work, (*decisions, *split), sizes=sizes)
    updates = (start_update(work, (*decisions, other), BARE, step.trained).result() for other in OTHERS)
    return [graft_update(step, update) for update in updates]


def program_of(programs: Programs, graph: StepGraph):
    return programs.of(
        lambda: graph, [1] * len(graph.ops), lambda before, _: units(before)[0], granularity_bytes=1, key="the same"
    )


@pytest.mark.parametrize(
    ("name", "decisions", "sizes"),
    [
        ("sequential", (), (4,)),
        ("keeps an output", (), (8,)),
        ("roberta", (), (4, 4)),
        ("roberta", (Precision(dtype="fp16"),), (8,)),
        ("u-net", (), (2, 2)),
    ],
)
@pytest.mark.thorough_after(2)
def test_a_shared_program_promises_what_a_program_of_its_own_promises(name, decisions, sizes):
    rng, programs, built = random.Random(0), Programs(), set()
    for graph in grafted(name, decisions, sizes):
        program, (own, exact) = program_of(programs, graph), units(graph)
        built.add(id(program.units.units))
        assert program.units.units == own.units
        assert program.units.problem.cost_ns == own.problem.cost_ns
        for _ in range(40):
            selected = some_units(own, rng, least=0, most=6)
            assert program.search.exact.peak(selected) == exact.peak(selected)
        assert program.search.smallest_peak().peak_bytes == CompiledProblem(own.problem).peak(
            program.search.smallest_peak().units
        )
    assert len(built) == 1  # the units were built once


def test_before_the_update_the_curve_is_that_of_the_step_and_then_that_of_its_largest_moment():
    for graph in grafted("roberta", (), (8,)):
        cut = cut_update(graph)
        assert cut is not None
        curve, tick = graph.live_bytes(), graph.update_tick
        assert np.array_equal((cut.before.live_bytes() + cut.update_bytes)[:tick], curve[:tick])
        assert cut.before.live_bytes()[-1] + cut.update_bytes[-1] == curve[tick:].max()


@pytest.mark.parametrize("name", ["sequential", "roberta"])
def test_recordings_whose_update_is_part_of_the_step_share_nothing(name):
    work = WORKLOADS[name]()
    for decisions in [(), (StepInBackward(),)]:
        graph = what_if(work, decisions)
        assert cut_update(graph) is None
        program, (own, _) = program_of(Programs(), graph), units(graph)
        assert program.units.units == own.units
        assert np.array_equal(program.units.problem.fixed_bytes, own.problem.fixed_bytes)


def test_recordings_of_other_batches_share_nothing():
    programs = Programs()
    (small, *_), (large, *_) = (grafted("sequential", (), (size,)) for size in (4, 8))
    for graph in (small, large):
        assert np.array_equal(program_of(programs, graph).units.problem.cost_ns, units(graph)[0].problem.cost_ns)
        assert program_of(programs, graph).search.exact.peak(()) == units(graph)[1].peak(())
