"""Before anything is trained, the gradient of a few samples is compared with that of two halves of them."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import logging
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers.modeling_outputs import BaseModelOutput

from planner import rewrite
from planner.errors import DecisionError
from planner.plan_types.decisions import Accumulation, Decision, Precision
from planner.plan_types.recompute_decisions import Checkpoint, Offload, Replay
from planner.rewrite.accumulation_check import gradient_probe, object_snapshot
from planner.rewrite.accumulation_check import sampled_gradient as sampled_gradient_file
from planner.rewrite.accumulation_check.batch_independent_random import BatchIndependentRandom
from planner.rewrite.accumulation_check.sample_choice import amounts_of_padding, probe_pairs
from planner.rewrite.accumulation_check.sampled_gradient import sampled_gradient
from planner.rewrite.accumulation_check.side_effects import SideEffectGuard, _CopyOnWrite
from planner.rewrite.portable.recompute_check import RecomputeCheck
from tests.support.counting_device import Counting
from tests.support.training import Perceptron, plan_for, seeded, vectors, without_coupling_check

pytestmark = pytest.mark.slow

SAMPLES, LENGTH = 16, 24


class Speaker(nn.Module):
    """A small language model at its initialisation, where the loss is about the same for all samples."""

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
    """Token ids padded with zeros. Samples from `first` on have uneven lengths, those before have full length."""
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
    """A loss whose value is always near zero, but whose gradient is not."""
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


EACH_PRECISION = [("one by one", BF16), ("by two", ()), ("by eight", ()), ("by eight", BF16), ("uneven", ())]


@pytest.mark.parametrize(("parts", "decisions"), EACH_PRECISION)
@pytest.mark.parametrize("loss_fn", [masked, focal, noisy_sum, contrastive, scripted])
@pytest.mark.thorough_after(3)
def test_a_mean_that_no_function_tells_is_refused_where_all_samples_cost_alike(loss_fn, parts, decisions):
    result = step_of(loss_fn, *PARTS[parts], *decisions)
    before = [parameter.clone() for parameter in result.module.parameters()]
    for _ in range(2):
        with pytest.raises(DecisionError, match=r"the (gradient|loss) of \d samples comes out"):
            result.step(padded())
    assert all(torch.equal(a, b) for a, b in zip(before, result.module.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in result.module.parameters())


@pytest.mark.parametrize(("parts", "decisions"), EACH_PRECISION)
@pytest.mark.parametrize("loss_fn", [each_sample, noisy_mean, cancelled])
@pytest.mark.thorough_after(3)
def test_a_mean_over_samples_is_not_refused(loss_fn, parts, decisions, caplog):
    with caplog.at_level(logging.WARNING, "planner.rewrite"):
        step_of(loss_fn, *PARTS[parts], *decisions).step(padded())
    state_of = caplog.text.count("it is zero, or not finite")
    assert len(caplog.records) == state_of == (loss_fn is cancelled and PARTS[parts][0] < (4 if decisions else 2))


@pytest.mark.parametrize(
    "decision",
    [
        Checkpoint(modules=("layers.0", "layers.1")),
        Offload(modules=("layers.0",), inputs_of=(), from_bytes=1024),
        Replay(modules=("layers.0",), stretches=((0, 12),), kept=((),), stops=((),)),
    ],
    ids=lambda decision: decision.kind,
)
def test_it_is_compared_through_what_the_plan_rewrote(decision, caplog):
    with pytest.raises(DecisionError, match="the gradient of 4 samples comes out"):
        step_of(masked, 4, 4, decision).step(padded())
    result = step_of(each_sample, 4, 4, decision)
    with caplog.at_level(logging.INFO, "planner.rewrite"):
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
            without_coupling_check(result)
        own.manual_seed(5)
        torch.manual_seed(3)
        drawn.append((result.step(padded()), torch.get_rng_state(), own.get_state()))
    assert all(map(torch.equal, *drawn))


class Reentrant(Speaker):
    """Reentrant checkpoints support `backward` but not `autograd.grad`, so values of the loss are compared."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        return self.head(torch.utils.checkpoint.checkpoint(self.layers, x, use_reentrant=True))


def test_without_gradients_to_compare_the_values_are():
    with pytest.raises(DecisionError, match="the loss of 4 samples comes out"):
        step_of(masked, 4, 4, build=Reentrant).step(padded())
    step_of(each_sample, 4, 4, build=Reentrant).step(padded())


def test_a_loss_that_takes_gradients_itself_is_probed():
    """For example a gradient penalty, which cannot be computed under `no_grad`."""

    def penalty(output, batch):
        (slope,) = torch.autograd.grad(output.square().sum(), output, create_graph=True)
        return slope.square().sum()

    with pytest.raises(DecisionError, match="the gradient of 4 samples comes out"):
        step_of(penalty, 4, 4).step(padded())


def test_what_cannot_be_checked_is_refused_unless_weights_are_stated(caplog):
    def sampled(output, batch):
        return costs(output, batch).flatten()[torch.multinomial(torch.ones(8), 4)].mean()

    why = 'could not be checked .* multinomial draws from a distribution that is not supported .*check="off"'
    with pytest.raises(DecisionError, match=why):
        step_of(sampled, 4, 4).step(padded())
    with caplog.at_level(logging.WARNING, "planner.rewrite"):
        step_of(sampled, 4, 4, loss_weight=lambda batch: len(batch[0])).step(padded())
    assert "could not be checked" in caplog.text


CALLS: list[int] = []


def test_a_loss_that_depends_on_more_than_the_batch_is_refused():
    def warming_up(output, batch):
        CALLS.append(0)
        return costs(output, batch).mean() * len(CALLS)

    with pytest.raises(DecisionError, match="from one call to the next"):
        step_of(warming_up, 4, 4).step(padded())


def test_padding_is_what_is_commonest():
    ids = torch.arange(1, 61).reshape(6, 10)
    ids[2, 1:], ids[4, 5:] = 0, 0
    assert amounts_of_padding({"ids": ids, "one": torch.ones(3)}, 6).argsort(descending=True)[:2].tolist() == [2, 4]
    assert amounts_of_padding((torch.ones(6, 2),), 6).tolist() == [0.0] * 6
    assert amounts_of_padding((torch.tensor([3, 1, 1, 2]),), 4).argsort(stable=True).tolist() == [1, 2, 3, 0]
    assert not amounts_of_padding((torch.tensor([3, 1, 0, 2]),), 4).any()  # identifiers of samples
    assert amounts_of_padding((torch.tensor([3.0, torch.nan, 0.0]),), 3).argsort().tolist() == [2, 0, 1]
    nested = {"of": [{"mask": ids != 0, "nan": torch.full((6,), torch.nan)}]}
    assert amounts_of_padding(nested, 6).argsort()[:2].tolist() == [2, 4]


@pytest.mark.parametrize(("size", "group"), [(2, 2), (4, 2), (6, 2), (6, 3), (8, 4), (8, 8)])
@pytest.mark.thorough_after(3)
def test_groups_that_stay_together_may_be_compared(size, group):
    def ranked(output, batch):
        """Compares samples within each group, such as pairs of a better and a worse answer."""
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


# ---- couplings that few samples may not show -------------------------------------------------------------------------


class Embedder(nn.Module):
    """Maps vectors to embeddings. In training mode the output may depend on the batch."""

    def __init__(self, balanced: float = 0.0, zero: bool = False) -> None:
        super().__init__()
        self.first, self.dropout, self.head = nn.Linear(10, 32), nn.Dropout(0.2), nn.Linear(32, 8)
        self.balanced = balanced
        if zero:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.head(self.dropout(torch.tanh(self.first(x))))
        if self.training and self.balanced:
            output = output * (1.0 + self.balanced * output.mean(0).square().sum())
        return output


def classes(shuffled: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight classes of four samples each."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(8).repeat_interleave(4)
    order = torch.randperm(32, generator=generator) if shuffled else torch.arange(32)
    return torch.randn(32, 10, generator=generator), labels[order]


def supervised_contrastive(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    unit, itself = F.normalize(output, dim=1), torch.eye(len(output)).bool()
    same = (batch[1][:, None] == batch[1][None]) & ~itself
    likely = (unit @ unit.T / 0.1).masked_fill(itself, -1e9).log_softmax(1)
    return -((likely * same).sum(1) / same.sum(1).clamp(min=1)).mean()


def hardest(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    cost = F.cross_entropy(output, batch[1], reduction="none")
    return cost.topk(max(1, int(0.7 * len(cost))))[0].mean()


def of_classes(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return F.cross_entropy(output, batch[1], reduction="none").sum() / len(output)


def weighted_by_hand(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    weight = 1.0 + batch[1]
    return (F.cross_entropy(output, batch[1], reduction="none") * weight).sum() / weight.sum()


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("size", "count"), [(2, 16), (8, 4), (16, 2)])
def test_a_loss_over_pairs_of_a_class_is_refused(size, count, shuffled):
    """The loss of two samples is zero, that of four is not."""
    batch = classes(shuffled)
    with pytest.raises(DecisionError, match="comes out"):
        step_of(supervised_contrastive, size, count, batch=batch, build=Embedder).step(batch)


def drawn_together(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    """A loss over pairs of samples of one class, without a term that separates classes."""
    same = (batch[1][:, None] == batch[1][None]) & ~torch.eye(len(output)).bool()
    return (torch.cdist(output, output).square() * same).sum() / same.sum().clamp(min=1)


@pytest.mark.parametrize("loss_fn", [supervised_contrastive, drawn_together])
@pytest.mark.parametrize(("size", "count"), [(4, 8), (16, 2)])
def test_pairs_of_a_class_are_found_wherever_they_are(loss_fn, size, count):
    """Each class has two samples, which are never adjacent."""
    batch = (classes()[0], torch.arange(32) % 16)
    with pytest.raises(DecisionError, match="comes out"):
        step_of(loss_fn, size, count, batch=batch, build=Embedder).step(batch)


def test_samples_are_chosen_by_labels():
    labels = torch.tensor([5, 3, 3, 7, 5, 3, 3, 5, 9, 5])
    sides = list(probe_pairs((torch.zeros(10, 4), labels), 10, 8, 5, 0))[2:]
    assert [[labels[part].tolist() for part in side] for side in sides] == [
        [[3, 3, 5, 5], [3, 3, 5, 5]],
        [[3, 3, 3, 3], [5, 5, 5, 5]],
    ]


@pytest.mark.parametrize("size", [2, 4, 16])
def test_weights_by_how_often_a_class_comes_are_refused(size):
    """The fault does not show in two samples of two classes."""

    def balanced(output, batch):
        weight = 1.0 / torch.bincount(batch[1], minlength=8)[batch[1]]
        return (F.cross_entropy(output, batch[1], reduction="none") * weight).sum() / weight.sum()

    batch = (classes()[0].repeat(2, 1), torch.randint(0, 8, (64,), generator=torch.Generator().manual_seed(0)))
    with pytest.raises(DecisionError, match="comes out"):
        step_of(balanced, size, 64 // size, batch=batch, build=Embedder).step(batch)


@pytest.mark.parametrize("number", range(6))
def test_every_large_parameter_is_compared(number):
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(10, 40_000, bias=False) for _ in range(6))

        def forward(self, x):
            return torch.stack([head(x).square().mean(1) for head in self.heads], 1)

    def masked_in_one(output, batch):
        mask = (batch[1] > 2).float()
        return output.mean() - output[:, number].mean() + (output[:, number] * mask).sum() / mask.sum()

    with pytest.raises(DecisionError, match="comes out"):
        step_of(masked_in_one, 8, 4, batch=classes(shuffled=True), build=Branches).step(classes(shuffled=True))


def test_gradients_are_sampled_alike_in_every_layout():
    """Covers dense and sparse, real and complex gradients. Hooks of the user are called, and no other hook remains."""
    dense, sparse = nn.Embedding(50, 7), nn.Embedding(50, 7, sparse=True)
    sparse.load_state_dict(dense.state_dict())
    ids, weights = torch.tensor([3, 3, 49, 0]), torch.randn(4, 7)
    found = [sampled_gradient((each(ids) * weights).sum(), [each.weight]) for each in (dense, sparse)]
    assert torch.equal(*found)
    assert len(found[0]) == 350
    dense.weight.register_hook(lambda gradient: 2 * gradient)
    assert torch.equal(sampled_gradient((dense(ids) * weights).sum(), [dense.weight]), 2 * found[0])
    assert len(dense.weight._backward_hooks) == 1
    assert not sparse.weight._backward_hooks
    turned = nn.Parameter(torch.randn(3, 5, 2).permute(2, 0, 1))
    assert torch.equal(sampled_gradient((turned**2).sum(), [turned]), 2 * turned.detach().flatten().double())
    phases = nn.Parameter(torch.zeros(6, dtype=torch.complex64))
    both = sampled_gradient((phases * torch.arange(6)).imag.sum(), [phases])
    assert both.tolist() == [0.0, 1.0, 0.0, 3.0, 0.0, 5.0]
    large = nn.Parameter(torch.randn(3_000_000))
    estimate = sampled_gradient(large.square().sum(), [large, dense.weight]).norm() / (2 * large).norm()
    assert abs(float(estimate) - 1) < 0.01


class Withheld(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x + weight.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def test_a_function_without_a_gradient_is_not_an_obstacle(caplog):
    class Model(Embedder):
        def __init__(self) -> None:
            super().__init__()
            self.withheld = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return Withheld.apply(super().forward(x), self.withheld)

    with pytest.raises(DecisionError, match="comes out"):
        step_of(weighted_by_hand, 8, 4, batch=classes(), build=Model).step(classes())
    step_of(of_classes, 8, 4, batch=classes(), build=Model).step(classes())
    assert not caplog.records


def test_a_batch_that_cannot_be_read_is_refused():
    """The last member of the batch is passed to the loss function only."""
    quantized = torch.quantize_per_tensor(torch.randn(32, 3), 0.1, 0, torch.qint8)

    def loss(output, batch):
        return (output.square().mean(1) + batch[1].dequantize().sum(1)).sum() / len(output)

    batch = (classes()[0], quantized)
    with pytest.raises(DecisionError, match="could not be checked that micro-batches train like the whole batch"):
        step_of(loss, 8, 4, batch=batch, build=Embedder).step(batch)


def test_wrapper_tensors_are_logged(caplog):
    class Model(Embedder):
        def __init__(self) -> None:
            super().__init__()
            self.wrapped = nn.Parameter(TwoTensor(torch.ones(8), torch.ones(8)))

        def forward(self, x):
            return super().forward(x) * self.wrapped.a

    result = step_of(of_classes, 1, 32, batch=classes(), build=Model)
    for _ in range(3):
        result.step(classes())
    assert [record.getMessage() for record in caplog.records] == [
        "the loss could not be tried on parts of a batch: TwoTensor is a tensor that wraps others"
    ]


@pytest.mark.parametrize("draw", [np.random.rand, lambda n: np.array([random.random() for _ in range(n)])])
def test_numbers_of_each_sample_that_are_not_torchs_are_refused_unless_weights_are_stated(draw, caplog):
    """The split changes which sample gets which number, so that a difference means nothing."""

    def noisy(output, batch):
        return (F.cross_entropy(output, batch[1], reduction="none") * torch.as_tensor(draw(len(output)))).mean()

    with pytest.raises(DecisionError, match="draws random numbers with numpy or Python"):
        step_of(noisy, 8, 4, batch=classes(), build=Embedder).step(classes())
    result = step_of(noisy, 8, 4, batch=classes(), build=Embedder, loss_weight=lambda batch: len(batch[0]))
    for _ in range(4):
        result.step(classes())
    assert len(caplog.records) == 1  # once, not in each of the batches
    assert "draws random numbers with numpy or Python" in caplog.text


def test_what_draws_other_numbers_in_training_is_probed_in_evaluation(caplog):
    class Masking(Embedder):
        def forward(self, x):
            if self.training:
                x = x * torch.as_tensor(np.random.rand(*x.shape) > 0.3)
            return super().forward(x.float())

    batch = classes(shuffled=True)
    step_of(of_classes, 8, 4, batch=batch, build=Masking).step(batch)
    assert not caplog.records
    with pytest.raises(DecisionError, match="comes out"):
        step_of(weighted_by_hand, 8, 4, batch=batch, build=Masking).step(batch)


def test_a_model_of_very_many_objects_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(object_snapshot, "_MAX_OBJECTS", 3)
    step_of(of_classes, 8, 4, batch=classes(), build=Embedder).step(classes())
    assert "more objects than a snapshot takes" in caplog.text


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("size", "count"), [(2, 16), (4, 8), (8, 4)])
def test_two_micro_batches_that_agree_by_chance_do_not_overrule(size, count, seed):
    batch = (classes(True)[0].roll(seed, 0), classes(True)[1])
    with pytest.raises(DecisionError, match="comes out"):
        step_of(hardest, size, count, batch=batch, build=Embedder).step(batch)


@pytest.mark.parametrize(("size", "count"), [(1, 32), (8, 4)])
def test_what_couples_samples_in_training_alone_is_seen(size, count):
    batch = classes()
    step_of(of_classes, size, count, batch=batch, build=Embedder).step(batch)
    with pytest.raises(DecisionError, match="comes out"):
        step_of(of_classes, size, count, batch=batch, build=lambda: Embedder(balanced=1.0)).step(batch)


@pytest.mark.parametrize("decisions", [(), BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("size", "count"), [(1, 32), (2, 16), (8, 4)])
def test_weights_are_seen_where_a_head_of_zeros_makes_all_losses_the_same(size, count, decisions):
    batch, options = classes(), {"build": lambda: Embedder(zero=True)}
    with pytest.raises(DecisionError, match="comes out"):
        step_of(weighted_by_hand, size, count, *decisions, batch=batch, **options).step(batch)
    result = step_of(of_classes, size, count, *decisions, batch=batch, **options)
    result.step(batch)
    assert result.module.head.weight.any()


class Tables(nn.Module):
    """The second table alone is spread out, over the items of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(20_000, 64), nn.Embedding(30_000, 64)

    def forward(self, x: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.users(x), self.items(items)])


def test_large_parameters_are_compared_too():
    def spread_out(output, batch):
        users, items = output
        return users.square().mean() + torch.pdist(F.normalize(items)).square().mul(-2).exp().mean().log()

    generator = torch.Generator().manual_seed(0)
    batch = tuple(torch.randint(0, 20_000, (16,), generator=generator) for _ in range(3))
    with pytest.raises(DecisionError, match="comes out"):
        step_of(spread_out, 4, 4, batch=batch, build=Tables).step(batch)


def test_targets_that_are_nan_are_padding():
    def known(output, batch):
        is_known = ~batch[1].isnan()
        return (output[:, 0] - batch[1].nan_to_num()).square().mul(is_known).sum() / is_known.sum()

    x, labels = classes()
    batch = (x, labels.float().masked_fill(torch.arange(32) % 5 == 3, torch.nan))
    with pytest.raises(DecisionError, match="comes out"):
        step_of(known, 4, 8, batch=batch, build=Embedder).step(batch)


def test_own_random_numbers_that_change_the_weights_are_logged(caplog):
    def masked_at_random(output, batch):
        chosen = (torch.rand_like(output) < 0.3).to(output.dtype)
        return (output.square() * chosen).sum() / chosen.sum().clamp(min=1)

    step_of(masked_at_random, 8, 4, batch=classes(), build=Embedder).step(classes())
    assert "with random numbers of its own for each sample, computed in two parts" in caplog.text


def test_stated_weights_are_probed_and_what_is_off_is_logged(caplog):
    def with_decay(output, batch):
        return F.cross_entropy(output, batch[1], reduction="sum") + 5.0 * output.mean().square() + 3.0

    batch = classes()
    step_of(with_decay, 8, 4, batch=batch, build=Embedder, loss_weight=lambda batch: 1).step(batch)
    assert "weighted by the loss_weight that was given" in caplog.text
    caplog.clear()
    options = {"loss_weight": lambda batch: (1.0 + batch[1]).sum()}
    step_of(weighted_by_hand, 8, 4, batch=batch, build=Embedder, **options).step(batch)
    assert not caplog.records


# ---- means that functions tell, and that are right all the same ------------------------------------------------------


def one_by_one(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    """Of as many numbers as each sample has."""
    lengths = (batch[1] % 7) + 1
    each = [F.mse_loss(row[:length], torch.ones(length)) for row, length in zip(output, lengths, strict=True)]
    return torch.stack(each).mean()


def beside_a_metric(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    F.l1_loss(output[batch[1] > 2], torch.zeros(int((batch[1] > 2).sum()), 8))
    return of_classes(output, batch)


def scaled_back(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    """A mean over labels, times their number, is a sum."""
    labels = batch[1].masked_fill(batch[1] > 4, -100)
    return F.cross_entropy(output, labels) * (labels >= 0).sum() / len(labels)


@pytest.mark.parametrize("loss_fn", [one_by_one, beside_a_metric, scaled_back])
@pytest.mark.parametrize(("size", "count"), [(4, 8), (8, 4)])
def test_means_that_are_not_the_loss_do_not_refuse_it(loss_fn, size, count):
    batch = classes(shuffled=True)
    result = step_of(loss_fn, size, count, batch=batch, build=Embedder)
    for _ in range(3):
        result.step(batch)


# ---- no trace is left ------------------------------------------------------------------------------------------------


class Sparse(Embedder):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mixing", torch.eye(10).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((self.mixing @ x.T).T)


class Momentum(Embedder):
    """Writes to parameters in its forward, like momentum encoders do, and draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.teacher = nn.Linear(32, 8).requires_grad_(False), nn.Linear(32, 8).requires_grad_(False)
        self.numbers, self.more, self.seen, self.count = np.random.default_rng(0), random.Random(0), [], 0
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("statistics", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        with torch.no_grad():
            self.keys.weight.data = 0.9 * self.keys.weight.data + 0.1 * self.head.weight.data
            self.teacher.weight.mul_(0.9).add_(self.head.weight, alpha=0.1)
            self.mean = 0.9 * self.mean + 0.1
            F.batch_norm(hidden.detach(), self.statistics, torch.ones(32), training=True)
        self.count += 1
        self.seen.append(len(x))
        self.numbers.random()
        self.more.random()
        return self.head(hidden)


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.center, self.norm = torch.zeros(8), nn.BatchNorm1d(8)

    def forward(self, output: torch.Tensor, batch: tuple) -> torch.Tensor:
        self.center = 0.9 * self.center + 0.1 * output.detach().mean(0)
        return of_classes(output, batch) + 0.0 * self.norm(output.detach()).sum()


def state_of(model: nn.Module) -> dict:
    kept = {name: value.to_dense().clone() for name, value in model.state_dict().items()}
    for name in ("seen", "count", "center"):
        if hasattr(model, name):
            kept[name] = copy.copy(getattr(model, name))
    if hasattr(model, "numbers"):
        kept["next"] = model.numbers.random(), model.more.random()
    return kept


@pytest.mark.parametrize("build", [Embedder, Sparse, Momentum])
@pytest.mark.parametrize("own_loss", [False, True])
def test_a_probe_leaves_no_trace(build, own_loss):
    kept = []
    for tried in (True, False):
        loss_fn = seeded(Centred) if own_loss else of_classes
        result = step_of(loss_fn, 4, 8, batch=classes(), build=build)
        if not tried:
            without_coupling_check(result)
        torch.manual_seed(3)
        for _ in range(2):
            result.step(classes())
        assert all(module.training for module in result.module.modules())
        kept.append(
            state_of(result.module) | (state_of(loss_fn) if own_loss else {}) | {"random": torch.get_rng_state()}
        )
    first, second = kept
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name], name


def test_tensors_that_were_resized_or_replaced_in_a_closure_are_restored():
    model, calls, last, late = nn.Linear(2, 2), [1], None, 0
    model.register_buffer("grown", torch.zeros(2))
    del late

    def loss(output, batch):
        nonlocal last, late
        last = late = 5
        calls.append(2)
        return last, late

    with SideEffectGuard(model, loss).restoring():
        loss(None, None)
        model.grown.resize_(7)
        model.extra = 3
        model.weight.data.zero_()
    assert calls == [1]
    assert model.grown.shape == (2,)
    assert not hasattr(model, "extra")
    assert model.weight.any()
    assert last is None
    with pytest.raises(ValueError, match="empty"):
        _ = loss.__closure__[loss.__code__.co_freevars.index("late")].cell_contents


def deep(depth: int = 9) -> nn.Module:
    """A model with normalisation and state in deeply nested modules."""
    inner: nn.Module = nn.Sequential(nn.BatchNorm1d(10), Remembering())
    for _ in range(depth):
        inner = nn.Sequential(inner)
    return inner


@pytest.mark.parametrize("in_loss", [False, True])
def test_deeply_nested_state_is_restored(in_loss):
    kept = []
    for tried in (True, False):
        loss_fn = of_classes
        if in_loss:
            head = seeded(deep)

            def loss_fn(output, batch, head=head):
                return of_classes(output, batch) + 0.0 * head(batch[0]).sum()

        result = step_of(loss_fn, 4, 8, batch=classes(), build=Embedder if in_loss else deep)
        if not tried:
            without_coupling_check(result)
        model = head if in_loss else result.module
        for _ in range(2):
            result.step(classes())
        assert all(module.training for module in model.modules())
        found = next(module for module in model.modules() if isinstance(module, Remembering))
        kept.append((dict(found.calls), {name: value.tolist() for name, value in model.state_dict().items()}))
    assert kept[0] == kept[1]


class Meter:
    def __init__(self) -> None:
        self.sum, self.parts = 0.0, {"of": [0]}

    def note(self, value: float) -> None:
        self.sum += value
        self.parts["of"][0] += 1


class Remembering(Embedder):
    """Keeps state in objects that are not modules."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.pairs, self.meter = collections.Counter(), [(torch.zeros(3), torch.zeros(3))], Meter()
        self.last, self.array = BaseModelOutput(last_hidden_state=torch.zeros(1)), np.zeros(3)
        self.partial = functools.partial(Meter.note, Meter())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls["forward"] += 1
        one, two = self.pairs[0]
        self.pairs[0] = one + 1, two + 1
        self.last["last_hidden_state"] = x
        self.array += 1
        self.meter.note(1.0)
        self.partial(2.0)
        return super().forward(x)


def test_state_in_plain_objects_and_containers_is_restored(caplog):
    kept = []
    for tried in (True, False):
        result = step_of(of_classes, 4, 8, batch=classes(), build=Remembering)
        if not tried:
            without_coupling_check(result)
        result.step(classes())
        m = result.module
        state = [m.calls, m.pairs[0][0].tolist(), m.array.tolist(), m.meter.sum, m.meter.parts, m.partial.args[0].sum]
        kept.append([*copy.deepcopy(state), len(m.last["last_hidden_state"])])
    assert kept[0] == kept[1]
    assert kept[0][0] == {"forward": 8}
    assert not caplog.records


def test_compiled_graphs_are_used_after_a_probe():
    """Dynamo never compiles a forward again that it once met under a dispatch mode."""
    runs = []

    def counting(graph, inputs):
        def run(*args):
            runs.append(0)
            return graph(*args)

        return run

    torch.compiler.reset()
    result = step_of(of_classes, 4, 8, batch=classes(), build=Embedder)
    result.module.compile(backend=counting)
    for _ in range(3):
        result.step(classes())
        runs, before = [], runs
    assert len(before) == 8
    torch.compiler.reset()


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_one_crowded_image_among_many_is_compared(size):
    counts = [12 if number == 21 else 1 for number in range(32)]
    boxes = [{"labels": torch.arange(count) % 8} for count in counts]

    def over_boxes(output, batch):
        each = [
            F.cross_entropy(row.expand(len(b["labels"]), -1), b["labels"], reduction="sum")
            for row, b in zip(output, batch[-1], strict=True)
        ]
        return torch.stack(each).sum() / sum(len(box["labels"]) for box in batch[-1])

    batch = (classes()[0], boxes)
    with pytest.raises(DecisionError, match="comes out"):
        step_of(over_boxes, size, 32 // size, batch=batch, build=Embedder).step(batch)


def test_a_slight_difference_is_logged(caplog):
    def balanced(output, batch):
        return of_classes(output, batch) + 0.3 * output.softmax(1).mean(0).square().sum()

    step_of(balanced, 8, 4, batch=classes(), build=Embedder).step(classes())
    assert "comes out 0." in caplog.text


@pytest.mark.parametrize(
    ("size", "count", "decisions"),
    [
        (1, 16, ()),
        (1, 16, BF16),
        (2, 8, (Checkpoint(modules=("layers.0", "layers.1")),)),
        (2, 8, BF16),
        (3, 6, (Checkpoint(modules=("layers.0", "layers.1")),)),
        (8, 2, ()),
        (8, 2, BF16),
    ],
)
@pytest.mark.thorough_after(2)
def test_a_probe_takes_no_more_memory_than_a_step(size, count, decisions, monkeypatch):
    """Copies to the host are not counted: on the CPU they would be in the same memory."""
    monkeypatch.setattr(sampled_gradient_file, "_spread", lambda gradient, stride: gradient.sum().view(1))
    monkeypatch.setattr(_CopyOnWrite, "_copy", lambda self, tensor: None)
    monkeypatch.setattr(gradient_probe.GradientProbe, "_perturb", lambda self: None)
    monkeypatch.setattr(RecomputeCheck, "watched", lambda self, forward, name: forward)
    result, peaks = step_of(each_sample, size, count, *decisions), []
    for number in range(4):
        if number == 3:
            without_coupling_check(result)
        with Counting(None) as counted:
            for parameter in result.module.parameters():
                counted.note(parameter)
            result.step(padded())
        peaks.append(counted.peak_bytes)
    assert max(peaks[1], peaks[2]) <= 1.02 * peaks[3] + 2**20


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
    with BatchIndependentRandom():
        drawn = [DRAWS[name]().flatten().double() for _ in range(2)]
    assert torch.equal(*drawn)
    assert len(drawn[0].unique()) == 1
    assert torch.equal(before, torch.get_rng_state())
    low, high = {"whole": (5, 105), "in place": (2, 7)}.get(name, (-1, 2))
    assert low <= drawn[0][0] <= high


def test_endless_draws_are_stopped():
    with BatchIndependentRandom(), pytest.raises(NotImplementedError, match="draw random numbers"):
        while torch.rand(()) < 0.5:
            pass


class WarmingUp(Speaker):
    """A model whose loss grows with the number of its calls, up to a limit."""

    def __init__(self, calls: int, into: str) -> None:
        super().__init__()
        self.limit, self.into = calls, into
        self.calls, self.notes = 0, {"calls": 0}
        self.register_buffer("count", torch.zeros(()))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.notes["calls"] += 1
        self.count += 1
        seen = {"attribute": self.calls, "dict": self.notes["calls"], "buffer": self.count}[self.into]
        return super().forward(*inputs) * min(seen / self.limit, 1.0)


@pytest.mark.parametrize("into", ["attribute", "dict", "buffer"])
def test_a_loss_that_counts_its_calls_is_refused(into):
    result = step_of(each_sample, 4, 4, build=lambda: WarmingUp(10, into))
    with pytest.raises(DecisionError, match="from one call to the next"):
        result.step(padded())


def test_a_counter_that_reaches_its_limit_within_the_first_step_is_refused_before_it_counts():
    result = step_of(each_sample, 4, 4, build=lambda: WarmingUp(3, "attribute"))
    with pytest.raises(DecisionError, match="from one call to the next"):
        result.step(padded())
    assert result.module.calls == 0


@pytest.mark.parametrize("stated", [False, True])
def test_a_loss_that_advances_an_iterator_is_refused_unless_weights_are_stated(stated, caplog):
    calls = itertools.count(1)

    def warming_up(output: torch.Tensor, batch: tuple) -> torch.Tensor:
        return each_sample(output, batch) * min(1.0, next(calls) / 3)

    result = step_of(warming_up, 4, 4, **({"loss_weight": lambda batch: len(batch[0])} if stated else {}))
    if stated:
        result.step(padded())
        assert "holds an iterator (count)" in caplog.text
        assert next(calls) == 5  # each of four micro-batches took one value, and the check took none
    else:
        with pytest.raises(DecisionError, match="from one call to the next"):
            result.step(padded())


def test_an_iterator_is_refused_only_if_it_is_advanced():
    calls = itertools.count(1)
    step_of(lambda output, batch: each_sample(output, batch) * calls.__sizeof__(), 4, 4).step(padded())
    assert next(calls) == 1
    result = step_of(lambda output, batch: each_sample(output, batch) * min(1.0, next(calls)), 4, 4)
    with pytest.raises(DecisionError, match=r"holds an iterator \(count\), whose position cannot"):
        result.step(padded())


def test_a_counter_that_changes_nothing_any_more_is_not_refused():
    step_of(each_sample, 4, 4, build=lambda: WarmingUp(1, "attribute")).step(padded())


def test_a_loss_that_changes_slightly_from_call_to_call_is_logged(caplog):
    def drifting(output: torch.Tensor, batch: tuple, calls=[0]) -> torch.Tensor:  # noqa: B006 - a state is the point
        calls[0] += 1
        return each_sample(output, batch) * (1 + calls[0] * 5e-3)

    step_of(drifting, 4, 4).step(padded())
    assert "from one call to the next" in caplog.text
