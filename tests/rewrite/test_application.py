"""A plan is applied only to the model it was made for, completely or not at all, and can be undone."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner.errors import DecisionError, PlanFileError, WorkloadError
from planner.plan_types.decisions import Accumulation, Decision, Freeze, Precision, Shard
from planner.plan_types.fingerprint import fingerprint
from planner.plan_types.recompute_decisions import Checkpoint
from planner.rewrite import apply
from planner.rewrite.portable.loss_and_clipping import clip_gradients
from planner.rewrite.rehearse import rehearsed_sizes
from planner.rewrite.step_observer import StepObserver
from planner.workload.workload import workload
from tests.support.training import (
    Convolutional,
    Perceptron,
    cross_entropy,
    gpt2,
    images,
    plan_for,
    rewritten,
    roberta,
    seeded,
    tokens,
    train,
    vectors,
)

EVERYTHING = (
    Freeze(modules=("first",)),
    Precision(dtype="bf16"),
    Accumulation(micro_batch_size=3, micro_batches=2),
    Checkpoint(modules=("first", "twice")),
)


def state_of(model: nn.Module) -> dict:
    return {
        "class": type(model),
        "keys": list(model.state_dict()),
        "parameters": {name: (id(p), p.requires_grad) for name, p in model.named_parameters()},
        "own": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "forward": {name: module.forward for name, module in model.named_modules()},
        "training": {name: module.training for name, module in model.named_modules()},
    }


def test_applying_keeps_the_model_and_undo_restores_it():
    model = seeded(Convolutional)
    model.head.eval()
    before = state_of(model)
    plan = plan_for(model, images(), *EVERYTHING, loss_fn=cross_entropy)
    result = apply(plan, model, loss_fn=cross_entropy)
    during = state_of(model)
    assert result.module is model
    assert [during[key] == before[key] for key in ("class", "keys", "training")] == [True] * 3
    assert {n: p[0] for n, p in during["parameters"].items()} == {n: p[0] for n, p in before["parameters"].items()}
    assert during["forward"] != before["forward"]
    result.step(images())
    result.undo()
    assert state_of(model) == before
    result.undo()
    assert state_of(model) == before
    with pytest.raises(DecisionError, match="was undone"):
        result.step(images())


def test_undo_refuses_to_drop_what_was_replaced_later():
    model = seeded(Convolutional)
    result = rewritten(model, *EVERYTHING, batch=images(), loss_fn=cross_entropy)
    planned = model.twice.forward
    model.twice.forward = lambda *inputs, **more: planned(*inputs, **more)
    during = state_of(model)
    with pytest.raises(DecisionError, match="forward of 'twice' was replaced"):
        result.undo()
    assert state_of(model) == during
    model.twice.forward = planned
    result.undo()
    assert "forward" not in vars(model.twice)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_rewritten_model_and_its_step_refuse_to_be_copied_and_the_module_does_not(copied):
    model, batch = seeded(Perceptron), vectors()
    result = rewritten(model, Checkpoint(modules=("layers.0",)), batch=batch, loss_fn=cross_entropy)
    for whole in (result, result.step):
        with pytest.raises(TypeError, match=f"{type(whole).__name__} objects cannot be copied or pickled"):
            copied(whole)
    assert copied(result.module)


def test_a_failure_midway_leaves_the_model_as_it_was():
    model = seeded(gpt2)
    before = state_of(model)
    decisions = (Freeze(modules=("transformer.wpe",)), Checkpoint(modules=("transformer.h.0", "transformer.h.7")))
    with pytest.raises(DecisionError, match=r"transformer.h.7"):
        rewritten(model, *decisions, batch=tokens())
    assert state_of(model) == before
    assert model.config.use_cache is True


def test_rules_apply_in_their_own_order_whatever_the_plan_lists():
    model = seeded(Convolutional)
    model.first.half()
    rewritten(model, *reversed(EVERYTHING), batch=images(), loss_fn=cross_entropy)
    assert not model.first[0].weight.requires_grad


def test_two_decisions_of_a_kind_are_refused():
    decisions = (Checkpoint(modules=("first",)), Checkpoint(modules=("twice",)))
    with pytest.raises(DecisionError, match="two decisions of kind checkpoint: 'activation checkpointing: first'"):
        rewritten(seeded(Convolutional), *decisions, batch=images(), loss_fn=cross_entropy)


def test_a_decision_without_a_rule_is_refused():
    class Unknown(Decision):
        kind = "unknown"

    with pytest.raises(DecisionError, match="Unknown has no rule that carries it out"):
        rewritten(seeded(Convolutional), Unknown(), batch=images(), loss_fn=cross_entropy)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: Convolutional(), "it is a Convolutional, the plan is for a Perceptron"),
        (lambda: Perceptron(depth=5), "it has 1,411 parameters, the planned Perceptron has 1,139"),
        (lambda: Perceptron().half(), "a name, shape or dtype .* differs .*float16"),
    ],
)
def test_a_plan_for_another_model_is_refused(other, message):
    plan = plan_for(Perceptron(), vectors(), loss_fn=cross_entropy)
    with pytest.raises(PlanFileError, match=message):
        apply(plan, other(), loss_fn=cross_entropy)


def test_the_fingerprint_sees_names_shapes_dtypes_buffers_and_ties_but_not_values():
    model = seeded(Perceptron)
    same = Perceptron()
    same.requires_grad_(False)
    assert fingerprint(same) == fingerprint(model)
    assert fingerprint(Perceptron().to("meta")) == fingerprint(model)
    others = [Perceptron(depth=5), Perceptron(width=8), Perceptron().double(), Convolutional(), Convolutional(None)]
    tied = Perceptron()
    tied.layers[1][0].weight = tied.layers[0][0].weight
    buffered = Perceptron()
    buffered.register_buffer("scale", torch.zeros(1))
    prints = [fingerprint(module) for module in (model, tied, buffered, *others[:4])]
    assert len(set(prints)) == len(prints)


def test_a_loss_function_must_be_given_exactly_when_planned():
    model = seeded(Perceptron)
    with pytest.raises(WorkloadError, match="made with a loss function: pass it as loss_fn"):
        apply(plan_for(model, vectors(), loss_fn=cross_entropy), model)
    with pytest.raises(WorkloadError, match="made without a loss function: leave loss_fn out"):
        apply(plan_for(model, vectors()), model, loss_fn=cross_entropy)


def test_the_planned_optimizer_is_taken_by_name_and_must_be_given_otherwise():
    model = seeded(Perceptron)
    result = apply(plan_for(model, vectors(), loss_fn=cross_entropy, optimizer="sgd"), model, loss_fn=cross_entropy)
    assert type(result.optimizer) is torch.optim.SGD
    plan = plan_for(model, vectors(), loss_fn=cross_entropy, optimizer="mine.Lion")
    with pytest.raises(WorkloadError, match=r"optimizer 'mine.Lion', which cannot be created by name: give optimizer"):
        apply(plan, model, loss_fn=cross_entropy)


def test_without_decisions_the_step_is_the_plain_loop_to_the_bit():
    model, other = seeded(roberta), seeded(roberta)
    optimizer = torch.optim.AdamW(other.parameters())
    losses, _ = train(rewritten(model, batch=tokens(), optimizer="adamw"), [tokens(seed=s) for s in range(5)])
    torch.manual_seed(1)
    for seed, loss in enumerate(losses):
        plain = other(**tokens(seed=seed)).loss
        plain.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(plain.detach(), loss)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert loss.dim() == 0 and not loss.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_plain_step_runs_no_operation_of_its_own():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            self.names.append(str(function))
            return function(*arguments, **(options or {}))

    result = rewritten(seeded(Perceptron), batch=vectors(), loss_fn=cross_entropy, optimizer="sgd")
    batch = vectors()
    with Names() as ours:
        result.step(batch)
    model = seeded(Perceptron)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Names() as plain:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        loss.detach()
        optimizer.step()
        optimizer.zero_grad()
    assert ours.names == plain.names


def test_outputs_are_gone_before_backward():
    model = seeded(roberta)
    alive = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(context, logits):
            return logits.view_as(logits)

        @staticmethod
        def backward(context, gradient):
            alive.append(output[0]() is not None)
            return gradient

    import weakref

    output = []

    def note(module, inputs, result):
        output[:] = [weakref.ref(result)]

    model.register_forward_hook(note)
    model.lm_head.register_forward_hook(lambda module, inputs, logits: Watched.apply(logits))
    rewritten(model, batch=tokens()).step(tokens())
    assert alive == [False]


def test_sparse_gradients_accumulate_and_are_clipped():
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 4, sparse=True)
            self.head = nn.Linear(4, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(ids).mean(1))

    batch = (torch.arange(12).view(6, 2) % 5, torch.arange(6) % 3)
    decision = Accumulation(micro_batch_size=4, micro_batches=2)
    weights = []
    for decisions in ((), (decision,)):
        model = seeded(Bag)
        result = rewritten(
            model, *decisions, batch=batch, loss_fn=cross_entropy, max_grad_norm=0.05,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        )  # fmt: skip
        _, gradients = train(result, [batch])
        assert gradients[0]["embedding.weight"].is_sparse
        dense = torch.cat([gradient.to_dense().flatten() for gradient in gradients[0].values()])
        assert dense.norm().item() == pytest.approx(0.05, rel=1e-3)
        weights.append(model.embedding.weight.detach())
    torch.testing.assert_close(*weights)


def test_sparse_gradients_below_the_maximum_norm_are_left_alone():
    module = nn.Embedding(4, 2, sparse=True)
    module(torch.tensor([1, 1, 3])).sum().backward()
    before = module.weight.grad.to_dense()
    clip_gradients(module, 100.0)
    assert torch.equal(module.weight.grad.to_dense(), before)


def test_a_model_that_returns_its_loss_as_one_element_gives_a_number():
    class Loss(Perceptron):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(super().forward(x), y).view(1)

    result = rewritten(seeded(Loss), batch=vectors())
    assert result.step(vectors()).shape == ()


def test_a_plan_survives_its_file_and_applies_as_before(tmp_path):
    model = seeded(Convolutional)
    plan = plan_for(model, images(), *EVERYTHING, loss_fn=cross_entropy)
    plan.save(tmp_path / "plan.json")
    loaded = type(plan).load(tmp_path / "plan.json")
    assert loaded == dataclasses.replace(plan)
    apply(loaded, model, loss_fn=cross_entropy).step(images())


def test_the_step_runs_on_tensors_without_storage():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        decisions = (
            Precision(dtype="bf16"),
            Accumulation(micro_batch_size=4, micro_batches=2),
            Checkpoint(modules=("transformer.h.0",)),
        )
        batch = {name: torch.ones(6, 10, dtype=torch.int64) for name in ("input_ids", "attention_mask", "labels")}
        result = rewritten(gpt2(), *decisions, batch=batch, optimizer="adamw", max_grad_norm=1.0)
        assert result.step(batch).shape == ()


@pytest.mark.parametrize(
    ("size", "count", "rehearsed"),
    [(8, 2, (8, 2)), (5, 2, (5, 5)), (4, 3, (4, 4, 2)), (3, 4, (3, 3, 1)), (2, 5, (2, 2))],
)
def test_every_size_of_a_micro_batch_is_rehearsed(size, count, rehearsed):
    """A smaller last micro-batch allocates blocks of other sizes, which may need segments of their own.

    If only the last one reduces gradients over the cards, it differs from the second, too.
    """
    work = workload(seeded(Perceptron), vectors(10), loss_fn=cross_entropy)
    assert rehearsed_sizes(work, ()) == (10,)
    split = Accumulation(micro_batch_size=size, micro_batches=count)
    assert rehearsed_sizes(work, (split,)) == rehearsed
    once = Shard(way="ddp", mesh=(2,), reduces_once=True)
    of_cards = rehearsed if count == 2 or rehearsed[-1] != size else (*rehearsed, size)
    for divided, decisions in ((work, (once, split)), (dataclasses.replace(work, sharding=(once,)), (split,))):
        assert rehearsed_sizes(divided, decisions) == of_cards


def test_a_model_that_was_named_by_reference_trains_without_its_cache_as_planned():
    model = seeded(gpt2)
    result = apply(plan_for(model, tokens(), reference="gpt2/config.json"), model)
    assert model.config.use_cache is False
    result.undo()
    assert model.config.use_cache is True
    apply(plan_for(model, tokens()), model)
    assert model.config.use_cache is True


def test_any_decision_turns_the_cache_of_keys_and_values_off_until_undo():
    model = seeded(gpt2)
    result = rewritten(model, Accumulation(micro_batch_size=3, micro_batches=2), batch=tokens())
    assert model.config.use_cache is False
    result.undo()
    assert model.config.use_cache is True


def test_parameters_that_were_replaced_after_apply_are_refused_and_nothing_is_trained():
    """As fully_shard and converting wrappers do: the optimizer holds tensors that the model no longer uses."""
    model = seeded(Perceptron)
    result = apply(plan_for(model, vectors(), loss_fn=cross_entropy), model, loss_fn=cross_entropy)
    result.step(vectors())
    layer = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(DecisionError, match="1 parameters of Perceptron were replaced"):
        result.step(vectors())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_parameters_that_moved_within_the_model_or_to_another_dtype_are_still_trained():
    model = seeded(Perceptron)
    result = apply(plan_for(model, vectors(), loss_fn=cross_entropy), model, loss_fn=cross_entropy)
    layer = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", torch.nn.Identity())
    before = copy.deepcopy(model.state_dict())
    result.step(vectors())
    assert not torch.equal(before[next(name for name in before if "original" in name)], layer.weight)


def test_a_failed_step_leaves_no_gradients_behind():
    model = seeded(Perceptron)
    result = apply(plan_for(model, vectors(), loss_fn=cross_entropy), model, loss_fn=cross_entropy)

    class Refusing(StepObserver):
        def before_update(self, batch):
            raise KeyError("refused")

    result.step.observers = (Refusing(),)
    with pytest.raises(KeyError):
        result.step(vectors())
    assert all(parameter.grad is None for parameter in model.parameters())
