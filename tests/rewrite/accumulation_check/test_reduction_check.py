"""The weights of micro-batches are compared with the reductions of the loss, and derived from labels where possible."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner import rewrite
from planner.errors import DecisionError
from planner.plan_types.decisions import Accumulation, ChunkedLoss
from tests.support.training import (
    Perceptron,
    cross_entropy,
    gpt2,
    largest_relative_error,
    plan_for,
    roberta,
    roberta_config,
    seeded,
    sgd,
    tokens,
    vectors,
    verified,
    without_coupling_check,
)

pytestmark = pytest.mark.slow

UNEVEN = Accumulation(micro_batch_size=4, micro_batches=2)
"""Splits batches of 6 samples into 4 and 2."""


PAIR = (torch.zeros(5), torch.ones(5))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 8)
        self.head = nn.Linear(8, 60)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


def of_tokens(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch[-1].flatten())


def of_classes(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 25.0], dtype=output.dtype))(output, batch[-1])


def summed(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return F.cross_entropy(output, batch[-1], reduction="sum")


def squared(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return F.mse_loss(output, F.one_hot(batch[-1], 3).to(output.dtype))


def token_pairs() -> tuple[torch.Tensor, torch.Tensor]:
    return tokens()["input_ids"], tokens()["labels"]


def step_of(build, batch, loss_fn=None, **options):
    model = seeded(build)
    plan = plan_for(model, batch, UNEVEN, loss_fn=loss_fn, optimizer="sgd")
    return rewrite.apply(plan, model, loss_fn=loss_fn, **options)


REFUSED = {
    "labels that do not count": (Tagger, token_pairs(), of_tokens, r"cross_entropy is a mean over \d+, \d+ terms"),
    "class weights": (Perceptron, vectors(6), of_classes, r"cross_entropy is a mean over [\d.]+, [\d.]+ terms"),
    "a sum": (Perceptron, vectors(6), summed, r"by 0.6667, 0.3333, but the loss is a sum: .* returns 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_weights_that_make_another_loss_are_refused_before_anything_is_trained(case):
    build, batch, loss_fn, message = REFUSED[case]
    result = step_of(build, batch, loss_fn)
    before = [parameter.clone() for parameter in result.module.parameters()]
    for _ in range(2):
        with pytest.raises(DecisionError, match=message):
            result.step(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, result.module.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in result.module.parameters())
    assert not result.optimizer.state


def contrastive(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


def over_pairs(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    is_pair = (batch[-1].unsqueeze(0) == batch[-1].unsqueeze(1)).fill_diagonal_(False)
    return -(output @ output.T).log_softmax(1)[is_pair].mean()


def by_hand(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    weight = 1.0 + batch[-1]
    return (F.cross_entropy(output, batch[-1], reduction="none") * weight).sum() / weight.sum()


def sum_of_squares(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return output.square().sum()


@pytest.mark.parametrize("loss_fn", [contrastive, over_pairs, by_hand, sum_of_squares])
def test_a_loss_that_parts_do_not_add_up_to_is_refused_before_anything_is_trained(loss_fn):
    result = step_of(Perceptron, vectors(6), loss_fn)
    before = [parameter.clone() for parameter in result.module.parameters()]
    modes, state = [module.training for module in result.module.modules()], torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(DecisionError, match=r"the gradient of 4 samples comes out [\d.]+% off"):
            result.step(vectors(6))
    assert all(torch.equal(a, b) for a, b in zip(before, result.module.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in result.module.parameters())
    assert modes == [module.training for module in result.module.modules()]
    assert not torch.equal(state, torch.get_rng_state())  # dropout's, of the micro-batches


class Merging(Perceptron):
    """Like adapters, which are merged into a weight for evaluation."""

    def train(self, mode: bool = True):
        if mode != self.training:
            with torch.no_grad():
                self.head.weight.add_(-1.0 if mode else 1.0)
        return super().train(mode)


def test_a_model_that_changes_for_evaluation_is_not_asked_to():
    result, plain = (step_of(build, vectors(6), cross_entropy, optimizer=sgd) for build in (Merging, Perceptron))
    for each in (result, plain):
        torch.manual_seed(3)
        each.step(vectors(6))
    assert torch.equal(result.module.head.weight, plain.module.head.weight)


def test_a_loss_that_is_random_is_not_probed_and_draws_what_it_would():
    def noisy(output, batch):
        return (output + torch.randn_like(output)).square().mean()

    drawn = []
    for tried in (True, False):
        result = step_of(Perceptron, vectors(6), noisy)
        if not tried:
            without_coupling_check(result)
        torch.manual_seed(3)
        drawn.append((result.step(vectors(6)), torch.get_rng_state()))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])


def clip() -> nn.Module:
    import transformers

    layers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**layers, "vocab_size": 60, "max_position_embeddings": 16, "eos_token_id": 2},
            vision_config={**layers, "image_size": 8, "patch_size": 4}, projection_dim=8,
        )
    )  # fmt: skip


def test_a_model_that_compares_texts_with_images_is_refused():
    images = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens()["input_ids"], "pixel_values": images}
    model = seeded(clip)
    result = rewrite.apply(plan_for(model, batch, UNEVEN), model)
    with pytest.raises(DecisionError, match="the loss compares samples"):
        result.step({**batch, "return_loss": True})


def test_a_first_batch_that_is_not_split_leaves_the_check_to_the_next():
    result = step_of(Perceptron, vectors(6), of_classes)
    result.step(vectors(3))
    with pytest.raises(DecisionError, match="cross_entropy is a mean over"):
        result.step(vectors(6))


LATER = {
    "padding": (Tagger, lambda ids, labels: (ids, labels.clamp(min=0)), token_pairs, of_tokens),
    "class weights": (Perceptron, lambda x, y: (x, torch.ones_like(y)), lambda: vectors(6), of_classes),
}


@pytest.mark.parametrize("case", LATER)
def test_labels_that_make_another_mean_of_a_later_batch_are_refused_there(case):
    build, alike, uneven, loss_fn = LATER[case]
    batch = uneven()
    result = step_of(build, batch, loss_fn)
    for _ in range(2):
        result.step(alike(*batch))
    before = [parameter.clone() for parameter in result.module.parameters()]
    for _ in range(2):
        with pytest.raises(DecisionError, match=r"cross_entropy is a mean over [\d.]+, [\d.]+ terms"):
            result.step(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, result.module.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in result.module.parameters())
    result.step(alike(*batch))


STATED = {
    "labels that do not count": lambda batch: (batch[-1] != -100).sum(),
    "class weights": lambda batch: torch.tensor([1.0, 5.0, 25.0])[batch[-1]].sum(),
    "a sum": lambda batch: 1,
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_stated_weight_makes_them_the_full_batch(case):
    build, batch, loss_fn, _ = REFUSED[case]
    found = verified(build, batch, UNEVEN, loss_fn=loss_fn, loss_weight=STATED[case])
    assert found.passed, str(found)
    step_of(build, batch, loss_fn, loss_weight=STATED[case]).step(batch)


def test_a_part_over_which_the_mean_is_0_over_0_is_left_out():
    def masked(output, batch):
        return (output.square().mean(1) * batch[-1]).sum() / batch[-1].sum()

    options = {"loss_fn": masked, "loss_weight": lambda batch: batch[-1].sum()}
    batch = (vectors(6)[0], torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0]))
    found = verified(Perceptron, batch, UNEVEN, **options)
    assert found.passed, str(found)
    with pytest.raises(ValueError, match="which is a mean over zero terms"):
        step_of(Perceptron, batch, **options).step((batch[0], torch.zeros(6)))


def with_a_metric(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    """The metric is not part of the loss, so that it may be a mean over other terms."""
    of_classes(output.detach(), batch)
    return cross_entropy(output, batch)


def each_by_itself(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return torch.vmap(F.cross_entropy)(output, batch[-1]).mean()


@pytest.mark.parametrize(
    ("build", "batch", "loss_fn", "goes_on"),
    [
        (Perceptron, vectors(6), cross_entropy, True),
        (Perceptron, vectors(6), with_a_metric, True),
        (Perceptron, vectors(6), each_by_itself, False),
        (Perceptron, vectors(6), squared, False),
        (Perceptron, vectors(6), lambda output, batch: F.cross_entropy(output, output.detach().softmax(1)), False),
        (Perceptron, vectors(6), lambda output, batch: output.square().mean(), False),
        (Perceptron, vectors(6), lambda output, batch: cross_entropy(output, batch) + F.mse_loss(*PAIR), True),
        (roberta, tokens(), None, False),
        (gpt2, tokens(), None, False),
    ],
)
def test_weights_that_are_right_are_checked_again_only_where_labels_may_change_them(build, batch, loss_fn, goes_on):
    result = step_of(build, batch, loss_fn)
    check = result.step.observers[-1]
    assert check.watches_weights
    result.step(batch)
    assert check.watches_weights is goes_on


class OwnLoss(Tagger):
    """Computes its loss in the forward, and ignores the label 0."""

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(super().forward(ids).flatten(0, 1), targets.flatten(), ignore_index=0)


def test_padding_of_a_later_batch_is_seen_in_a_forward_that_takes_its_own_loss():
    ids = tokens()["input_ids"]
    full, padded = {"ids": ids, "targets": ids.clamp(min=1)}, {"ids": ids, "targets": ids.clamp(min=1)}
    padded["targets"] = padded["targets"].clone()
    padded["targets"][4:, 2:] = 0
    result = step_of(OwnLoss, full)
    result.step(full)
    with pytest.raises(DecisionError, match="cross_entropy is a mean over"):
        result.step(padded)


def test_a_batch_whose_loss_takes_no_such_mean_does_not_end_the_watch():
    calls = []

    def sometimes(output, batch):
        calls.append(0)
        return (
            of_classes(output, batch)
            if len(calls) > 4
            else (cross_entropy if len(calls) < 3 else squared)(output, batch)
        )

    result = step_of(Perceptron, vectors(6), sometimes)
    without_coupling_check(result)  # which would call it more often
    for _ in range(2):
        result.step(vectors(6))
    with pytest.raises(DecisionError, match="cross_entropy is a mean over"):
        result.step(vectors(6))


def test_an_error_in_the_first_step_leaves_no_gradient_and_the_check_to_the_next():
    calls = []

    def fails_once(output, batch):
        calls.append(0)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("in the second micro-batch")
        return of_classes(output, batch)

    result = step_of(Perceptron, vectors(6), fails_once)
    with pytest.raises(torch.OutOfMemoryError):
        result.step(vectors(6))
    assert all(parameter.grad is None for parameter in result.module.parameters())
    with pytest.raises(DecisionError, match="cross_entropy is a mean over"):
        result.step(vectors(6))


class Counting(Perceptron):
    """Counts its forwards in a buffer, in evaluation mode too, and draws from Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        random.random()
        return super().forward(x)


def test_probing_a_loss_changes_neither_buffers_nor_random_numbers():
    result = step_of(Counting, vectors(6), cross_entropy)
    random.seed(3)
    result.step(vectors(6))
    assert result.module.forwards == 2
    drawn = random.random()
    random.seed(3)
    assert [random.random() for _ in range(3)][-1] == drawn


def test_a_loss_in_chunks_is_seen_too():
    model, batch = seeded(gpt2), tokens()
    decisions = (UNEVEN, ChunkedLoss(module="lm_head", chunks=3))
    rewrite.apply(plan_for(model, batch, *decisions, optimizer="sgd"), model).step(batch)


class SumOverConstant(nn.Module):
    """A language model whose loss is a sum of cross entropies, divided by a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(96, 8), nn.Linear(8, 96)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = self.lm_head(self.embed(input_ids))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 40
        return SimpleNamespace(loss=loss)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_sum_over_a_constant_in_chunks_is_refused_and_uses_no_whole_logits(size):
    batch = {"input_ids": torch.randint(96, (16, 5)), "labels": torch.randint(96, (16, 5))}
    decisions = (Accumulation(micro_batch_size=size, micro_batches=16 // size), ChunkedLoss(module="lm_head", chunks=5))
    model = seeded(SumOverConstant)
    rewritten = rewrite.apply(plan_for(model, batch, *decisions, optimizer="sgd"), model)
    rewritten.step.observers = rewritten.step.observers[-1:]  # the check of the first step computes whole logits
    before = copy.deepcopy(model.state_dict())
    with (
        mock.patch.object(nn.functional, "linear", side_effect=nn.functional.linear) as linear,
        pytest.raises(DecisionError, match="the loss compares samples, or is a sum"),
    ):
        rewritten.step(batch)
    rows = max(call.args[0].numel() // 8 for call in linear.call_args_list)
    assert rows <= 2 * size, "two micro-batches of 5 rows a sample, in 5 chunks"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# ---- what transformers' batches state ----------------------------------------------------------------------------


def bert(kind: str, **options) -> nn.Module:
    import transformers

    return getattr(transformers, kind)(transformers.BertConfig(**roberta_config(**options)))


def two_losses() -> nn.Module:
    return bert("BertForPreTraining")


def test_a_loss_of_several_means_is_refused():
    batch = {**tokens(), "next_sentence_label": torch.arange(6) % 2}
    result = step_of(two_losses, batch)
    with pytest.raises(DecisionError, match="forbid accumulation if the loss is made of several means"):
        result.step(batch)


def classifier(**options) -> nn.Module:
    return bert("BertForSequenceClassification", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options)


def test_labels_of_samples_count_unless_they_are_ignored_or_numbers():
    classes = {**tokens(), "labels": torch.tensor([0, 1, -100, 2, 0, -100])}
    model = seeded(classifier, num_labels=3).double()
    assert largest_relative_error(model, UNEVEN, batches=[classes]) < 1e-12
    step_of(lambda: classifier(num_labels=3), classes).step(classes)
    numbers = {**tokens(), "labels": torch.tensor([0.0, 1.0, -100.0, 2.0, 0.0, -100.0], dtype=torch.float64)}
    assert largest_relative_error(seeded(classifier, num_labels=1).double(), UNEVEN, batches=[numbers]) < 1e-12


def test_a_loss_that_a_batch_divides_by_a_number_is_summed_up():
    batch = {**tokens(), "num_items_in_batch": torch.tensor(37)}
    found = verified(gpt2, batch, UNEVEN)
    assert found.passed, str(found)
    step_of(gpt2, batch).step({**batch, "num_items_in_batch": 37})


def test_models_that_leave_the_number_of_items_alone_are_weighted_by_labels():
    batch = {**tokens(), "num_items_in_batch": torch.tensor(37)}
    model = seeded(roberta, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).double()
    assert largest_relative_error(model, UNEVEN, batches=[batch]) < 1e-12


@pytest.mark.thorough
def test_experts_that_are_balanced_over_the_batch_are_not_split():
    import transformers

    config = {**roberta_config(), "num_key_value_heads": 2, "num_local_experts": 4}
    for balanced in (False, True):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**config, output_router_logits=balanced))
        options = {"vram": "1GiB", "gpu": "bare", "optimizer": "sgd", "only": ("accumulation",)}
        plan = planner.plan(model, tokens(), **options)
        reported = "balances its experts over all tokens of a batch" in " ".join(plan.notes)
        assert reported is balanced


# ---- the emitted file ------------------------------------------------------------------------------------------------


def test_a_file_takes_other_weights():
    plan = plan_for(Perceptron(), vectors(6), UNEVEN, loss_fn=summed)
    namespace: dict = {}
    exec(compile(rewrite.source(plan), "train_step.py", "exec"), namespace)
    weights = {}
    for name, terms in (("samples", namespace["samples_only"]), ("sum", lambda batch, samples: 1)):
        model = namespace["rewrite"](seeded(Perceptron, dropout=0.0))
        arguments = (model, sgd(model.parameters()), vectors(6))
        weights[name] = namespace["training_step"](*arguments, loss_fn=summed, loss_terms=terms)
    whole = summed(seeded(Perceptron, dropout=0.0)(vectors(6)[0]), vectors(6))
    torch.testing.assert_close(weights["sum"], whole.detach())
    assert abs(weights["samples"] - whole) > 0.1 * whole
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'loss_terms'"):
        namespace["training_step"](*arguments, loss_fn=summed)  # which no label of a batch tells
