"""Autocast with fp32 weights, and frozen prefixes."""

from __future__ import annotations

import copy

import pytest
import torch

from planner.errors import DecisionError
from planner.plan_types.decisions import Accumulation, Freeze, Precision
from planner.plan_types.recompute_decisions import Checkpoint
from planner.rewrite.step import TrainingStep
from tests.support.training import (
    Perceptron,
    cross_entropy,
    differences,
    largest_relative_error,
    rewritten,
    roberta,
    seeded,
    tokens,
    train,
    vectors,
)

BF16 = Precision(dtype="bf16")
FP16 = Precision(dtype="fp16")


@pytest.mark.parametrize("decision", [BF16, FP16], ids=["bf16", "fp16"])
def test_the_loss_falls_and_weights_stay_fp32(decision):
    model = seeded(roberta)
    result = rewritten(model, decision, batch=tokens(), optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3))
    losses, gradients = train(result, [tokens()] * 10)
    assert losses[-1] < losses[0] - 0.2
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {gradient.dtype for gradient in gradients[0].values()} == {torch.float32}


def test_matrix_products_run_in_the_lower_precision():
    model = seeded(Perceptron)
    seen = []
    model.layers[0][0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    rewritten(model, BF16, batch=vectors(), loss_fn=cross_entropy).step(vectors())
    assert seen == [torch.bfloat16]


def test_backward_and_update_run_outside_of_autocast():
    """Autocast would cast in them as well, and keep its casts of the weights until they are done."""
    model, seen = seeded(Perceptron), []
    result = rewritten(
        model, BF16, Accumulation(micro_batch_size=4, micro_batches=2), batch=vectors(), loss_fn=cross_entropy
    )
    model.layers[0][0].weight.register_hook(lambda gradient: seen.append(torch.is_autocast_enabled("cpu")))
    result.optimizer.register_step_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    result.step(vectors())
    assert seen == [False, False, False]


def test_checkpointing_under_autocast_trains_to_the_same_bits_as_autocast_alone():
    checkpoint = Checkpoint(modules=("layers.0", "layers.2"))
    batches = [vectors(seed=seed) for seed in range(10)]
    for precision in (BF16, FP16):
        alone = rewritten(seeded(Perceptron), precision, batch=batches[0], loss_fn=cross_entropy)
        both = rewritten(seeded(Perceptron), precision, checkpoint, batch=batches[0], loss_fn=cross_entropy)
        (losses, _), (other_losses, _) = train(alone, batches), train(both, batches)
        assert all(torch.equal(a, b) for a, b in zip(losses, other_losses, strict=True))


def test_gradients_are_clipped_after_unscaling_and_not_before():
    options = {"batch": vectors(), "loss_fn": cross_entropy, "max_grad_norm": 0.01}
    for decisions in ((), (FP16,), (FP16, Accumulation(micro_batch_size=3, micro_batches=3))):
        result = rewritten(seeded(Perceptron), *decisions, **options)
        _, gradients = train(result, [vectors()])
        norm = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients[0].values()]))
        assert norm.item() == pytest.approx(0.01, rel=1e-3)


def test_an_overflow_skips_the_step_and_lowers_the_scale():
    model = seeded(Perceptron)
    before = copy.deepcopy(model.state_dict())
    result = rewritten(model, FP16, batch=vectors(), loss_fn=lambda o, b: cross_entropy(o, b) * 1e30)
    scale = result.step(vectors()) is not None and result.step.scaler.get_scale()
    assert scale < 2.0**16
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_half_precision_weights_are_refused_by_name():
    with pytest.raises(DecisionError, match=r"'layers.0.0.weight' is float16: load the model in fp32"):
        rewritten(seeded(Perceptron).half(), FP16, batch=vectors(), loss_fn=cross_entropy)


def test_half_precision_weights_that_are_frozen_are_allowed():
    model = seeded(Perceptron)
    model.layers.half()
    rewritten(model, Freeze(modules=("layers",)), BF16, batch=vectors(), loss_fn=cross_entropy)


def test_a_frozen_prefix_is_not_trained_and_the_rest_gets_the_same_gradients():
    model = seeded(Perceptron)
    decision = Freeze(modules=("layers.0", "layers.1"))
    before = copy.deepcopy(model.state_dict())
    batches = [vectors(seed=seed) for seed in range(10)]
    result = rewritten(model, decision, batch=batches[0], loss_fn=cross_entropy)
    _, gradients = train(result, batches)
    _, all_gradients = train(rewritten(seeded(Perceptron), batch=batches[0], loss_fn=cross_entropy), batches[:1])
    frozen = {name for name in before if name.startswith(("layers.0.", "layers.1."))}
    assert set(gradients[0]) == set(before) - frozen
    assert all(torch.equal(gradients[0][name], all_gradients[0][name]) for name in gradients[0])
    after = model.state_dict()
    assert {name for name in before if torch.equal(before[name], after[name])} == frozen


def test_freezing_and_checkpointing_behind_it_train_to_the_same_bits_as_freezing_alone():
    batches = [vectors(seed=seed) for seed in range(10)]
    freeze, checkpoint = Freeze(modules=("layers.0",)), Checkpoint(modules=("layers.0", "layers.1"))
    frozen = seeded(Perceptron)
    frozen.layers[0].requires_grad_(False)
    assert differences(frozen, freeze, checkpoint, batches=batches, loss_fn=cross_entropy) == []


def test_every_exact_decision_together_stays_at_the_bound_of_accumulation():
    batches = [tokens(seed=seed) for seed in range(10)]
    model = seeded(roberta, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).double()
    checkpoint = Checkpoint(modules=("roberta.encoder.layer.0", "roberta.encoder.layer.1", "lm_head"))
    decisions = (checkpoint, Accumulation(micro_batch_size=4, micro_batches=2))
    assert largest_relative_error(model, *decisions, batches=batches, max_grad_norm=0.5) < 1e-12


def test_flags_that_were_off_before_stay_off_after_undo():
    model = seeded(Perceptron)
    model.layers[0][0].bias.requires_grad_(False)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    result = rewritten(model, Freeze(modules=("layers.0", "layers.1")), batch=vectors(), loss_fn=cross_entropy)
    result.undo()
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags


def test_a_gradient_that_the_optimizer_would_still_apply_is_refused():
    model = seeded(Perceptron)
    model(vectors()[0]).sum().backward()
    with pytest.raises(DecisionError, match=r"'layers.1.0.weight' is to be frozen.*zero_grad"):
        rewritten(model, Freeze(modules=("layers.1",)), batch=vectors(), loss_fn=cross_entropy)


def test_freezing_everything_is_refused():
    model = seeded(Perceptron)
    with pytest.raises(DecisionError, match="no parameter of Perceptron requires a gradient"):
        rewritten(model, Freeze(modules=("",)), batch=vectors(), loss_fn=cross_entropy)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_scaling_is_planned_only_for_fp16():
    step = TrainingStep
    for decision, scaler in ((BF16, type(None)), (FP16, torch.amp.GradScaler)):
        result = rewritten(seeded(Perceptron), decision, batch=vectors(), loss_fn=cross_entropy)
        assert isinstance(result.step, step)
        assert isinstance(result.step.scaler, scaler)
