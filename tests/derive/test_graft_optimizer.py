"""A recording with another optimizer's update grafted on is what a recording of the whole step would have been."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from planner.derive.graft_optimizer import can_be_grafted, graft_update
from planner.plan_types.decisions import Accumulation, Freeze, Optimizer, OptimizerKernel, Precision
from planner.recording.step_graph import Category, Phase, StepGraph
from planner.rewrite.rehearse import start_update
from planner.workload.workload import workload
from tests.support.workloads import BARE, example, transformer, what_if

pytestmark = pytest.mark.slow

UPDATES = {
    "8 bits": Optimizer(),
    "fused": OptimizerKernel(kernel="fused"),
    "loop": OptimizerKernel(kernel="for-loop"),
}


class Idle(torch.nn.Module):
    """Parts of it get no gradient, one parameter needs none, and one weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.idle = torch.nn.Linear(96, 96), torch.nn.Linear(96, 512)
        self.fixed = torch.nn.Parameter(torch.zeros(96), requires_grad=False)

    def forward(self, x):
        return self.first(torch.relu(self.first(x))).add(self.fixed).square().mean()


def idle():
    with torch.device("meta"):
        return workload(Idle(), torch.zeros(16, 96))


def roberta():
    return transformer(
        "roberta", "RobertaForMaskedLM", batch_size=8, seq_len=32, num_hidden_layers=2, vocab_size=512, hidden_size=96
    )


WORKLOADS = {
    "roberta": roberta,
    "idle": idle,
    "u-net": lambda: example("unet.py:build", 8),
    "sequential": lambda: example("sequential.py:build", 64),
}


def from_the_forward_on(graph: StepGraph) -> np.ndarray:
    first = next(op.tick for op in graph.ops if op.phase is not Phase.SETUP)
    return graph.live_bytes()[first:]


@pytest.mark.parametrize("other", UPDATES.values(), ids=UPDATES)
@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=["whole", "accumulated"])
@pytest.mark.parametrize(
    ("name", "decisions"),
    [
        *((name, ()) for name in WORKLOADS),
        ("roberta", (Precision(dtype="bf16"),)),
        ("roberta", (Precision(dtype="fp16"),)),
        ("roberta", (Freeze(modules=("roberta.embeddings", "roberta.encoder.layer.0")),)),
        ("idle", (Precision(dtype="fp16"),)),
    ],
)
@pytest.mark.thorough_after(2)
def test_the_grafted_recording_is_the_recorded_one(name, decisions, sizes, other):
    work = WORKLOADS[name]()
    split = (Accumulation(micro_batch_size=sizes[0], micro_batches=2),) if len(sizes) > 1 else ()
    step = what_if(work, (*decisions, *split), sizes=sizes)
    update = start_update(work, (*decisions, other), BARE, step.trained).result()
    assert can_be_grafted(step)
    grafted, full = graft_update(step, update), what_if(work, (*decisions, other, *split), sizes=sizes)

    ops, all_ops = (
        [(op.name, op.phase, op.moved_bytes, op.flops) for op in graph.ops if op.phase is not Phase.SETUP]
        for graph in (grafted, full)
    )
    assert ops == all_ops
    curve, full_curve = from_the_forward_on(grafted), from_the_forward_on(full)
    assert curve[:-1].max() == full_curve[:-1].max()
    op_ticks, all_op_ticks = ([op.tick for op in graph.ops if op.phase is not Phase.SETUP] for graph in (grafted, full))
    assert (grafted.live_bytes()[op_ticks] == full.live_bytes()[all_op_ticks]).all()
    assert state_bytes(grafted) == state_bytes(full)


def state_bytes(graph: StepGraph) -> int:
    held = [s.size_bytes for s in graph.storages if s.category is Category.OPTIMIZER_STATE and s.lives]
    return sum(held)


def test_a_sparse_gradient_is_not_grafted():
    class Lookup(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(100, 8, sparse=True)

        def forward(self, rows):
            return self.table(rows).square().mean()

    work = workload(Lookup(), torch.zeros(4, 3, dtype=torch.long), optimizer="sgd")
    assert not can_be_grafted(what_if(work))
