"""Sparse gradients stay sparse, add up duplicates, and are refused if the optimizer does not support them."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

import planner
from planner.errors import DecisionError, WorkloadError
from planner.plan_types.decisions import Accumulation, Optimizer, Precision, StepInBackward
from planner.rewrite import source
from tests.support.training import cross_entropy, plan_for, rewritten, seeded, train, verified

UNEVEN = Accumulation(micro_batch_size=4, micro_batches=2)
"""Splits batches of 6 samples into 4 and 2."""


class Words(nn.Module):
    """A model with sparse gradients only, with rows that repeat within a sample and across micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 4, sparse=True)
        self.context = nn.Embedding(3, 4, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nld,kd->nk", self.embedding(ids), self.context(torch.arange(3)))


class Mixed(nn.Module):
    """A model with sparse and dense gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(20, 4, sparse=True)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


def words() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(18).view(6, 3) % 5, torch.arange(6) % 3


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def sparse_adam(parameters) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(list(parameters))


TAKING = {
    "SGD": (Mixed, sgd),
    "SGD with momentum": (Mixed, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "Adagrad": (Mixed, functools.partial(torch.optim.Adagrad, lr=0.1)),
    "SparseAdam": (Words, sparse_adam),
}


@pytest.mark.parametrize("case", TAKING)
@pytest.mark.parametrize(
    "decisions", [(UNEVEN,), (StepInBackward(),), (Precision(dtype="fp16"), UNEVEN)], ids=["parts", "backward", "fp16"]
)
def test_where_an_optimizer_takes_them_training_is_the_same(case, decisions):
    build, optimizer = TAKING[case]
    options = {} if StepInBackward() in decisions else {"max_grad_norm": 0.1}
    found = verified(build, words(), *decisions, loss_fn=cross_entropy, optimizer=optimizer, steps=2, **options)
    assert found.passed, str(found)


@pytest.mark.parametrize("build", [Mixed, Words])
@pytest.mark.parametrize(
    "decisions", [(), (UNEVEN,), (Precision(dtype="fp16"), UNEVEN)], ids=["whole", "parts", "fp16"]
)
def test_they_stay_sparse_and_are_clipped_by_the_norm_of_what_they_add_up_to(build, decisions):
    model, batch = seeded(build).double() if len(decisions) < 2 else seeded(build), words()
    dense = copy.deepcopy(model)
    for module in dense.modules():
        if hasattr(module, "sparse"):
            module.sparse = False
    options = {"batch": batch, "loss_fn": cross_entropy, "optimizer": sgd}
    _, plain = train(rewritten(dense, **options), [batch])
    whole = torch.cat([gradient.flatten() for gradient in plain[0].values()]).norm()
    _, found = train(rewritten(model, *decisions, max_grad_norm=whole.item() / 2, **options), [batch])
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if len(decisions) < 2 else {"rtol": 2e-2, "atol": 1e-3}
    for name, gradient in found[0].items():
        assert gradient.is_sparse == (name not in ("head.weight", "head.bias"))
        torch.testing.assert_close(gradient.to_dense(), plain[0][name] / 2, **tolerance)


def test_a_file_clips_them_to_the_same_bits():
    live, in_file, batch = seeded(Mixed), seeded(Mixed), words()
    rewritten(live, UNEVEN, batch=batch, loss_fn=cross_entropy, optimizer=sgd, max_grad_norm=0.01).step(batch)
    file: dict = {}
    plan = plan_for(in_file, batch, UNEVEN, loss_fn=cross_entropy, optimizer="sgd")
    exec(compile(source(plan), "train_step.py", "exec"), file)
    options = {"loss_fn": cross_entropy, "loss_terms": file["samples_only"], "max_grad_norm": 0.01}
    file["training_step"](file["rewrite"](in_file), sgd(in_file.parameters()), batch, **options)
    assert all(torch.equal(a, b) for a, b in zip(live.parameters(), in_file.parameters(), strict=True))


REFUSED = {
    "AdamW": (Mixed, torch.optim.AdamW, "AdamW does not support sparse gradients, and 'embedding.weight' has a sparse"),
    "RMSprop": (Words, torch.optim.RMSprop, "RMSprop does not support sparse gradients, and 'embedding.weight' has"),
    "weight decay": (
        Mixed, functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.1),
        "SGD does not support sparse gradients together with weight_decay, and 'embedding.weight'",
    ),
    "SparseAdam": (Mixed, sparse_adam, "SparseAdam does not support dense gradients, and 'head.weight' has a dense"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("decisions", [(), (UNEVEN,), (Precision(dtype="fp16"),)], ids=["whole", "parts", "fp16"])
def test_where_it_does_not_it_is_refused_by_name_before_anything_is_trained(case, decisions):
    build, optimizer, message = REFUSED[case]
    model = seeded(build)
    before = copy.deepcopy(model.state_dict())
    result = rewritten(model, *decisions, batch=words(), loss_fn=cross_entropy, optimizer=optimizer)
    with pytest.raises(WorkloadError, match=message):
        result.step(words())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_in_backward_and_in_8_bits_it_is_refused_when_applied():
    options = {"batch": words(), "loss_fn": cross_entropy, "optimizer": torch.optim.AdamW}
    with pytest.raises(DecisionError, match="AdamW does not support sparse gradients, which 'embedding' produces"):
        rewritten(seeded(Mixed), StepInBackward(), **options)
    with pytest.raises(DecisionError, match="adamw8bit does not support sparse gradients, which 'embedding' produces"):
        rewritten(seeded(Mixed), Optimizer(), **options)


def test_an_optimizer_that_cannot_take_them_is_refused_when_it_is_planned():
    with pytest.raises(WorkloadError, match=r"AdamW does not support sparse gradients, and 'embedding.weight' has"):
        planner.plan(seeded(Mixed), words(), vram=None, loss_fn=cross_entropy, optimizer="adamw", gpu="bare")


def test_a_tied_weight_whose_gradient_is_dense_may_be_trained_by_any():
    class Tied(Mixed):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) + self.embedding.weight.sum()

    result = rewritten(seeded(Tied), batch=words(), loss_fn=cross_entropy, optimizer=torch.optim.AdamW)
    _, gradients = train(result, [words()])
    assert not gradients[0]["embedding.weight"].is_sparse
