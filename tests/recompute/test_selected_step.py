"""The predicted allocations of a selection have the peak that the checkpoint problem promises."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import Linear

from planner.estimate.add_workspaces import with_workspaces
from planner.estimate.footprint import smallest_of
from planner.plan_types.decisions import Accumulation, Precision, StepInBackward
from planner.plan_types.sizes import MIB
from planner.recompute.selected_step import two_selected_steps
from planner.search.milp import Search
from planner.workload.workload import workload
from tests.recompute.test_programs import WORKLOADS
from tests.support.workloads import CARD, certifying_graph, example, some_units, units, what_if

pytestmark = pytest.mark.slow


class Residual(torch.nn.Module):
    """Eight blocks of linear layers on 512 features, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (torch.nn.Sequential(Linear(512, 2048), torch.nn.GELU(), Linear(2048, 512)) for _ in range(8))
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


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
    assert found.two_steps(graph, ()).live_bytes().max() == exact.peak(())
    smallest = Search(found.problem).smallest_peak()
    assert found.two_steps(graph, smallest.units).live_bytes().max() == smallest.peak_bytes
    for _ in range(30):
        selected = some_units(found, rng, least=1, most=8)
        assert found.two_steps(graph, selected).live_bytes().max() == exact.peak(selected), [
            found.units[unit] for unit in selected
        ]


@pytest.mark.parametrize(("samples", "parts"), [(4096, 1), (6144, 2)])
def test_without_recompute_the_predicted_total_is_that_of_the_certificate(samples, parts):
    """The slack depends on the moment at which autograd's thread allocates its cuBLAS workspace."""
    work, size = workload(Residual(), torch.zeros(samples, 512)), samples // parts
    split = (Accumulation(micro_batch_size=size, micro_batches=parts),) if parts > 1 else ()
    graph = with_workspaces(what_if(work, split, sizes=(size,) * parts, card=CARD), CARD, torch.__version__)
    certificate = certifying_graph(work, split, CARD)
    predicted_bytes = smallest_of(two_selected_steps(graph, {}, ()), CARD, [()])
    assert predicted_bytes == smallest_of(certificate, CARD, [()])


@pytest.mark.parametrize("part", ["mlp", "attn", "mlp.act"])
@pytest.mark.thorough
def test_the_predicted_total_is_nearly_that_of_the_certificate(part):
    """The slack is large, because the update of the first step splits free blocks for the optimizer state."""
    work = example("gpt2", 8, 1024)
    graph = with_workspaces(what_if(work, card=CARD), CARD, torch.__version__)
    found, exact = units(graph)
    wanted = {f"transformer.h.{layer}.{part}" for layer in range(12)}
    selected = tuple(
        number
        for number, unit in enumerate(found.units)
        if unit.module in wanted and unit.segment is None and unit.runs_again and not unit.kept and not unit.on_host
    )
    certificate = certifying_graph(work, found.decisions(selected), CARD)
    total_bytes = smallest_of(certificate, CARD, [()])
    slack_bytes = total_bytes - CARD.outside_bytes - exact.peak(selected)
    assert len(selected) == 12 and slack_bytes > 0.04 * total_bytes
    assert abs(smallest_of(found.two_steps(graph, selected), CARD, [()]) - total_bytes) <= 2 * MIB
