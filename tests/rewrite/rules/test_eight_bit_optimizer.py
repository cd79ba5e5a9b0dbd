"""8-bit AdamW has the groups and hyperparameters of the optimizer that it replaces."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from planner.errors import DecisionError, WorkloadError
from planner.plan_types.decisions import Optimizer
from tests.support.training import Perceptron, cross_entropy, rewritten, roberta, seeded, tokens, train, vectors

bitsandbytes = pytest.importorskip("bitsandbytes")


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3)


def test_the_loss_falls_and_state_is_in_eight_bits():
    model = seeded(roberta, hidden_size=64, vocab_size=80)
    result = rewritten(model, Optimizer(), batch=tokens(), optimizer=adamw)
    losses, _ = train(result, [tokens()] * 10)
    assert losses[-1] < losses[0] - 0.2
    state = {name: result.optimizer.state[p] for name, p in model.named_parameters()}
    query = state["roberta.encoder.layer.0.attention.self.query.weight"]
    assert query["state1"].dtype == torch.uint8
    assert state["roberta.embeddings.word_embeddings.weight"]["state1"].dtype == torch.float32
    assert state["lm_head.dense.bias"]["state1"].dtype == torch.float32


def test_overrides_for_embeddings_stay_out_of_the_process():
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    before = (list(manager.module_weight_config_triple), dict(manager.pid2config), dict(manager.index2config))
    result = rewritten(seeded(roberta), Optimizer(), batch=tokens(), optimizer=adamw)
    result.step(tokens())
    assert (manager.module_weight_config_triple, manager.pid2config, manager.index2config) == before


def test_groups_and_hyperparameters_are_taken_over():
    model = seeded(Perceptron)
    given = torch.optim.AdamW(
        [
            {"params": list(model.layers.parameters()), "lr": 1e-4, "weight_decay": 0.3, "initial_lr": 5e-4},
            {"params": list(model.head.parameters()), "betas": (0.8, 0.9), "name": "head"},
        ],
        lr=2e-3,
        eps=1e-6,
    )
    result = rewritten(model, Optimizer(), batch=vectors(), loss_fn=cross_entropy, optimizer=given)
    first, second = result.optimizer.param_groups
    assert (first["lr"], first["weight_decay"], first["eps"], first["initial_lr"]) == (1e-4, 0.3, 1e-6, 5e-4)
    assert (second["lr"], second["betas"], second["weight_decay"], second["name"]) == (2e-3, (0.8, 0.9), 0.01, "head")
    pairs = zip(given.param_groups, result.optimizer.param_groups, strict=True)
    assert all(a is b for old, new in pairs for a, b in zip(old["params"], new["params"], strict=True))


def test_small_tensors_train_as_plain_adamw_does():
    options = {"batch": vectors(), "loss_fn": cross_entropy, "optimizer": adamw}
    batches = [vectors(seed=seed) for seed in range(10)]
    losses, _ = train(rewritten(seeded(Perceptron), **options), batches)
    other_losses, _ = train(rewritten(seeded(Perceptron), Optimizer(), **options), batches)
    torch.testing.assert_close(torch.stack(losses), torch.stack(other_losses), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("sgd", "replaces AdamW or Adam, not SGD"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "has no amsgrad, which parameter group 0"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "parameter group 0 of Adam has weight_decay 0.1"),
    ],
)
def test_optimizers_that_would_become_another_one_are_refused(optimizer, message):
    with pytest.raises(DecisionError, match=message):
        rewritten(seeded(Perceptron), Optimizer(), batch=vectors(), loss_fn=cross_entropy, optimizer=optimizer)


def test_an_optimizer_with_state_is_refused():
    model = seeded(Perceptron)
    given = adamw(model.parameters())
    rewritten(model, batch=vectors(), loss_fn=cross_entropy, optimizer=given).step(vectors())
    with pytest.raises(DecisionError, match="state of AdamW, which has already taken a step"):
        rewritten(model, Optimizer(), batch=vectors(), loss_fn=cross_entropy, optimizer=given)


def test_without_bitsandbytes_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(DecisionError, match="pip install bitsandbytes"):
        rewritten(seeded(Perceptron), Optimizer(), batch=vectors(), loss_fn=cross_entropy, optimizer=adamw)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "sgd-momentum", "adagrad", "rmsprop"])
def test_every_named_optimizer_trains(name):
    result = rewritten(seeded(Perceptron), batch=vectors(), loss_fn=cross_entropy, optimizer=name)
    losses, _ = train(result, [vectors()] * 3)
    assert all(torch.isfinite(loss) for loss in losses)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("lion", "'lion' is unknown by name: choose one of adamw"),
        (lambda parameters: None, "returned a NoneType"),
        (torch.optim.SGD(nn.Linear(2, 2).parameters()), "has none of the parameters of Perceptron"),
        (torch.optim.LBFGS, "LBFGS runs the model again inside its own step"),
    ],
)
def test_unusable_optimizers_are_refused(optimizer, message):
    with pytest.raises(WorkloadError, match=message):
        rewritten(seeded(Perceptron), batch=vectors(), loss_fn=cross_entropy, optimizer=optimizer)
