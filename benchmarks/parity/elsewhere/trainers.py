"""Trains with transformers' Trainer, also resumed in the middle of an epoch, and with Lightning."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import logging
import tempfile
import unittest.mock as mock
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.parity.case import SAMPLES
from benchmarks.parity.elsewhere.sample import NAMES, Job, jobs, outcome_of
from benchmarks.parity.judge import Outcome, never
from benchmarks.parity.plain import Trained, Training, trained_plainly
from planner import rewrite
from planner.plan_types.plan import Plan
from planner.rewrite.rules import offload

SKIPPED: list[str] = []
"""Reasons why ways are missing."""
_MODELS = (
    "gpt2; llama, adamw; bert; roberta; bert for classes; t5; vit; opt; qwen3; modernbert; deberta-v2; bert for tags"
)
WITH_LOSS = tuple(f"transformers: {name}" for name in _MODELS.split("; "))
"""Cases that the Trainer can train: batches are passed by keyword, and the model returns its loss."""
_SAVED_AFTER = 2
"""Steps after which a training is saved, and then resumed. All steps are in one epoch."""


def outcomes() -> Iterator[Outcome]:
    """Yields the outcomes of the Trainer, of a Trainer that is resumed, and of Lightning."""
    if importlib.util.find_spec("accelerate") is None:
        SKIPPED.append("the Trainer: accelerate is not installed")
    else:
        for job in jobs(WITH_LOSS, 3):
            for way in ("Trainer", "Trainer, resumed"):
                yield _outcome(job, way)
    if importlib.util.find_spec("lightning") is None:
        SKIPPED.append("Lightning: lightning is not installed")
    else:
        for job in jobs(NAMES, 3):
            yield _outcome(job, "Lightning")


def _outcome(job: Job, way: str) -> Outcome:
    def train(planned: bool = True) -> Trained:
        with mock.patch.object(offload, "is_on_host", never), _quiet(), tempfile.TemporaryDirectory() as folder:
            if way == "Lightning":
                return _by_lightning(job)
            if way == "Trainer":
                return _by_trainer(job, folder, planned)
            until = {"save_strategy": "steps", "save_steps": _SAVED_AFTER, "max_steps": _SAVED_AFTER}
            _by_trainer(job, folder, planned, **until)
            return _by_trainer(job, folder, planned, resumed=f"{folder}/checkpoint-{_SAVED_AFTER}")

    def truth() -> Trained:
        if way != "Lightning":  # the Trainer takes the mean over labels in its own way
            return train(planned=False)
        technique = job.technique
        return trained_plainly(
            job.case, technique.dtype_for(job.case), autocast=technique.autocast, clips=not technique.steps_in_backward
        )

    # The Trainer returns no losses of single steps, and wraps the optimizer.
    return outcome_of(job, way, train, truth, losses=way == "Lightning", others=way == "Lightning")


def _by_trainer(job: Job, folder: str, planned: bool, *, resumed: str | None = None, **changes: Any) -> Trained:
    """Train by transformers' Trainer.

    Args:
        folder: where the Trainer saves checkpoints.
        planned: False to train whole batches without the plan.
        resumed: folder of the checkpoint from which training goes on; None to begin.
        changes: arguments of the Trainer.
    """
    import transformers

    class InOrder(transformers.Trainer):
        """Takes the samples in their order, as the plain loop does."""

        def _get_train_sampler(self, *_: object) -> torch.utils.data.Sampler:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    case, technique = job.case, job.technique
    training = Training(case, technique.dtype_for(case))
    data = [{name: values[n] for name, values in batch.items()} for batch in training.batches for n in range(SAMPLES)]
    arguments = {
        "output_dir": folder, "use_cpu": True, "num_train_epochs": 1, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True, "max_grad_norm": case.clip or 0.0, "logging_strategy": "no", **changes,
    }  # fmt: skip
    callbacks = []
    if planned:
        plan = _for_dtype(job.offer.plan_with(technique, training.model), technique.dtype_for(case))
        callbacks.append(rewrite.trainer_callback(rewrite.apply_for_trainer(plan, training.model)))
        arguments = rewrite.training_arguments(plan, **arguments)
    else:
        autocast = {} if technique.autocast is None else {technique.autocast: True}
        arguments |= {"per_device_train_batch_size": SAMPLES, **autocast}
    optimizer = case.optimizer(training.model, **(technique.kernel_options if planned else {}))
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = InOrder(
        model=training.model, args=transformers.TrainingArguments(**arguments), train_dataset=data,
        optimizers=(optimizer, constant), callbacks=callbacks,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resumed)
    return training.trained(optimizer)


def _for_dtype(plan: Plan, dtype: torch.dtype) -> Plan:
    """Returns the plan for batches in fp32 if the training is in fp32, and the plan itself otherwise."""
    if dtype is not torch.float32:
        return plan
    batch = tuple((path, shape, kind.replace("float64", "float32")) for path, shape, kind in plan.workload.batch)
    return dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, batch=batch))


def _by_lightning(job: Job) -> Trained:
    import lightning

    case, technique = job.case, job.technique
    training = Training(case, technique.dtype_for(case))
    plan = job.offer.plan_with(technique, training.model)

    class Planned(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.model = training.model

        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.rewritten = rewrite.apply(
                plan, self.model, case.optimizer(self.model), loss_fn=training.loss_fn, scheduler=case.scheduler,
                max_grad_norm=None if technique.steps_in_backward else case.clip,
                loss_weight=case.terms if technique.states_weight else None,
            )  # fmt: skip
            return self.rewritten.optimizer

        def training_step(self, batch: Any, _: int) -> None:
            training.losses.append(self.rewritten.step(batch).clone())

    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, barebones=False,
    )  # fmt: skip
    module = Planned()
    trainer.fit(module, torch.utils.data.DataLoader(training.batches, batch_size=None, shuffle=False))
    return training.trained(module.rewritten.optimizer)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides what trainers print."""
    before = logging.root.manager.disable
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.INFO)
        try:
            yield
        finally:
            logging.disable(before)
