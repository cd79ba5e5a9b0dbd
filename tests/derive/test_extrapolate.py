"""Two small recordings predict all others, to the byte and the FLOP; where they do not, nothing is predicted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from planner.derive.extrapolate import BASE_SIZES, extrapolate
from planner.plan_types.decisions import Accumulation, Precision
from planner.plan_types.recompute_decisions import Checkpoint
from planner.recording.step_graph import Phase
from planner.workload.workload import workload
from tests.support.workloads import example, transformer, what_if

pytestmark = pytest.mark.slow


class Recurrent(torch.nn.Module):
    """A recurrent network over a sequence whose steps it takes one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = torch.nn.GRU(12, 16, batch_first=True), torch.nn.Linear(16, 8)

    def forward(self, x):
        return self.out(self.cells(x)[0]).square().mean()


def recurrent():
    return workload(Recurrent(), torch.zeros(16, 5, 12))


WORKLOADS = {
    "roberta": lambda: transformer(
        "roberta", "RobertaForMaskedLM", batch_size=16, seq_len=32, num_hidden_layers=2, vocab_size=128
    ),
    "gpt2": lambda: transformer("gpt2", "GPT2LMHeadModel", batch_size=16, seq_len=32, n_layer=2, vocab_size=128),
    "llama": lambda: transformer(
        "llama",
        "LlamaForCausalLM",
        batch_size=16,
        seq_len=32,
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=128,
    ),
    "t5": lambda: transformer(
        "t5",
        "T5ForConditionalGeneration",
        batch_size=16,
        seq_len=32,
        vocab_size=128,
        num_layers=2,
        decoder_start_token_id=0,
    ),
    "vit": lambda: transformer("vit", "ViTForImageClassification", batch_size=16, seq_len=1, num_hidden_layers=1),
    "recurrent": recurrent,
    "u-net": lambda: example("unet.py:build", 16),
    "sequential": lambda: example("sequential.py:build", 64),
}


def recorded(work, size: int, decisions=()):
    split = Accumulation(micro_batch_size=size, micro_batches=2)
    return what_if(work, (*decisions, split), sizes=(size, size))


@pytest.mark.parametrize(
    ("name", "decisions"),
    [
        *((name, ()) for name in WORKLOADS if name != "u-net"),
        *((name, (Precision(dtype="bf16"),)) for name in ("roberta", "gpt2", "sequential")),
        pytest.param("u-net", (), marks=pytest.mark.thorough),
        pytest.param("u-net", (Precision(dtype="bf16"),), marks=pytest.mark.thorough),
    ],
)
@pytest.mark.thorough_after(1)
def test_the_predicted_recording_is_the_recorded_one(name, decisions):
    work = WORKLOADS[name]()
    two, three = (recorded(work, size, decisions) for size in BASE_SIZES)
    for size in (4, 7):
        predicted, full = extrapolate(two, three, size), recorded(work, size, decisions)
        assert predicted is not None
        assert np.array_equal(predicted.live_bytes(), full.live_bytes())
        assert [op.flops for op in predicted.ops] == [op.flops for op in full.ops]
        assert [op.moved_bytes for op in predicted.ops] == [op.moved_bytes for op in full.ops]


@pytest.mark.parametrize("name", ["roberta", "llama", "sequential"])
@pytest.mark.thorough_after(1)
def test_the_prediction_holds_for_checkpointed_modules_too(name):
    work = WORKLOADS[name]()
    names = {type(module).__name__: path for path, module in work.model.named_modules() if path}
    layers = tuple(path for kind, path in names.items() if kind.endswith(("Layer", "DecoderLayer")))[-1:] or ("0",)
    decisions = (Checkpoint(modules=layers),)
    two, three, full = (recorded(work, size, decisions) for size in (*BASE_SIZES, 5))
    assert any(op.phase is Phase.RECOMPUTE for op in full.ops)
    assert np.array_equal(extrapolate(two, three, 5).live_bytes(), full.live_bytes())


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
