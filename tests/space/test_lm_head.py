"""The head is found where its output goes straight into a cross entropy; what is promised of chunks is certified."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import planner
from planner.errors import DecisionError
from planner.plan_types.decisions import Accumulation, ChunkedLoss, Precision
from planner.plan_types.recompute_decisions import Checkpoint, Replay
from planner.recording.step_graph import Category
from planner.space import lm_head
from planner.workload.workload import workload
from tests.support.workloads import BARE, certifying_graph, plain, transformer, what_if

pytestmark = pytest.mark.slow

WORDS = 4096
MODELS = {
    "roberta": ("roberta", "RobertaForMaskedLM", "lm_head.decoder", {"num_hidden_layers": 2}),
    "bert": ("bert", "BertForMaskedLM", "cls.predictions.decoder", {"num_hidden_layers": 1}),
    "gpt2": ("gpt2", "GPT2LMHeadModel", "lm_head", {"n_layer": 2}),
    "llama": (
        "llama",
        "LlamaForCausalLM",
        "lm_head",
        {
            "num_hidden_layers": 2,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
    "t5": ("t5", "T5ForConditionalGeneration", "lm_head", {"num_layers": 1, "decoder_start_token_id": 0}),
}


def of(name: str, seq_len: int = 64):
    kind, head, _, settings = MODELS[name]
    return transformer(kind, head, batch_size=4, seq_len=seq_len, vocab_size=WORDS, **settings)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thorough_after(3)
def test_the_head_of_a_language_model_is_found(name):
    work = of(name)
    graph = certifying_graph(work, (), BARE)
    found = lm_head.loss_in_chunks(graph, work.model, vram_bytes=8 << 20)
    assert found.for_micro_batches(1) == ChunkedLoss(module=MODELS[name][2], chunks=8)
    assert lm_head.loss_in_chunks(graph, work.model, vram_bytes=8 << 30).chunks == 2


def test_a_micro_batch_has_no_more_chunks_than_it_needs():
    found = lm_head.ChunkedLossOption(module="head", chunks=8)
    chunks = {count: part and part.chunks for count in (1, 2, 7, 8, 64) for part in [found.for_micro_batches(count)]}
    assert chunks == {1: 8, 2: 4, 7: 4, 8: None, 64: None}
    assert {found.most_chunks().for_micro_batches(count).chunks for count in (1, 2, 64)} == {64}
    assert lm_head.ChunkedLossOption(module="head", chunks=2, always=True).for_micro_batches(2).chunks == 2


class Net(torch.nn.Module):
    """A head whose output meets something before the loss takes it, or a loss of another kind."""

    def __init__(self, between) -> None:
        super().__init__()
        self.head, self.between = torch.nn.Linear(16, WORDS), between

    def forward(self, x, labels):
        return self.between(self.head(x), labels)


OTHERS = {
    "scaled": lambda logits, labels: F.cross_entropy(logits / 2, labels),
    "smoothed": lambda logits, labels: F.cross_entropy(logits, labels, label_smoothing=0.1),
    "weighted": lambda logits, labels: F.cross_entropy(logits, labels, weight=torch.ones_like(logits[0])),
    "row by row": lambda logits, labels: F.cross_entropy(logits, labels, reduction="none").square().mean(),
    "other loss": lambda logits, labels: logits.square().mean(),
    "three dimensions": lambda logits, labels: F.cross_entropy(
        logits.view(2, -1, WORDS).transpose(1, 2), labels.view(2, -1)
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_where_logits_are_used_otherwise_no_chunks_are_offered(name):
    work = workload(Net(OTHERS[name]), (torch.zeros(128, 16), torch.zeros(128, dtype=torch.int64)))
    assert lm_head.loss_in_chunks(certifying_graph(work, (), BARE), work.model, vram_bytes=1 << 20) is None


def test_a_small_loss_is_left_alone_and_so_is_a_head_that_is_used_twice():
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(16, WORDS)

        def forward(self, x, labels):
            return F.cross_entropy(self.head(x), labels) + F.cross_entropy(self.head(2 * x), labels)

    batch = torch.zeros(128, 16), torch.zeros(128, dtype=torch.int64)
    work = workload(Twice(), batch)
    assert lm_head.loss_in_chunks(certifying_graph(work, (), BARE), work.model, vram_bytes=1 << 20) is None
    work = workload(Net(F.cross_entropy), tuple(part[:8] for part in batch))
    assert lm_head.loss_in_chunks(certifying_graph(work, (), BARE), work.model, vram_bytes=1 << 20) is None


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "others", [(), (Precision(dtype="bf16"),), (Precision(dtype="fp16"),)], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.thorough_after(1)
def test_what_is_promised_of_a_chunked_loss_is_certified(name, others):
    work, chunked = of(name), ChunkedLoss(module=MODELS[name][2], chunks=4)
    for split, sizes in (((), (4,)), ((Accumulation(micro_batch_size=2, micro_batches=2),), (2, 2))):
        decisions = (*others, chunked, *split)
        assert (
            what_if(work, decisions, sizes=sizes).live_bytes().max()
            == plain(work, decisions, sizes=sizes).live_bytes().max()
        )


def test_logits_are_never_held_whole():
    work = of("gpt2")
    whole = 4 * 64 * WORDS * 4
    for decisions in ((), (ChunkedLoss(module="lm_head", chunks=8),)):
        sizes = {s.size_bytes for s in plain(work, decisions).storages if s.category is Category.LOGITS}
        assert (whole in sizes) == (not decisions) and (whole // 8 in sizes) == bool(decisions)


@pytest.mark.thorough
def test_a_plan_prefers_chunks_to_recompute_and_says_so():
    work = of("llama", seq_len=512)
    model, batch = work.model, work.batch
    whole = planner.plan(model, batch, vram=None, gpu="bare").baseline
    plan = planner.plan(model, batch, vram=int(0.75 * whole.total_bytes), gpu="bare", fidelity="exact")
    assert plan.fits and [type(decision) for decision in plan.decisions] == [ChunkedLoss]
    assert plan.peak.flops <= 1.001 * whole.flops
    assert "never materialized" in plan.decisions[0].describe()
    without = planner.plan(
        model, batch, vram=int(0.75 * whole.total_bytes), gpu="bare", fidelity="exact", forbid=["chunked-loss"]
    )
    assert {type(decision) for decision in without.decisions} <= {Checkpoint, Replay, Accumulation}


class Unusual(torch.nn.Module):
    """A language model that does something of its own to its logits."""

    def __init__(self, change) -> None:
        super().__init__()
        self.words, self.body, self.head = (
            torch.nn.Embedding(4099, 32),
            torch.nn.Linear(32, 32),
            torch.nn.Linear(32, 4099),
        )
        self.change = change

    def forward(self, tokens):
        logits = self.head(torch.tanh(self.body(self.words(tokens))))
        return F.cross_entropy(self.change(logits).view(-1, 4099), tokens.view(-1))


def scaled(logits):
    return logits.div_(0.1)


def marked(logits):
    logits[..., 3] = -50.0
    return logits


def counted(logits):
    logits.argmax(-1)
    return logits


def hooked(logits):
    logits.register_hook(lambda gradient: 10 * gradient)
    return logits


@pytest.mark.parametrize("change", [scaled, marked, counted])
def test_logits_that_are_used_otherwise_are_not_taken_in_chunks(change):
    work = workload(Unusual(change), (torch.zeros(4, 33, dtype=torch.long),))
    assert lm_head.loss_in_chunks(certifying_graph(work, (), BARE), work.model, vram_bytes=1 << 20) is None


@pytest.mark.parametrize("change", [scaled, hooked])
@pytest.mark.thorough
def test_a_model_that_cannot_have_chunks_gets_the_plan_it_gets_without(change):
    """A hook leaves no trace in a recording: the chunks are offered, refused in rehearsal, and all else is tried."""
    batch, options = (torch.zeros(4, 33, dtype=torch.long),), {"gpu": "bare", "fidelity": "exact", "optimizer": "sgd"}
    model = Unusual(change)
    whole = planner.plan(model, batch, vram=None, **options).peak.total_bytes
    for share in (0.6, 0.05):
        plan = planner.plan(model, batch, vram=int(share * whole), **options)
        without = planner.plan(model, batch, vram=int(share * whole), forbid=["chunked-loss"], **options)
        assert (plan.fits, plan.decisions) == (without.fits, without.decisions)
        assert any("left out (loss in" in note for note in plan.notes) is (change is hooked)


def test_backward_hooks_of_the_head_speak_against_chunks():
    model = Unusual(lambda logits: logits)
    work = workload(model, (torch.zeros(4, 33, dtype=torch.long),))
    assert lm_head.loss_in_chunks(certifying_graph(work, (), BARE), model, vram_bytes=1 << 20) is not None
    model.head.register_full_backward_hook(lambda module, inputs, outputs: None)
    assert lm_head.loss_in_chunks(certifying_graph(work, (), BARE), model, vram_bytes=1 << 20) is None
    with pytest.raises(DecisionError, match="backward hooks"):
        certifying_graph(work, (ChunkedLoss(module="head", chunks=2),), BARE)
