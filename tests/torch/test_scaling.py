"""Two small recordings predict all others, to the byte and the FLOP; where they do not, nothing is predicted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from planner_cases import example, transformer, what_if

from planner.decisions import Accumulation, Precision
from planner.scaling import BASE_SIZES, extrapolate
from planner.workload import workload

WORKLOADS = {
    "roberta": lambda: transformer(
        "roberta", "RobertaForMaskedLM", batch_size=16, seq_len=32, num_hidden_layers=2, vocab_size=128
    ),
    "gpt2": lambda: transformer("gpt2", "GPT2LMHeadModel", batch_size=16, seq_len=32, n_layer=2, vocab_size=128),
    "u-net": lambda: example("unet.py:build", 16),
    "sequential": lambda: example("sequential.py:build", 64),
}


def recorded(work, size: int, decisions=()):
    split = Accumulation(micro_batch_size=size, micro_batches=2)
    return what_if(work, (*decisions, split), sizes=(size, size))


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("decisions", [(), (Precision(dtype="bf16"),)], ids=["fp32", "bf16"])
def test_the_predicted_recording_is_the_recorded_one(name, decisions):
    work = WORKLOADS[name]()
    two, three = (recorded(work, size, decisions) for size in BASE_SIZES)
    for size in (4, 7):
        predicted, full = extrapolate(two, three, size), recorded(work, size, decisions)
        assert predicted is not None
        assert np.array_equal(predicted.live_bytes(), full.live_bytes())
        assert [op.flops for op in predicted.ops] == [op.flops for op in full.ops]
        assert [op.moved_bytes for op in predicted.ops] == [op.moved_bytes for op in full.ops]


class LoopOverSamples(torch.nn.Module):
    """Does one more op for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x):
        return sum(self.inner(row).sum() for row in x)


def test_nothing_is_predicted_where_the_ops_depend_on_the_number_of_samples():
    work = workload(LoopOverSamples(), torch.zeros(8, 8))
    two, three = (recorded(work, size) for size in BASE_SIZES)
    assert extrapolate(two, three, 5) is None


def test_single_samples_are_never_predicted():
    work = WORKLOADS["sequential"]()
    two, three = (recorded(work, size) for size in BASE_SIZES)
    assert extrapolate(two, three, 1) is None
