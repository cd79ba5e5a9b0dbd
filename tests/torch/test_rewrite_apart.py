"""The gradient of a batch is held against that of its parts, on a few samples, before anything is trained."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from rewrite_cases import Perceptron, plan_for, seeded, vectors
from torch import nn

import rewrite
from planner.decisions import Accumulation, Checkpoint, Decision, Offload, Precision, Replay
from planner.errors import DecisionError
from rewrite.rows import amounts_of_padding
from rewrite.steady_random import SteadyRandom

SAMPLES, LENGTH = 16, 24


class Speaker(nn.Module):
    """A small language model, as it is initialised: its loss is about the same for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 32)
        layers = (nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True) for _ in range(2))
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(32, 500)
        for weight in (self.embedding.weight, self.head.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(ids)))


def padded(first: int = 0) -> tuple[torch.Tensor]:
    """Samples of uneven lengths from a first one on, and padding of zeros behind."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 500, (SAMPLES, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH, (SAMPLES, 1), generator=generator)
    lengths[:first] = LENGTH
    return (ids.masked_fill(torch.arange(LENGTH) >= lengths, 0),)


def costs(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return F.cross_entropy(output.transpose(1, 2), batch[0], reduction="none")


def masked(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    mask = (batch[0] != 0).to(output.dtype)
    return (costs(output, batch) * mask).sum() / mask.sum()


def focal(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    cost = costs(output, batch)
    return ((1 - torch.exp(-cost)).square() * cost)[batch[0] != 0].mean()


def noisy_sum(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return costs(output + 0.1 * torch.randn_like(output), batch).sum() / 100


def contrastive(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    unit = F.normalize(output.mean(1))
    return -(10 * unit @ unit.T).log_softmax(1).diagonal().mean()


@torch.jit.script
def _scripted(output: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    cost = F.cross_entropy(output.transpose(1, 2), ids, reduction="none")
    mask = (ids != 0).to(output.dtype)
    return (cost * mask).sum() / mask.sum()


def scripted(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return _scripted(output, batch[0])


def each_sample(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    mask = (batch[0] != 0).to(output.dtype)
    return ((costs(output, batch) * mask).sum(1) / mask.sum(1)).mean()


def noisy_mean(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return costs(output + 0.1 * torch.randn_like(output), batch).mean()


def cancelled(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    """Whose value says little: it is near zero."""
    cost = costs(output, batch).mean(1)
    return (cost - cost.detach()).mean()


def without_gradient(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return F.kl_div(output.log_softmax(-1), output.detach().softmax(-1), reduction="batchmean")


def test_a_gradient_that_is_nothing_but_rounding_is_not_refused():
    for parts in PARTS.values():
        step_of(without_gradient, *parts).step(padded())


PARTS = {"one by one": (1, 16), "by two": (2, 8), "by eight": (8, 2), "uneven": (6, 3)}
BF16 = (Precision(dtype="bf16"),)


def step_of(loss_fn, size: int, count: int, *decisions: Decision, batch=None, build=Speaker, **options):
    model, batch = seeded(build), padded() if batch is None else batch
    split = Accumulation(micro_batch_size=size, micro_batches=count)
    plan = plan_for(model, batch, split, *decisions, loss_fn=loss_fn, optimizer="sgd")
    return rewrite.apply(plan, model, loss_fn=loss_fn, **options)


@pytest.mark.parametrize("decisions", [(), BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("loss_fn", [masked, focal, noisy_sum, contrastive, scripted])
def test_a_mean_that_no_function_tells_is_refused_where_all_samples_cost_alike(loss_fn, parts, decisions):
    result = step_of(loss_fn, *PARTS[parts], *decisions)
    before = [parameter.clone() for parameter in result.module.parameters()]
    for _ in range(2):
        with pytest.raises(DecisionError, match=r"the (gradient|loss) of \d samples comes out"):
            result.step(padded())
    assert all(torch.equal(a, b) for a, b in zip(before, result.module.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in result.module.parameters())


@pytest.mark.parametrize("decisions", [(), BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("loss_fn", [each_sample, noisy_mean, cancelled])
def test_a_mean_over_samples_is_not_refused(loss_fn, parts, decisions, caplog):
    with caplog.at_level(logging.WARNING, "rewrite"):
        step_of(loss_fn, *PARTS[parts], *decisions).step(padded())
    told = caplog.text.count("it is zero, or no number")
    assert len(caplog.records) == told == (loss_fn is cancelled and PARTS[parts][0] < (4 if decisions else 2))


@pytest.mark.parametrize(
    "decision",
    [
        Checkpoint(modules=("layers.0", "layers.1")),
        Offload(modules=("layers.0",), inputs_of=(), from_bytes=1024),
        Replay(modules=("layers.0",), stretches=((0, 12),), kept=((),), stops=((),)),
    ],
    ids=lambda decision: decision.kind,
)
def test_it_is_looked_at_through_what_the_plan_rewrote(decision, caplog):
    with pytest.raises(DecisionError, match="the gradient of 4 samples comes out"):
        step_of(masked, 4, 4, decision).step(padded())
    result = step_of(each_sample, 4, 4, decision)
    with caplog.at_level(logging.INFO, "rewrite"):
        result.step(padded())
    assert not caplog.records


def test_padding_of_the_last_samples_alone_is_seen():
    with pytest.raises(DecisionError, match="the gradient of 4 samples comes out"):
        step_of(masked, 4, 4).step(padded(first=14))


def test_padding_that_comes_in_a_later_batch_is_seen():
    result = step_of(masked, 4, 4)
    for _ in range(3):
        result.step(padded(first=SAMPLES))
    with pytest.raises(DecisionError, match="comes out"):
        result.step(padded())


def test_numbers_that_are_drawn_are_those_that_would_be():
    own = torch.Generator().manual_seed(5)

    def noisy(output, batch):
        return costs(output + torch.randn(output.shape, generator=own) + torch.rand_like(output), batch).mean()

    drawn = []
    for tried in (True, False):
        result = step_of(noisy, 4, 4)
        if not tried:
            result.step.hold_weights(None)
        own.manual_seed(5)
        torch.manual_seed(3)
        drawn.append((result.step(padded()), torch.get_rng_state(), own.get_state()))
    assert all(map(torch.equal, *drawn))


class Reentrant(Speaker):
    """Its checkpoints give gradients to `backward` alone: values are compared."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        return self.head(torch.utils.checkpoint.checkpoint(self.layers, x, use_reentrant=True))


def test_without_gradients_to_compare_the_values_are():
    with pytest.raises(DecisionError, match="the loss of 4 samples comes out"):
        step_of(masked, 4, 4, build=Reentrant).step(padded())
    step_of(each_sample, 4, 4, build=Reentrant).step(padded())


def test_a_loss_that_takes_gradients_itself_is_tried():
    """Such as a penalty on them: without a graph it could not be taken."""

    def penalty(output, batch):
        (slope,) = torch.autograd.grad(output.square().sum(), output, create_graph=True)
        return slope.square().sum()

    with pytest.raises(DecisionError, match="the gradient of 4 samples comes out"):
        step_of(penalty, 4, 4).step(padded())


def test_what_cannot_be_tried_is_told(caplog):
    def sampled(output, batch):
        return costs(output, batch).flatten()[torch.multinomial(torch.ones(8), 4)].mean()

    with caplog.at_level(logging.WARNING, "rewrite"):
        step_of(sampled, 4, 4).step(padded())
    assert "could not be tried on parts of a batch" in caplog.text
    assert "multinomial draws random numbers of its own kind" in caplog.text


CALLS: list[int] = []


def test_a_loss_that_depends_on_more_than_the_batch_is_told(caplog):
    def warming_up(output, batch):
        CALLS.append(0)
        return costs(output, batch).mean() * len(CALLS)

    with caplog.at_level(logging.WARNING, "rewrite"):
        step_of(warming_up, 4, 4).step(padded())
    assert "the same samples have another gradient when they are taken again" in caplog.text


def test_padding_is_what_is_commonest():
    ids = torch.arange(1, 61).reshape(6, 10)
    ids[2, 1:], ids[4, 5:] = 0, 0
    assert amounts_of_padding({"ids": ids, "one": torch.ones(3)}, 6).argsort(descending=True)[:2].tolist() == [2, 4]
    assert amounts_of_padding((torch.ones(6, 2),), 6).tolist() == [0.0] * 6
    assert amounts_of_padding((torch.tensor([3, 1, 1, 2]),), 4).argsort(stable=True).tolist() == [1, 2, 3, 0]
    assert not amounts_of_padding((torch.tensor([3, 1, 0, 2]),), 4).any()  # names of samples
    assert amounts_of_padding((torch.tensor([3.0, torch.nan, 0.0]),), 3).argsort().tolist() == [2, 0, 1]
    nested = {"of": [{"mask": ids != 0, "nan": torch.full((6,), torch.nan)}]}
    assert amounts_of_padding(nested, 6).argsort()[:2].tolist() == [2, 4]


@pytest.mark.parametrize(("size", "group"), [(2, 2), (4, 2), (6, 2), (6, 3), (8, 4), (8, 8)])
def test_groups_that_stay_together_may_be_compared(size, group):
    def ranked(output, batch):
        """Within each group, as for pairs of a better and a worse answer."""
        return sum(each[0] - each.logsumexp(0) for each in costs(output, batch).mean(1).split(group)) / len(output)

    batch = (padded()[0].repeat(3, 1)[:24],)
    step_of(ranked, size, 24 // size, batch=batch).step(batch)
    if group == size:
        with pytest.raises(DecisionError, match="comes out"):
            step_of(ranked, size // 2, 48 // size, batch=batch).step(batch)


def test_a_small_batch_of_classes_is_not_refused():
    step_of(lambda output, batch: F.cross_entropy(output, batch[1]), 4, 2, build=Perceptron, batch=vectors(8)).step(
        vectors(8)
    )


# ---- random numbers that are all alike -------------------------------------------------------------------------------


DRAWS = {
    "rand": lambda: torch.rand(3, 2),
    "randn": lambda: torch.randn(3, 2),
    "of a generator": lambda: torch.randn(3, generator=torch.Generator()),
    "normal": lambda: torch.distributions.Normal(torch.zeros(3), 2.0).rsample(),
    "whole": lambda: torch.randint(5, 105, (4,)),
    "like": lambda: torch.rand_like(torch.zeros(3)),
    "in place": lambda: torch.empty(3).uniform_(2.0, 7.0),
    "exponential": lambda: torch.empty(3).exponential_(2.0),
    "coins": lambda: torch.empty(3).bernoulli_(0.7),
    "of a tensor": lambda: torch.bernoulli(torch.full((3,), 0.2)),
    "dropout": lambda: F.dropout(torch.ones(3)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_drawn_is_one_number_that_could_be_drawn_and_no_generator_moves(name):
    before = torch.get_rng_state()
    with SteadyRandom():
        drawn = [DRAWS[name]().flatten().double() for _ in range(2)]
    assert torch.equal(*drawn)
    assert len(drawn[0].unique()) == 1
    assert torch.equal(before, torch.get_rng_state())
    low, high = {"whole": (5, 105), "in place": (2, 7)}.get(name, (-1, 2))
    assert low <= drawn[0][0] <= high


def test_numbers_drawn_without_end_end():
    with SteadyRandom(), pytest.raises(NotImplementedError, match="draws of random numbers"):
        while torch.rand(()) < 0.5:
            pass
