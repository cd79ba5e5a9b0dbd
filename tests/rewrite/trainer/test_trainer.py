"""transformers' Trainer trains a rewritten model like the original on a whole batch, and has to follow the plan."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging

import pytest
import torch
import transformers

import planner
from planner import rewrite
from planner.errors import DecisionError, PlanFileError, PromiseError, WorkloadError
from planner.plan_types.decisions import (
    Accumulation,
    ChunkedLoss,
    Freeze,
    Optimizer,
    OptimizerKernel,
    Precision,
    StepInBackward,
)
from planner.plan_types.recompute_decisions import Checkpoint
from planner.rewrite import memory_promise
from planner.rewrite.trainer import callback
from tests.support.training import cross_entropy, gpt2, plan_for, roberta, roberta_config, seeded, tokens, vectors

pytestmark = pytest.mark.slow

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

STEPS, SAMPLES = 3, 6
IN_TWO = Accumulation(micro_batch_size=3, micro_batches=2)
IN_THREE = Accumulation(micro_batch_size=2, micro_batches=3)
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
NO_DROPOUT_GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def rows(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def settings(folder, **changes) -> dict:
    common = {
        "output_dir": str(folder), "use_cpu": True, "max_steps": STEPS, "learning_rate": 0.05, "logging_steps": 1,
        "lr_scheduler_type": "constant", "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    return {**common, **changes}


def trained(model, arguments: dict, data: list, callbacks=(), **options) -> list[float]:
    """Trains, and returns the losses of the Trainer's steps."""
    args = transformers.TrainingArguments(**arguments)
    trainer = transformers.Trainer(model=model, args=args, train_dataset=data, callbacks=list(callbacks), **options)
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def by_the_plan(plan, model, data, folder, **changes) -> list[float]:
    rewritten = rewrite.apply_for_trainer(plan, model)
    arguments = rewrite.training_arguments(plan, **settings(folder, **changes))
    losses = trained(model, arguments, data, [rewrite.trainer_callback(rewritten)])
    rewritten.undo()
    return losses


def largest_difference(model, other) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((one - another).abs().max().item() for one, another in pairs)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """One thread is faster for models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def planned():
    """A model in double, without dropout, and a plan that needs all of checkpoint, chunks and micro-batches."""
    model = seeded(roberta, vocab_size=3000, num_hidden_layers=1, **NO_DROPOUT).double()
    plan = planner.plan(
        model, tokens(SAMPLES, 24, vocabulary=3000), vram="4MB", gpu="bare", optimizer="sgd", fidelity="exact",
        force=("checkpoint", "chunked-loss", "accumulation"),
        forbid=("replay", "offload", "optimizer-kernel", "step-in-backward"),
    )  # fmt: skip
    assert {decision.kind for decision in plan.decisions} == {"checkpoint", "chunked-loss", "accumulation"}
    return plan, model


@pytest.mark.thorough
def test_a_planned_training_is_the_trainers_own_on_the_whole_batch(planned, tmp_path):
    """RoBERTa ignores the Trainer's count of labels, so that without the plan micro-batches train differently."""
    plan, model = planned
    data = rows(tokens(SAMPLES * STEPS, 24, vocabulary=3000))
    ours, plain, alone = (copy.deepcopy(model) for _ in range(3))
    losses = by_the_plan(plan, ours, data, tmp_path)
    whole = settings(tmp_path, optim="sgd", per_device_train_batch_size=SAMPLES)
    assert losses == pytest.approx(trained(plain, whole, data), rel=1e-6)  # the Trainer adds them up in fp32
    assert len(losses) == STEPS
    assert largest_difference(model, plain) > 1e-3
    assert largest_difference(ours, plain) < 1e-12
    parts = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    trained(alone, {**whole, **parts}, data)
    assert largest_difference(alone, plain) > 1e-4


class Regression(torch.nn.Module):
    """A model that does not accept the Trainer's count of labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 2))

    def forward(self, inputs, labels):
        return {"loss": torch.nn.functional.mse_loss(self.layers(inputs), labels)}


def numbers(samples: int = SAMPLES, seed: int = 0) -> dict[str, torch.Tensor]:
    inputs, _ = vectors(samples, seed, torch.float64)
    return {"inputs": inputs, "labels": inputs[:, :2].cos()}


def sorted_texts(samples: int = SAMPLES, seed: int = 0) -> dict[str, torch.Tensor]:
    return {**tokens(samples, seed=seed), "labels": torch.arange(samples) % 2}


def tagged(samples: int = SAMPLES, seed: int = 0) -> dict[str, torch.Tensor]:
    batch = tokens(samples, seed=seed)
    return {**batch, "labels": torch.where(batch["labels"] < 0, -100, batch["labels"] % 3)}


def of_roberta(kind: str, **options) -> torch.nn.Module:
    config = transformers.RobertaConfig(**roberta_config(**NO_DROPOUT, **options))
    return getattr(transformers, kind)(config)


MODELS = {
    "no count": (Regression, numbers, "layers.0", 1e-12),
    "counted otherwise than its loss": (lambda: gpt2(**NO_DROPOUT_GPT2), tokens, "transformer.h.0", 1e-8),
    "a label a sample": (lambda: of_roberta("RobertaForSequenceClassification"), sorted_texts, "classifier", 1e-12),
    "a label a token": (
        lambda: of_roberta("RobertaForTokenClassification", num_labels=3), tagged, "classifier", 1e-12
    ),
}  # fmt: skip
"""GPT-2 computes its loss in fp32."""


@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)
@pytest.mark.thorough_after(2)
def test_micro_batches_of_any_model_make_up_the_trainers_whole_batch(case, tmp_path):
    build, data_of, module, bound = case
    model = seeded(build).double()
    plan = plan_for(model, data_of(), IN_THREE, Checkpoint(modules=(module,)), optimizer="sgd-momentum")
    data, plain = rows(data_of(SAMPLES * STEPS)), copy.deepcopy(model)
    losses = by_the_plan(plan, model, data, tmp_path)
    whole = {"optim": "sgd", "optim_args": "momentum=0.9", "per_device_train_batch_size": SAMPLES}
    assert losses == pytest.approx(trained(plain, settings(tmp_path, **whole), data), rel=1e-6)
    assert largest_difference(model, plain) < bound


@pytest.mark.parametrize("decisions", [(), (Precision(dtype="bf16"), ChunkedLoss(module="lm_head.decoder", chunks=3))])
def test_the_trainer_takes_the_very_steps_of_the_rewritten_step(decisions, tmp_path):
    model = seeded(roberta, **NO_DROPOUT)
    decisions = (
        *decisions,
        IN_TWO,
        Checkpoint(modules=("roberta.encoder.layer.1",)),
        Freeze(modules=("lm_head.dense",)),
    )
    plan, other = plan_for(model, tokens(), *decisions), copy.deepcopy(model)
    batch = tokens()
    by_the_plan(plan, model, rows(batch), tmp_path, train_sampling_strategy="sequential")
    rewritten = rewrite.apply(plan, other, lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.0), max_grad_norm=1.0)
    for _ in range(STEPS):
        rewritten.step(batch)
    assert largest_difference(model, other) == 0.0


def test_evaluation_gives_what_the_plain_model_does(tmp_path):
    model, data = seeded(roberta), rows(tokens(4))
    plan = plan_for(model, tokens(), IN_TWO, ChunkedLoss(module="lm_head.decoder", chunks=3))
    arguments = rewrite.training_arguments(plan, **settings(tmp_path))
    found = []
    for _ in range(2):
        args = transformers.TrainingArguments(**arguments)
        found.append(transformers.Trainer(model=model, args=args, eval_dataset=data).evaluate()["eval_loss"])
        rewrite.apply_for_trainer(plan, model)
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_undo_gives_the_model_back(tmp_path):
    model = seeded(roberta)
    plan = plan_for(model, tokens(), IN_TWO, Checkpoint(modules=("roberta.encoder.layer.1",)))
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    rewritten = rewrite.apply_for_trainer(plan, model)
    assert "forward" in vars(model.get_submodule("roberta.encoder.layer.1"))
    trained(
        model,
        rewrite.training_arguments(plan, **settings(tmp_path)),
        rows(tokens()),
        [rewrite.trainer_callback(rewritten)],
    )
    rewritten.undo()
    rewritten.undo()
    after = {name: dict(vars(module)) for name, module in model.named_modules()}
    added = {name for own in before for name in set(after[own]) ^ set(before[own])}
    assert added.isdisjoint({"forward", "accepts_loss_kwargs"}), added
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_undo_takes_off_what_accelerate_put_around_the_whole_model(tmp_path):
    model = seeded(Regression)
    data = rows({name: tensor.float() for name, tensor in numbers().items()})
    plan = plan_for(
        model, transformers.default_data_collator(data), Checkpoint(modules=("",)), Precision(dtype="bf16")
    )  # fmt: skip
    rewritten = rewrite.apply_for_trainer(plan, model)
    arguments = rewrite.training_arguments(plan, **settings(tmp_path))
    trained(model, arguments, data, [rewrite.trainer_callback(rewritten)])
    assert "_original_forward" in vars(model)
    rewritten.undo()
    assert "forward" not in vars(model)


@pytest.mark.thorough
def test_a_training_goes_on_from_the_trainers_checkpoint_to_the_same_bits(tmp_path):
    plan = plan_for(seeded(roberta), tokens(), IN_TWO, Optimizer(), Checkpoint(modules=("roberta.encoder.layer.1",)))
    found = []
    for resumed in (None, str(tmp_path / "checkpoint-2")):
        torch.manual_seed(5 if resumed else 0)
        model = roberta()
        rewritten = rewrite.apply_for_trainer(plan, model)
        changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        args = transformers.TrainingArguments(**rewrite.training_arguments(plan, **settings(tmp_path, **changes)))
        callbacks = [rewrite.trainer_callback(rewritten, steps=2)]
        data = rows(tokens(4 * SAMPLES))
        trainer = transformers.Trainer(model=model, args=args, train_dataset=data, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resumed)
        found.append(model)
    assert largest_difference(*found) == 0.0


# ---- arguments ---------------------------------------------------------------------------------------------------


def a_plan(*decisions, **changes):
    return plan_for(seeded(roberta), tokens(changes.pop("samples", SAMPLES)), *decisions, **changes)


@pytest.mark.parametrize(
    ("decisions", "changes", "expected"),
    [
        ((), {}, {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1, "bf16": False, "fp16": False}),
        ((), {}, {"optim": "adamw_torch", "activation_checkpointing": False}),
        ((IN_TWO,), {}, {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}),
        ((Precision(dtype="bf16"),), {}, {"bf16": True, "fp16": False}),
        ((Precision(dtype="fp16"),), {}, {"bf16": False, "fp16": True}),
        ((OptimizerKernel(kernel="fused"),), {}, {"optim": "adamw_torch_fused"}),
        ((OptimizerKernel(kernel="fused"),), {"optimizer": "sgd"}, {"optim": "sgd"}),
        ((OptimizerKernel(kernel="for-loop"),), {"optimizer": "rmsprop"}, {"optim": "rmsprop"}),
        ((Optimizer(),), {}, {"optim": "adamw_bnb_8bit"}),
        ((), {"optimizer": "sgd-momentum"}, {"optim": "sgd", "optim_args": "momentum=0.9"}),
        ((), {"optimizer": "adam"}, {"optim": "adamw_torch", "weight_decay": 0.0}),
        ((Accumulation(micro_batch_size=22, micro_batches=3),), {"samples": 64},
         {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4}),
    ],
)  # fmt: skip
def test_arguments_say_what_was_decided(decisions, changes, expected):
    arguments = rewrite.training_arguments(a_plan(*decisions, **changes))
    assert {name: arguments[name] for name in expected} == expected


def test_an_optimizer_without_a_name_is_left_to_the_user():
    assert "optim" not in rewrite.training_arguments(a_plan(optimizer="mine.Lion"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"per_device_train_batch_size": 6}, "per_device_train_batch_size=6 contradicts the plan, which has 3"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4 contradicts the plan, which has 2"),
        ({"bf16": True}, "bf16=True contradicts the plan, which has False"),
        ({"optim": "adamw_torch_fused"}, "optim='adamw_torch_fused' contradicts the plan, which has 'adamw_torch'"),
        ({"gradient_checkpointing": True}, "activation_checkpointing=True contradicts the plan: the rewritten model"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 contradicts the plan"),
        ({"torch_compile": True}, "torch_compile=True contradicts the plan"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True contradicts the plan"),
    ],
)  # fmt: skip
def test_overrides_that_contradict_the_plan_are_refused_by_name(override, message):
    with pytest.raises(DecisionError, match=message):
        rewrite.training_arguments(a_plan(IN_TWO), **override)


def test_what_agrees_with_the_plan_and_what_it_is_silent_about_may_be_given():
    given = {"bf16": False, "optim": "adamw_8bit", "learning_rate": 3e-5, "max_grad_norm": 0.5, "fsdp": ""}
    assert given.items() <= rewrite.training_arguments(a_plan(Optimizer()), **given).items()


@dataclasses.dataclass
class ArgumentsOfOldTimes:
    output_dir: str
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    bf16: bool = False
    fp16: bool = False
    optim: str = "adamw_hf"
    gradient_checkpointing: bool = False
    no_cuda: bool = False
    evaluation_strategy: str = "no"


def test_arguments_have_the_names_of_the_class_that_takes_them():
    given = {"output_dir": "out", "use_cpu": True, "eval_strategy": "steps"}
    made = ArgumentsOfOldTimes(**rewrite.training_arguments(a_plan(IN_TWO), kind=ArgumentsOfOldTimes, **given))
    assert (made.no_cuda, made.evaluation_strategy, made.gradient_checkpointing) == (True, "steps", False)
    today = rewrite.training_arguments(a_plan(), no_cuda=True, evaluation_strategy="steps")
    assert (today["use_cpu"], today["eval_strategy"]) == (True, "steps")
    with pytest.raises(WorkloadError, match="has no argument 'learning_rat'"):
        rewrite.training_arguments(a_plan(), learning_rat=1.0)
    with pytest.raises(DecisionError, match="names of the same argument"):
        rewrite.training_arguments(a_plan(), no_cuda=True, use_cpu=True)


def test_a_loop_of_the_user_accumulates_as_often_as_it_likes():
    plan = a_plan(IN_TWO)
    plan = dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, gradients_alive=True))
    assert rewrite.training_arguments(plan, gradient_accumulation_steps=8)["gradient_accumulation_steps"] == 8
    with pytest.raises(DecisionError, match="gradient_accumulation_steps=7"):
        rewrite.training_arguments(plan, gradient_accumulation_steps=7)


# ---- plans that the Trainer cannot follow ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use", [rewrite.training_arguments, lambda plan: rewrite.apply_for_trainer(plan, seeded(roberta))]
)
def test_a_step_in_backward_is_refused_with_what_to_plan_instead(use):
    with pytest.raises(DecisionError, match="--forbid step-in-backward"):
        use(a_plan(StepInBackward()))


def test_other_batches_losses_and_models_are_refused():
    model = torch.nn.Linear(16, 3)
    with pytest.raises(WorkloadError, match="plan without loss_fn"):
        rewrite.apply_for_trainer(plan_for(model, vectors(), loss_fn=cross_entropy), model)
    with pytest.raises(WorkloadError, match="plan with a dict"):
        rewrite.apply_for_trainer(plan_for(model, vectors()), model)
    with pytest.raises(PlanFileError, match="made for another model"):
        rewrite.apply_for_trainer(a_plan(), seeded(gpt2))


def test_sparse_gradients_are_refused():
    model = seeded(roberta, tie_word_embeddings=False)
    model.roberta.embeddings.word_embeddings.sparse = True
    with pytest.raises(WorkloadError, match=r"'roberta\.embeddings\.word_embeddings' makes sparse gradients"):
        rewrite.apply_for_trainer(plan_for(model, tokens(), optimizer="sgd"), model)


def test_micro_batches_that_cannot_be_of_one_size_are_refused():
    plan = a_plan(Accumulation(micro_batch_size=4, micro_batches=2), samples=7)
    with pytest.raises(DecisionError, match=r"a batch of 7 into 2 micro-batches of 4 .*a batch of 8"):
        rewrite.training_arguments(plan)


def test_a_model_is_left_as_it_was_where_a_decision_cannot_be_applied():
    model = seeded(roberta)
    plan = plan_for(model, tokens(), Checkpoint(modules=("roberta.encoder.layer.0", "roberta.nothing")))
    with pytest.raises(DecisionError, match=r"roberta\.nothing"):
        rewrite.apply_for_trainer(plan, model)
    assert "forward" not in vars(model.get_submodule("roberta.encoder.layer.0"))


# ---- the callback ------------------------------------------------------------------------------------------------


def train_beside_the_plan(tmp_path, plan, *, data=None, model=None, callback=None, changes=(), **options) -> None:
    """Arguments are changed after they were made from the plan."""
    model = model or seeded(roberta)
    rewritten = rewrite.apply_for_trainer(plan, model)
    arguments = {**rewrite.training_arguments(plan, **settings(tmp_path)), **dict(changes)}
    callbacks = [rewrite.trainer_callback(rewritten, **(callback or {}))]
    trained(options.pop("instead", model), arguments, data or rows(tokens(SAMPLES)), callbacks, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"per_device_train_batch_size": 6}, "per_device_train_batch_size=6 contradicts"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps=1 contradicts"),
        ({"bf16": True}, "bf16=True contradicts"),
        ({"optim": "sgd"}, "optimizer is torch.optim.sgd.SGD, and the plan was made with adamw"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 contradicts"),
    ],
)  # fmt: skip
def test_arguments_that_were_not_planned_are_refused_when_training_begins(changes, message, tmp_path):
    with pytest.raises(DecisionError, match=message):
        train_beside_the_plan(tmp_path, a_plan(IN_TWO), changes=changes)


def test_another_model_object_is_refused_when_training_begins(tmp_path):
    with pytest.raises(PlanFileError, match="another model object"):
        train_beside_the_plan(tmp_path, a_plan(IN_TWO), instead=seeded(roberta))


def test_a_model_that_was_undone_is_refused_when_training_begins(tmp_path):
    plan, model = a_plan(IN_TWO), seeded(roberta)
    rewritten = rewrite.apply_for_trainer(plan, model)
    callback = rewrite.trainer_callback(rewritten)
    rewritten.undo()
    with pytest.raises(DecisionError, match="apply it again"):
        trained(model, rewrite.training_arguments(plan, **settings(tmp_path)), rows(tokens()), [callback])


@pytest.mark.parametrize(
    ("planned", "momentum", "message"),
    [("sgd", 0.9, "plan with optimizer sgd-momentum"), ("sgd-momentum", 0.0, "plan with optimizer sgd,")],
)  # fmt: skip
def test_another_momentum_is_refused_when_training_begins(planned, momentum, message, tmp_path):
    model = seeded(roberta)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    with pytest.raises(DecisionError, match=message):
        train_beside_the_plan(tmp_path, a_plan(optimizer=planned), model=model, optimizers=(optimizer, None))


@pytest.mark.parametrize(
    ("planned", "bits", "is_paged", "fits"),
    [("paged_adamw_8bit", 8, True, True), ("paged_adamw_8bit", 8, False, False), ("paged_adamw_32bit", 8, True, False)],
)
def test_optimizers_of_bitsandbytes_are_known_by_their_bits_and_pages(planned, bits, is_paged, fits):
    """The Trainer makes all of them with one class."""
    bitsandbytes = pytest.importorskip("bitsandbytes", exc_type=ImportError)
    optimizer = bitsandbytes.optim.AdamW(seeded(roberta).parameters(), optim_bits=bits, is_paged=is_paged)
    plan = a_plan(optimizer=planned)
    assert rewrite.training_arguments(plan, output_dir="out")["optim"] == planned
    with contextlib.nullcontext() if fits else pytest.raises(DecisionError, match="the plan was made with paged"):
        callback.refuse_another_optimizer(plan, optimizer)


def test_several_devices_are_refused_when_training_begins(tmp_path):
    model = seeded(roberta)
    callback = rewrite.trainer_callback(rewrite.apply_for_trainer(a_plan(), model))
    args = transformers.TrainingArguments(**rewrite.training_arguments(a_plan(), **settings(tmp_path)))
    args._n_gpu = 2
    with pytest.raises(DecisionError, match="train on 2 devices, and the plan is for one"):
        callback.on_train_begin(args, None, None, model=model, optimizer=torch.optim.AdamW(model.parameters()))


def test_a_batch_that_is_larger_than_planned_is_refused_in_the_first_steps(tmp_path):
    with pytest.raises(WorkloadError, match=r"'input_ids' is \[3, 12\] of int64, and the plan is for \[3, 10\]"):
        train_beside_the_plan(tmp_path, a_plan(IN_TWO), data=rows(tokens(SAMPLES, 12)))


@pytest.mark.thorough
def test_a_batch_that_is_larger_than_planned_is_logged_later_on(tmp_path, caplog):
    short, long = rows(tokens(2 * SAMPLES, 8)), rows(tokens(SAMPLES, 12))
    plan, changes = a_plan(IN_TWO), {"train_sampling_strategy": "sequential"}
    train_beside_the_plan(tmp_path, plan, data=short + long, callback={"steps": 2}, changes=changes)
    assert len([record for record in caplog.records if "nothing was promised for it" in record.message]) == 1
    with pytest.raises(PromiseError, match="nothing was promised for it"):
        callback = {"steps": 2, "on_broken": "raise"}
        train_beside_the_plan(tmp_path, plan, data=short + long, callback=callback, changes=changes)


def test_tensors_that_were_not_planned_are_logged(tmp_path, caplog):
    batch = tokens(SAMPLES)
    kinds = {**batch, "token_type_ids": torch.zeros_like(batch["input_ids"])}
    train_beside_the_plan(tmp_path, a_plan(IN_TWO), data=rows(kinds))
    message = [record.message for record in caplog.records if "memory may differ from the plan" in record.message]
    assert len(message) == 1
    assert "attention_mask, input_ids, labels, token_type_ids" in message[0]


class WithoutCount(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss


def test_a_loss_without_the_count_of_labels_is_refused(tmp_path):
    model = seeded(roberta)
    rewritten = rewrite.apply_for_trainer(plan_for(model, tokens(), IN_TWO), model)
    args = transformers.TrainingArguments(**rewrite.training_arguments(rewritten.plan, **settings(tmp_path)))
    callbacks = [rewrite.trainer_callback(rewritten)]
    with pytest.raises(DecisionError, match="without labels or num_items_in_batch"):
        WithoutCount(model=model, args=args, train_dataset=rows(tokens()), callbacks=callbacks).train()


def test_labels_that_are_counted_otherwise_than_averaged_are_refused(tmp_path):
    """The Trainer ignores the label -100, and the model another one."""
    model = seeded(roberta)
    rewritten = rewrite.apply_for_trainer(plan_for(model, tokens(), IN_TWO), model)
    rewritten.share.ignored = 5
    arguments = rewrite.training_arguments(rewritten.plan, **settings(tmp_path))
    with pytest.raises(DecisionError, match=r"the Trainer counted \d+ labels .* plan with accumulation forbidden"):
        trained(model, arguments, rows(tokens()), [rewrite.trainer_callback(rewritten)])


PROMISED = (300 << 20, 320 << 20)
OWN = 2**16 + SAMPLES * 10
"""Bytes that the Trainer allocates in addition to the plan: scalars, and one byte per label."""


@pytest.mark.parametrize(
    ("peaks", "level", "message"),
    [
        (PROMISED, "INFO", "promise was kept: 300.0 MiB allocated of 300.0 MiB, 320.0 MiB reserved of 320.0 MiB"),
        ((PROMISED[0] + OWN, PROMISED[1] + 2**21), "INFO", "promise was kept: 300.1 MiB allocated of 300.0 MiB, 322.0"),
        ((PROMISED[0] + OWN + 1, PROMISED[1]), "WARNING", "promise was broken: 300.1 MiB allocated of 300.0 MiB"),
        ((PROMISED[0], 400 << 20), "WARNING", "promise was broken: 300.0 MiB allocated of 300.0 MiB, 400.0 MiB"),
        (None, "WARNING", "could not be measured: there is no CUDA device here"),
    ],
)  # fmt: skip
@pytest.mark.thorough_after(2)
def test_whether_the_promise_was_kept_is_logged_in_one_line(peaks, level, message, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "planner.rewrite")
    monkeypatch.setattr(memory_promise, "peaks_on", lambda device: peaks)
    train_beside_the_plan(tmp_path, a_plan(IN_TWO))
    found = [record for record in caplog.records if "promise" in record.message]
    assert [record.levelname for record in found] == [level]
    assert message in found[0].message


def test_a_broken_promise_is_raised_where_that_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_promise, "peaks_on", lambda device: (PROMISED[0], 400 << 20))
    with pytest.raises(PromiseError, match=r"broken.*plan with less than the budget of 6\.00 GiB"):
        train_beside_the_plan(tmp_path, a_plan(IN_TWO), callback={"on_broken": "raise"})


def test_nothing_is_said_to_be_kept_that_was_not_measured(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(memory_promise, "peaks_on", lambda device: (1, 1))
    train_beside_the_plan(tmp_path, a_plan(card="bare"))
    assert "the plan is for a bare card" in caplog.text
    train_beside_the_plan(tmp_path, a_plan(), changes={"max_steps": 2})
    assert "training ended after 2 of the 3 steps" in caplog.text
    with pytest.raises(DecisionError, match="give at least 2"):
        rewrite.trainer_callback(rewrite.apply_for_trainer(a_plan(), seeded(roberta)), steps=1)


@pytest.mark.parametrize(
    ("optimizer", "kernel", "option"),
    [
        ("rmsprop", "for-loop", {"foreach": False}),
        ("sgd", "fused", {"fused": True}),
        ("adamw", "fused", {"fused": True}),
    ],
)  # fmt: skip
def test_the_trainers_optimizer_steps_by_the_planned_kernel(optimizer, kernel, option, tmp_path):
    model, seen = seeded(roberta), []

    class Look(transformers.TrainerCallback):
        def on_step_end(self, *_, optimizer, **__):
            seen.append([{name: group[name] for name in option} for group in optimizer.param_groups])

    rewritten = rewrite.apply_for_trainer(
        plan_for(model, tokens(), OptimizerKernel(kernel=kernel), optimizer=optimizer), model
    )
    arguments = rewrite.training_arguments(rewritten.plan, **settings(tmp_path))
    trained(model, arguments, rows(tokens()), [rewrite.trainer_callback(rewritten), Look()])
    assert seen == [[option, option]] * STEPS


def test_the_trainers_8_bit_state_is_that_of_the_plan(tmp_path):
    model, data = seeded(roberta, hidden_size=64, vocab_size=80), rows(tokens())
    other = copy.deepcopy(model)
    plan = plan_for(model, tokens(), Optimizer())
    rewritten = rewrite.apply_for_trainer(plan, model)
    args = transformers.TrainingArguments(**rewrite.training_arguments(plan, **settings(tmp_path)))
    callbacks = [rewrite.trainer_callback(rewritten)]
    trainer = transformers.Trainer(model=model, args=args, train_dataset=data, callbacks=callbacks)
    trainer.train()
    step = rewrite.apply(plan, other).step
    step(tokens())
    assert state_bytes(trainer.optimizer.optimizer, model) == state_bytes(step.optimizer, other)
    assert state_bytes(step.optimizer, other)["roberta.encoder.layer.0.attention.self.query.weight"] < 3 * 64 * 64


def state_bytes(optimizer, model) -> dict[str, int]:
    return {
        name: sum(
            t.numel() * t.itemsize for t in optimizer.state[p].values() if isinstance(t, torch.Tensor) and t.dim()
        )
        for name, p in model.named_parameters()
    }


class Rescaled(Regression):
    """Its forward sets an attribute of a layer and resets it, so that a recompute uses another value."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Scaled()

    def forward(self, inputs, labels):
        self.layers[1].scale = 2.0
        try:
            return super().forward(inputs, labels)
        finally:
            self.layers[1].scale = 1.0


class Scaled(torch.nn.Module):
    scale = 1.0

    def forward(self, x):
        return torch.tanh(x * self.scale)


@pytest.mark.parametrize("decisions", [(), (IN_TWO,)], ids=["whole", "in two"])
def test_a_recompute_on_other_values_is_refused_before_the_update(decisions, tmp_path):
    model = seeded(Rescaled).double()
    plan = plan_for(model, numbers(), *decisions, Checkpoint(modules=("layers.1",)), optimizer="sgd")
    before = copy.deepcopy(model)
    with pytest.raises(DecisionError, match=r"'scale' was 2\.0 and is 1\.0 in backward"):
        by_the_plan(plan, model, rows(numbers()), tmp_path)
    assert largest_difference(model, before) == 0.0


class Branching(transformers.GPT2LMHeadModel):
    """A model that computes other logits if its head returns something else than a tensor."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.transformer(input_ids).last_hidden_state)
        if isinstance(logits, torch.Tensor):
            logits = logits * 2.0
        rows = logits[:, :-1].flatten(0, 1)
        return {"loss": torch.nn.functional.cross_entropy(rows, labels[:, 1:].flatten())}


@pytest.mark.parametrize("check", ["first-step", "off"])
def test_the_first_step_is_compared_with_the_original_model(check, tmp_path):
    torch.manual_seed(0)
    model = Branching(gpt2().config)
    plan = plan_for(model, tokens(), ChunkedLoss(module="lm_head", chunks=2))
    callback = rewrite.trainer_callback(rewrite.apply_for_trainer(plan, model, check=check))
    arguments = rewrite.training_arguments(plan, **settings(tmp_path))
    if check == "off":
        trained(model, arguments, rows(tokens(SAMPLES)), [callback])
    else:
        with pytest.raises(DecisionError, match="chunked-loss changes what the model computes"):
            trained(model, arguments, rows(tokens(SAMPLES)), [callback])
