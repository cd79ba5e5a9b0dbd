"""Losses that the Trainer's micro-batches cannot reproduce are refused, and nothing is trained."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from planner import rewrite
from planner.errors import DecisionError, WorkloadError
from planner.plan_types.decisions import Accumulation, Precision
from tests.support.training import gpt2, plan_for, roberta_config, seeded, tokens, vectors

pytestmark = pytest.mark.slow

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

IN_THREE = Accumulation(micro_batch_size=2, micro_batches=3)
"""Splits batches of 6 samples."""


def rows(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def settings(folder, **changes) -> dict:
    return {
        "output_dir": str(folder), "use_cpu": True, "num_train_epochs": 2, "learning_rate": 0.05, "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant", "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "remove_unused_columns": False, **changes,
    }  # fmt: skip


def trained(model, arguments: dict, data, callbacks=(), kind=transformers.Trainer, **options) -> None:
    args = transformers.TrainingArguments(**arguments)
    kind(model=model, args=args, train_dataset=data, callbacks=list(callbacks), **options).train()


def by_the_plan(model, batch, data, folder, *decisions, **options):
    plan = plan_for(model, batch, *(decisions or (IN_THREE,)), optimizer="sgd")
    rewritten = rewrite.apply_for_trainer(plan, model)
    callbacks = [rewrite.trainer_callback(rewritten), *options.pop("callbacks", ())]
    arguments = rewrite.training_arguments(plan, **settings(folder, **options.pop("changes", {})))
    try:
        trained(model, arguments, data, callbacks, **options)
    finally:
        rewritten.undo()


def largest_difference(model, other) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((one - another).abs().max().item() for one, another in pairs)


def off_by(model, batch, data, folder, **options) -> float:
    """Largest difference of a parameter from training by the Trainer on whole batches of 6."""
    plain = copy.deepcopy(model)
    by_the_plan(model, batch, data, folder, **options)
    trained(plain, settings(folder, optim="sgd", per_device_train_batch_size=6), data, **options)
    return largest_difference(model, plain)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 3)
        self.double()

    def forward(self, inputs, labels=None):
        logits = self.layer(inputs)
        return {"logits": logits} if labels is None else {"loss": self.loss(logits, labels), "logits": logits}

    def loss(self, logits, labels):
        return F.cross_entropy(logits, labels)


class OfClasses(Classifier):
    def loss(self, logits, labels):
        return F.cross_entropy(logits, labels, weight=torch.tensor([1.0, 5.0, 25.0], dtype=logits.dtype))


class Sum(Classifier):
    def loss(self, logits, labels):
        return F.cross_entropy(logits, labels, reduction="sum")


class ByHand(Classifier):
    def loss(self, logits, labels):
        weight = 1.0 + logits.detach()[:, 0].square()
        return (F.cross_entropy(logits, labels, reduction="none") * weight).sum() / weight.sum()


class Contrastive(Classifier):
    def loss(self, logits, labels):
        return F.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


class Autoencoder(Classifier):
    def forward(self, inputs):
        return (F.mse_loss(self.layer(inputs), inputs[:, :3]),)


class Shifting(nn.Module):
    """Wraps a model that ignores the first label of each sample, without showing that."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask=None, labels=None):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


class LikePeft(Shifting):
    def forward(self, **options):
        return self.model(**options)

    def get_base_model(self):
        return self.model


def classified(samples: int = 6) -> dict[str, torch.Tensor]:
    inputs, labels = vectors(samples, dtype=torch.float64)
    return {"inputs": inputs, "labels": labels}


def unlabelled(samples: int = 6) -> dict[str, torch.Tensor]:
    return {"inputs": classified(samples)["inputs"]}


def spans(samples: int = 6) -> dict[str, torch.Tensor]:
    batch = {name: tensor for name, tensor in tokens(samples).items() if name != "labels"}
    return {**batch, "start_positions": torch.arange(samples) % 5, "end_positions": torch.arange(samples) % 5 + 2}


def pairs(samples: int = 6) -> dict[str, torch.Tensor]:
    return {**tokens(samples), "next_sentence_label": torch.arange(samples) % 2}


def bert(kind: str) -> nn.Module:
    config = transformers.BertConfig(
        **roberta_config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_hidden_layers=1)
    )
    return getattr(transformers, kind)(config).double()


def causal() -> nn.Module:
    return gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).double()


REFUSED = {
    "class weights": (OfClasses, classified, r"cross_entropy is a mean over [\d., ]+ terms: plan with accumulation"),
    "a sum": (Sum, classified, r"but the loss is a sum: plan with accumulation forbidden"),
    "a mean by hand": (ByHand, classified, "the gradient of 2 samples comes out"),
    "samples that are compared": (Contrastive, classified, "the loss compares samples"),
    "two means": (lambda: bert("BertForPreTraining"), pairs, r"is a mean over [\d, ]+ terms"),
    "a shift that is not stated": (lambda: Shifting(causal()), tokens, "cross_entropy is a mean over 11, 10, 9 terms"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_that_is_a_mean_over_something_else_is_refused_before_anything_is_trained(case, tmp_path):
    build, batch_of, reported = REFUSED[case]
    model = seeded(build)
    before = copy.deepcopy(model)
    with pytest.raises(DecisionError, match=reported):
        by_the_plan(model, batch_of(), rows(batch_of(6)), tmp_path, changes={"train_sampling_strategy": "sequential"})
    assert largest_difference(model, before) == 0.0


def test_the_model_inside_of_a_peft_model_tells_how_its_loss_counts(tmp_path):
    model = seeded(lambda: LikePeft(causal()))
    assert off_by(model, tokens(), rows(tokens(10)), tmp_path) < 1e-8  # GPT-2 takes its loss in fp32


def own_loss(outputs, labels):
    return F.cross_entropy(outputs["logits"], labels)


class WithoutLabels(transformers.Trainer):
    """A loss of the user, written in the usual way."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        return (own_loss(outputs, labels), outputs) if return_outputs else own_loss(outputs, labels)


def test_a_loss_of_ones_own_is_refused_where_labels_never_reach_the_model(tmp_path):
    """The Trainer would assume that it is divided by the number of labels, and train with three times the gradient."""
    with pytest.raises(DecisionError, match="was called without labels or num_items_in_batch"):
        by_the_plan(seeded(Classifier), classified(), rows(classified(12)), tmp_path, kind=WithoutLabels)


def test_a_loss_function_that_divides_by_the_number_of_labels_is_left_to_it(tmp_path, caplog):
    def summed(outputs, labels, num_items_in_batch):
        return F.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    model = seeded(Classifier)
    assert off_by(model, classified(), rows(classified(11)), tmp_path, compute_loss_func=summed) < 1e-12
    assert caplog.text.count("a sum divided by num_items_in_batch") == 1


# ---- batches without labels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [12, 7])
@pytest.mark.thorough
def test_spans_are_weighted_alike_where_micro_batches_are_of_one_size(samples, tmp_path):
    """Of 7 samples, the last is a batch of its own."""
    model = seeded(bert, "BertForQuestionAnswering")
    assert off_by(model, spans(), rows(spans(samples)), tmp_path) < 1e-12


@pytest.mark.parametrize(
    ("build", "batch_of"), [(lambda: bert("BertForQuestionAnswering"), spans), (Autoencoder, unlabelled)]
)
@pytest.mark.thorough
def test_parts_of_several_sizes_without_labels_are_refused_when_training_begins(build, batch_of, tmp_path):
    model = seeded(build)
    before = copy.deepcopy(model)
    with pytest.raises(DecisionError, match="micro-batches of a step have 2, 1 samples and no labels"):
        by_the_plan(model, batch_of(), rows(batch_of(9)), tmp_path)
    assert largest_difference(model, before) == 0.0
    by_the_plan(model, batch_of(), rows(batch_of(9)), tmp_path, changes={"dataloader_drop_last": True})
    by_the_plan(model, batch_of(), rows(batch_of(9)), tmp_path, changes={"max_steps": 1})


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        self.rows = rows(batch)

    def __iter__(self):
        return iter(self.rows)


def test_parts_of_several_sizes_of_a_stream_are_refused_when_they_come(tmp_path):
    with pytest.raises(DecisionError, match="micro-batches of a step have 2, 2, 1 samples and no labels"):
        by_the_plan(seeded(Autoencoder), unlabelled(), Stream(unlabelled(11)), tmp_path, changes={"max_steps": 4})


def test_a_stream_that_ends_within_a_batch_is_refused(tmp_path):
    """The Trainer would add the gradients of the rest to those of the next batch."""
    model, stream = seeded(Classifier), Stream(classified(10))
    with pytest.raises(DecisionError, match="ended after 2 of the 3 micro-batches of a step"):
        by_the_plan(model, classified(), stream, tmp_path, changes={"max_steps": 3})
    by_the_plan(model, classified(), stream, tmp_path, changes={"max_steps": 1})
    by_the_plan(model, classified(), Stream(classified(12)), tmp_path, changes={"max_steps": 3})


# ---- what a training that failed leaves ------------------------------------------------------------------------------


class Failing(transformers.TrainerCallback):
    def on_substep_end(self, *_, **__):
        raise InterruptedError


def test_a_model_whose_training_failed_is_restored_without_hooks(tmp_path):
    model, batch = seeded(Classifier).float(), {**classified(), "inputs": classified()["inputs"].float()}
    plan = plan_for(model, batch, IN_THREE, Precision(dtype="bf16"), optimizer="sgd")
    rewritten = rewrite.apply_for_trainer(plan, model)
    callbacks = [rewrite.trainer_callback(rewritten), Failing()]
    arguments = rewrite.training_arguments(plan, **settings(tmp_path))
    with pytest.raises(InterruptedError):
        trained(model, arguments, rows(batch), callbacks)
    assert model._forward_pre_hooks
    rewritten.undo()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_a_forward_that_fails_is_no_longer_watched(tmp_path):
    depth = torch._C._len_torch_function_stack()
    longer = {name: torch.cat([tensor, tensor]) for name, tensor in classified().items()}
    with pytest.raises(WorkloadError, match="make the plan again for the largest batch"):
        by_the_plan(
            seeded(Classifier), classified(), rows(longer), tmp_path,
            data_collator=lambda found: {name: tensor[:5] for name, tensor in longer.items()},
        )  # fmt: skip
    assert torch._C._len_torch_function_stack() == depth
