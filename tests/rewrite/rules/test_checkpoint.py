"""Checkpointing changes the memory of a step, and no bit of its result."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from planner.errors import DecisionError
from planner.plan_types.recompute_decisions import Checkpoint, Replay
from planner.rewrite.portable import replay_tape
from planner.rewrite.rules import checkpoint
from tests.support.training import (
    Convolutional,
    Perceptron,
    cross_entropy,
    differences,
    gpt2,
    images,
    largest_relative_error,
    rewritten,
    roberta,
    seeded,
    tokens,
    train,
    vectors,
)

TEN_IMAGES = [images(seed=seed) for seed in range(10)]


@pytest.mark.parametrize("momentum", [0.1, None], ids=["momentum", "cumulative average"])
@pytest.mark.parametrize("modules", [("twice",), ("first", "twice", "head"), ("",)], ids=" ".join)
def test_convolutions_with_dropout_and_batch_norm_train_to_the_same_bits(modules, momentum):
    model = seeded(Convolutional, momentum)
    assert differences(model, Checkpoint(modules=modules), batches=TEN_IMAGES, loss_fn=cross_entropy) == []


def test_instance_norm_that_tracks_statistics_trains_to_the_same_bits():
    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6, track_running_stats=True), Pool()))
    batches = [images(samples=3, seed=seed) for seed in range(10)]
    assert differences(model, Checkpoint(modules=("1",)), batches=batches, loss_fn=cross_entropy) == []


class Pool(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))[:, :4]


class SelfAttention(nn.Module):
    """Passes one tensor as query, key and value. `nn.MultiheadAttention` runs other ops if they are three objects."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Linear(16, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x[:, None]).tanh()
        return self.head(self.attention(hidden, hidden, value=hidden, need_weights=False)[0].sum(1).exp())


def test_a_tensor_that_is_passed_several_times_is_one_object_again_under_the_hooks_of_segments():
    model, batches = seeded(SelfAttention), [vectors(seed=seed) for seed in range(2)]
    with replay_tape.Tape((), torch.device("cpu")) as tape:
        copy.deepcopy(model)(batches[0][0])
    segment = Replay(modules=("",), stretches=((0, tape.count),), kept=((),))
    decisions = Checkpoint(modules=("attention",)), segment
    assert differences(model, *decisions, batches=batches, loss_fn=cross_entropy) == []


@pytest.mark.parametrize("early_stop", [True, False])
def test_statistics_are_restored_whether_or_not_the_recompute_stops_early(early_stop):
    model = seeded(Convolutional)
    result = rewritten(model, Checkpoint(modules=("twice",)), batch=TEN_IMAGES[0], loss_fn=cross_entropy)
    with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
        result.step(TEN_IMAGES[0])
    assert model.twice.norm.momentum == 0.1
    assert model.twice.norm.num_batches_tracked.item() == 2


def test_statistics_are_restored_when_the_recompute_raises():
    model = seeded(Convolutional)
    with pytest.raises(KeyError), checkpoint.statistics_kept(model):
        assert model.twice.norm.momentum == 0.0
        raise KeyError
    assert model.twice.norm.momentum == 0.1
    assert model.twice.norm.num_batches_tracked.item() == 0


@pytest.mark.parametrize(
    ("build", "layers"),
    [(roberta, "roberta.encoder.layer.{}"), (gpt2, "transformer.h.{}")],
    ids=["roberta", "gpt2"],
)
def test_transformers_with_dropout_train_to_the_same_bits(build, layers):
    decision = Checkpoint(modules=tuple(layers.format(i) for i in range(2)))
    batches = [tokens(seed=seed) for seed in range(10)]
    assert differences(seeded(build, use_cache=False), decision, batches=batches) == []


def test_a_cache_that_was_on_costs_no_more_than_rounding():
    batches = [tokens(seed=seed) for seed in range(2)]
    decision = Checkpoint(modules=("transformer.h.0",))
    assert largest_relative_error(seeded(gpt2, use_cache=True), decision, batches=batches) < 1e-5


def test_the_module_is_recomputed_once_a_call():
    model = seeded(Perceptron)
    calls = []
    model.layers[1][0].register_forward_hook(lambda *_: calls.append("layer"))
    result = rewritten(model, Checkpoint(modules=("layers.1",)), batch=vectors(), loss_fn=cross_entropy)
    result.step(vectors())
    assert calls == ["layer", "layer"]
    with torch.no_grad():
        model(vectors()[0])
    assert len(calls) == 3


def test_hooks_on_the_checkpointed_module_itself_run_once():
    model = seeded(Perceptron)
    calls = []
    model.layers[1].register_forward_hook(lambda *_: calls.append("layer"))
    rewritten(model, Checkpoint(modules=("layers.1",)), batch=vectors(), loss_fn=cross_entropy).step(vectors())
    assert calls == ["layer"]


def test_activations_inside_are_not_kept():
    kept = []
    for decisions in ((), (Checkpoint(modules=("layers.0", "layers.1", "layers.2")),)):
        model = seeded(Perceptron)
        rewritten(model, *decisions, batch=vectors(), loss_fn=cross_entropy)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            model(vectors()[0])
        kept.append(len(saved))
    assert kept[1] < kept[0]


def test_a_deep_copy_trains_its_own_weights():
    model = seeded(Perceptron)
    rewritten(model, Checkpoint(modules=("layers.0",)), batch=vectors(), loss_fn=cross_entropy)
    other = copy.deepcopy(model)
    other(vectors()[0]).sum().backward()
    assert model.layers[0][0].weight.grad is None
    assert other.layers[0][0].weight.grad is not None


def test_a_checkpointed_model_can_be_pickled():
    model = seeded(Perceptron, dropout=0.0)
    rewritten(model, Checkpoint(modules=("layers.0",)), batch=vectors(), loss_fn=cross_entropy)
    other = pickle.loads(pickle.dumps(model))
    assert torch.equal(other(vectors()[0]), model(vectors()[0]))


def test_the_cache_of_keys_and_values_is_off_until_undo():
    model = seeded(gpt2)
    assert model.config.use_cache is True
    result = rewritten(model, Checkpoint(modules=("transformer.h.0",)), batch=tokens())
    assert model.config.use_cache is False
    result.undo()
    assert model.config.use_cache is True


def test_a_forward_that_was_already_replaced_on_the_instance_is_kept_and_comes_back():
    model = seeded(Perceptron, dropout=0.0)
    own = torch.zeros_like
    model.layers[1].forward = own
    result = rewritten(model, Checkpoint(modules=("layers.1",)), batch=vectors(), loss_fn=cross_entropy)
    assert torch.equal(model.layers[1](torch.ones(2, 16)), torch.zeros(2, 16))
    result.undo()
    assert model.layers[1].forward is own


def test_a_module_under_two_names_is_wrapped_once():
    shared = nn.Linear(16, 16)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    batches = [vectors(seed=seed) for seed in range(3)]
    assert differences(model, Checkpoint(modules=("0", "2")), batches=batches, loss_fn=cross_entropy) == []


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (("layers.9",), "'layers.9'.*'layers' holds 0, 1, 2, 3"),
        (("layers", "layers.1"), "'layers' and 'layers.1' inside it"),
        (("layers.1", ""), "'' and 'layers.1' inside it"),
    ],
)
def test_unknown_and_nested_modules_are_refused_by_name(modules, message):
    model = seeded(Perceptron)
    with pytest.raises(DecisionError, match=message):
        rewritten(model, Checkpoint(modules=modules), batch=vectors(), loss_fn=cross_entropy)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_container_that_is_never_called_is_refused():
    model = nn.Module()
    model.parts = nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(DecisionError, match="'parts', a ModuleList, which has no forward"):
        rewritten(model, Checkpoint(modules=("parts",)), batch=vectors(), loss_fn=cross_entropy)


def test_a_missing_protection_of_statistics_would_be_seen(monkeypatch):
    monkeypatch.setattr(checkpoint, "statistics_kept", lambda module: checkpoint.contextlib.nullcontext())
    found = differences(
        seeded(Convolutional), Checkpoint(modules=("twice",)), batches=TEN_IMAGES, loss_fn=cross_entropy
    )
    assert "twice.norm.num_batches_tracked" in found
    assert "twice.norm.running_mean" in found


def test_other_dropout_masks_in_the_recompute_would_be_seen(monkeypatch):
    plain = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr(
        torch.utils.checkpoint, "checkpoint", lambda *a, **k: plain(*a, **{**k, "preserve_rng_state": False})
    )
    result = rewritten(seeded(Perceptron), Checkpoint(modules=("layers.1",)), batch=vectors(), loss_fn=cross_entropy)
    with pytest.raises(DecisionError, match=r"other values than the forward in module 'layers\.1'"):
        result.step(vectors())
    result.step.observers = ()
    batches = [vectors(seed=seed) for seed in range(2)]
    _, gradients = train(result, batches)
    _, plain = train(rewritten(seeded(Perceptron), batch=batches[0], loss_fn=cross_entropy), batches)
    assert any(not torch.equal(gradients[0][name], gradient) for name, gradient in plain[0].items())


def test_train_reports_one_gradient_set_a_step():
    result = rewritten(seeded(Perceptron), batch=vectors(), loss_fn=cross_entropy)
    losses, gradients = train(result, [vectors(seed=seed) for seed in range(3)])
    assert len(losses) == len(gradients) == 3
