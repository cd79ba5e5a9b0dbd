"""Parity of objects, modes, hooks, random numbers and overflows; and unusual models that must pass."""

from __future__ import annotations

import types
import warnings

import pytest
import torch
from torch import nn

from planner.plan_types.decisions import Accumulation, Optimizer, Precision, StepInBackward
from planner.plan_types.recompute_decisions import Checkpoint
from planner.rewrite.parity.model_structure import difference, identity_facts
from planner.rewrite.rules import RULES, eight_bit_optimizer
from planner.rewrite.step import TrainingStep
from tests.support.training import (
    Convolutional,
    Perceptron,
    cross_entropy,
    images,
    roberta,
    seeded,
    tokens,
    vectors,
    verified,
)

UNEVEN = Accumulation(micro_batch_size=4, micro_batches=2)
"""A batch of 6 samples becomes micro-batches of 4 and 2."""
HEAD = Checkpoint(modules=("head",))
PLAIN_UPDATE = TrainingStep.update


# ---- planted faults that change no number of the first steps --------------------------------------------------------


class Watched(Perceptron):
    """A model with a hook that changes nothing."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.layers[1].register_forward_hook(lambda module, inputs, output: None)


class Configured(Perceptron):
    """A model with a configuration, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(hidden_dropout_prob=0.1)


def other_parameters(rewriting, decision) -> None:
    for module in rewriting.model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = nn.Parameter(parameter.detach().clone())


def other_state_dict(rewriting, decision) -> None:
    for module in rewriting.model.modules():
        module._non_persistent_buffers_set.update(module._buffers)


def evaluating(rewriting, decision) -> None:
    rewriting.model.layers[1].eval()


def hooks_dropped(rewriting, decision) -> None:
    rewriting.model.layers[1]._forward_hooks.clear()


def hook_left(rewriting, decision) -> None:
    rewriting.model.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def not_undone(rewriting, decision) -> None:
    rewriting.model.head.forward = rewriting.model.head.forward


def configured(rewriting, decision) -> None:
    rewriting.model.config.hidden_dropout_prob = 0.5


@pytest.mark.parametrize(
    ("build", "rule", "reported"),
    [
        (Perceptron, other_parameters, "kept: applied parameters: changed at 'layers.0.0.weight'"),
        (Convolutional, other_state_dict, "kept: applied state_dict: changed at 'first.1.num_batches_tracked'"),
        (Watched, evaluating, "kept: applied modes: changed at 'layers.1'"),
        (Watched, hooks_dropped, "kept: applied hooks: changed at 'layers.1._forward_hooks'"),
        (Watched, hook_left, "kept: undone hooks: changed at 'head.weight._post_accumulate_grad_hooks'"),
        (Watched, not_undone, "kept: undone forwards: changed at 'head'"),
        (Configured, configured, "kept: undone configurations: changed at ''"),
    ],
)
def test_a_change_of_the_model_that_undo_leaves_is_reported(build, rule, reported, monkeypatch):
    batch = images(6) if build is Convolutional else vectors(6)
    assert verified(build, batch, HEAD, loss_fn=cross_entropy, steps=1).passed
    monkeypatch.setitem(RULES, Checkpoint, rule)
    found = verified(build, batch, HEAD, loss_fn=cross_entropy, steps=1)
    assert reported in map(str, found.failures)


def draws_one_more(step) -> None:
    PLAIN_UPDATE(step)
    torch.rand(1)


def steps_on_infinity(step) -> None:
    step.scaler.unscale_(step.optimizer)
    step.optimizer.step()
    step.scaler.update()
    step.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("update", "decisions", "kind"),
    [
        (draws_one_more, (), "random"),
        (steps_on_infinity, (Precision(dtype="fp16"),), "parameter"),
    ],
)
def test_what_only_others_or_a_later_step_would_notice_is_caught(update, decisions, kind, monkeypatch):
    options = {"loss_fn": cross_entropy, "steps": 1}
    assert verified(Watched, vectors(6), *decisions, **options).passed
    monkeypatch.setattr(TrainingStep, "update", update)
    found = verified(Watched, vectors(6), *decisions, **options)
    assert kind in {row.kind for row in found.failures}, str(found)


def test_a_note_says_that_no_gradient_could_overflow():
    found = verified(Watched, vectors(6), Precision(dtype="fp16"), loss_fn=lambda o, b: cross_entropy(o, b) * 1e-42)
    assert "no gradient overflows at a loss scale" in str(found)


def test_embeddings_in_8_bits_are_caught(monkeypatch):
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(eight_bit_optimizer, "keep_embeddings_in_32_bits", lambda *_: None)
    found = verified(lambda: roberta(hidden_size=64, vocab_size=80), tokens(), Optimizer(), steps=1)
    assert {row.kind for row in found.failures} == {"embedding"}


def test_structures_differ_where_one_has_more():
    model = seeded(Perceptron)
    before = identity_facts(model)
    model.register_buffer("more", torch.zeros(()))
    found = difference(before, identity_facts(model))
    assert found.pop("state_dict") == "changed at 'more'"
    assert set(found.values()) == {""}


# ---- odd models that train alike ------------------------------------------------------------------------------------


class Writing(Perceptron):
    """Writes to its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(0.9))


class Settling(Perceptron):
    """A model that creates its modules in the first forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layers[0].eval()
        return super().forward(x)


class Normalized(nn.Module):
    """A model whose weights are computed by hooks and by parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.old = nn.utils.weight_norm(nn.Linear(16, 16))
        self.new = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(16, 16))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.orthogonal(self.new(self.old(x).relu()).relu()))


class Hooked(Perceptron):
    """A model with hooks that change inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] / 2,))
        self.layers[1].register_forward_hook(lambda module, inputs, output: output * 2)
        self.layers[2].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
        self.head.weight.register_hook(lambda gradient: gradient * 3)


class Noisy(Perceptron):
    """Draws random numbers in every way that torch offers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.1 * torch.randn_like(x) + torch.empty_like(x).uniform_(-1, 3)
        x = x * torch.bernoulli(torch.full_like(x, 0.9)) * torch.empty_like(x).bernoulli_(0.8)
        return super().forward(x * torch.rand(len(x), 1) + torch.empty(len(x), 1).normal_(std=0.1))


class Partly(nn.Module):
    """A tied weight, a layer called twice, one without gradients, one never called, and its own random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 16)
        self.layer, self.teacher, self.unused = (nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.layer(self.embedding((x * 4).long() % 16).mean(1)).relu())
        with torch.no_grad():
            goal = self.teacher(x)
        return self.head((x - goal) * (torch.rand(x.shape, generator=self.generator) > 0.3))


ODD = {
    "writing to its input": (Writing, (Checkpoint(modules=("layers.0",)),)),
    "writing to its input, in micro-batches": (Writing, (UNEVEN,)),
    "set up by its first step": (Settling, (HEAD,)),
    "made weights": (Normalized, (Checkpoint(modules=("old", "new", "orthogonal")), UNEVEN)),
    "hooks": (Hooked, (Checkpoint(modules=("layers.1", "layers.2", "layers.3")), UNEVEN)),
    "random numbers": (Noisy, (UNEVEN,)),
    "partly trained": (Partly, (Checkpoint(modules=("layer", "teacher")), UNEVEN)),
    "partly trained, step in backward": (Partly, (StepInBackward(),)),
}


@pytest.mark.parametrize("case", ODD)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_odd_models_that_train_alike_pass(case):
    build, decisions = ODD[case]
    batch = vectors(6)
    before = batch[0].clone()
    found = verified(build, batch, *decisions, loss_fn=cross_entropy, optimizer="sgd-momentum")
    assert found.passed, str(found)
    assert torch.equal(batch[0], before)


def test_gradients_of_several_dtypes_are_clipped_alike():
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.waves = nn.Parameter(torch.randn(16, 8, dtype=torch.cfloat))
            self.wide, self.head = nn.Linear(8, 8).double(), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.wide((x.to(self.waves.dtype) @ self.waves).abs().double()).float())

    found = verified(Several, vectors(6), HEAD, loss_fn=cross_entropy, max_grad_norm=0.1)
    assert found.passed, str(found)


def test_a_sparse_gradient_with_momentum_passes():
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(20, 4, sparse=True)
            self.head = nn.Linear(4, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.bag(ids))

    batch = (torch.arange(12).view(6, 2) % 5, torch.arange(6) % 3)
    found = verified(Bag, batch, UNEVEN, loss_fn=cross_entropy, optimizer="sgd-momentum", max_grad_norm=0.1)
    assert found.passed, str(found)
    states = [row for row in found.rows if row.comparison == "in double" and row.kind == "state"]
    assert "bag.weight.momentum_buffer" in {row.name for row in states}
