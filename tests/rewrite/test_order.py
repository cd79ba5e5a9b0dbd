"""The order of a step in mixed precision: unscale once, clip, step if finite, update the scale, then the schedule."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from planner import rewrite
from planner.errors import PlanFileError, WorkloadError
from planner.plan_types.decisions import Accumulation, Optimizer, Precision, StepInBackward
from planner.rewrite.step import TrainingStep
from tests.support.training import Perceptron, cross_entropy, plan_for, rewritten, seeded, vectors, verified

FP16, BF16 = Precision(dtype="fp16"), Precision(dtype="bf16")
UNEVEN = Accumulation(micro_batch_size=4, micro_batches=2)
"""Splits batches of 6 samples into 4 and 2."""


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def halving(optimizer: torch.optim.Optimizer) -> StepLR:
    return StepLR(optimizer, step_size=1, gamma=0.5)


class Live:
    """Trains by a rewritten step."""

    def __init__(self, *decisions, **options) -> None:
        result = rewritten(
            seeded(Perceptron), *decisions, batch=vectors(6), loss_fn=cross_entropy, optimizer=adamw, scheduler=halving,
            **options,
        )  # fmt: skip
        self.model, self.optimizer, self.step = result.module, result.optimizer, result.step
        self.scaler, self.scheduler = result.step.scaler, result.step.scheduler


class Emitted:
    """Trains by the step of an emitted file."""

    def __init__(self, *decisions, max_grad_norm: float | None = None) -> None:
        file: dict[str, Any] = {}
        plan = plan_for(Perceptron(), vectors(6), *decisions, loss_fn=cross_entropy)
        exec(compile(rewrite.source(plan), "train_step.py", "exec"), file)
        self.model = file["rewrite"](seeded(Perceptron))
        self.optimizer = adamw(self.model.parameters())
        self.scheduler = halving(self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu") if FP16 in decisions else None
        options = {"scaler": self.scaler} if self.scaler else {}
        if StepInBackward() not in decisions:
            options["max_grad_norm"] = max_grad_norm
        options |= {"loss_fn": cross_entropy, "scheduler": self.scheduler}
        options |= {"loss_terms": file["samples_only"]} if "samples_only" in file else {}
        self.step: Callable = lambda batch: file["training_step"](self.model, self.optimizer, batch, **options)


BOTH = pytest.mark.parametrize("kind", [Live, Emitted])


def noting(owner: object, name: str, events: list[str], monkeypatch) -> None:
    plain = getattr(owner, name)

    def noted(*arguments, **options):
        events.append(name)
        return plain(*arguments, **options)

    monkeypatch.setattr(owner, name, noted)


@BOTH
def test_everything_is_done_once_and_in_order(kind, monkeypatch):
    trained, events = kind(FP16, UNEVEN, max_grad_norm=0.1), []
    for owner, name in (
        (trained.scaler, "scale"), (trained.scaler, "unscale_"), (torch.nn.utils, "clip_grad_norm_"),
        (trained.scaler, "step"), (trained.scaler, "update"), (trained.scheduler, "step"),
        (trained.optimizer, "zero_grad"),
    ):  # fmt: skip
        noting(owner, name, events, monkeypatch)
    trained.step(vectors(6))
    assert events == ["scale", "scale", "unscale_", "clip_grad_norm_", "step", "update", "step", "zero_grad"]


@BOTH
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_step_whose_gradients_are_not_finite_trains_and_schedules_nothing(kind, clip):
    trained = kind(FP16, UNEVEN, max_grad_norm=clip)
    before = copy.deepcopy((trained.model.state_dict(), trained.optimizer.state_dict()))
    hook = trained.model.head.bias.register_hook(lambda gradient: gradient * float("inf"))
    trained.step(vectors(6))
    after = (trained.model.state_dict(), trained.optimizer.state_dict())
    assert all(torch.equal(value, before[0][name]) for name, value in after[0].items())
    assert after[1] == before[1]
    assert (trained.scheduler.last_epoch, trained.scaler.get_scale()) == (0, 2.0**15)
    hook.remove()
    trained.step(vectors(6))
    assert not torch.equal(trained.model.head.bias, before[0]["head.bias"])
    assert (trained.scheduler.last_epoch, trained.scaler.get_scale()) == (1, 2.0**15)
    assert trained.optimizer.param_groups[0]["lr"] == 5e-3


@BOTH
@pytest.mark.parametrize("decisions", [(), (BF16, UNEVEN), (StepInBackward(),)], ids=["plain", "bf16", "backward"])
def test_without_a_scaler_every_step_is_scheduled(kind, decisions):
    trained = kind(*decisions)
    for _ in range(3):
        trained.step(vectors(6))
    assert trained.scheduler.last_epoch == 3
    assert trained.optimizer.param_groups[0]["lr"] == 1e-2 / 8


def test_a_file_asks_for_fp32_weights():
    file: dict[str, Any] = {}
    exec(compile(rewrite.source(plan_for(Perceptron(), vectors(6), FP16, loss_fn=cross_entropy)), "f", "exec"), file)
    with pytest.raises(TypeError, match=r"layers.0.0.weight is torch.float16, but autocast needs fp32 weights"):
        file["rewrite"](Perceptron().half())
    file["rewrite"](Perceptron())


def test_an_8_bit_optimizer_gets_a_schedule_of_its_own():
    pytest.importorskip("bitsandbytes")
    result = rewritten(
        seeded(Perceptron), Optimizer(), batch=vectors(), loss_fn=cross_entropy, optimizer=adamw, scheduler=halving
    )
    result.step(vectors())
    assert result.step.scheduler.optimizer is result.optimizer
    assert result.optimizer.param_groups[0]["lr"] == 5e-3


def test_schedulers_that_cannot_be_stepped_here_are_refused():
    options = {"batch": vectors(), "loss_fn": cross_entropy, "optimizer": adamw}
    with pytest.raises(WorkloadError, match="ReduceLROnPlateau needs a metric"):
        rewritten(seeded(Perceptron), scheduler=ReduceLROnPlateau, **options)
    with pytest.raises(
        WorkloadError, match="the StepLR was created for a different optimizer than the step's AdamW: pass a function"
    ):
        rewritten(seeded(Perceptron), scheduler=halving(adamw(Perceptron().parameters())), **options)
    with pytest.raises(
        WorkloadError, match="the function that was given as scheduler returned a float: it must return"
    ):
        rewritten(seeded(Perceptron), scheduler=lambda optimizer: 0.1, **options)
    model = seeded(Perceptron)
    plan = plan_for(model, vectors(6), loss_fn=cross_entropy)
    with pytest.raises(
        WorkloadError, match="StepLR belongs to one optimizer, and each run has its own: pass a function"
    ):
        rewrite.verify(
            plan, model, vectors(6), loss_fn=cross_entropy, scheduler=halving(adamw(model.parameters()))
        )  # fmt: skip


def test_a_schedule_goes_on_where_it_stopped_and_is_not_forgotten():
    first = Live(FP16)
    first.step(vectors(6))
    state = copy.deepcopy(first.step.state_dict())
    second = Live(FP16)
    second.step.load_state_dict(state)
    assert second.scheduler.last_epoch == 1
    assert second.optimizer.param_groups[0]["lr"] == 5e-3
    without = rewritten(seeded(Perceptron), FP16, batch=vectors(6), loss_fn=cross_entropy, optimizer=adamw)
    with pytest.raises(
        PlanFileError, match="of a step with a scheduler, but this step has none: pass the same to apply"
    ):
        without.step.load_state_dict(state)
    with pytest.raises(PlanFileError, match="of a step with no scheduler, but this step has one"):
        second.step.load_state_dict(without.step.state_dict())


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("decisions", [(UNEVEN,), (FP16, UNEVEN)], ids=["fp32", "fp16"])
def test_verify_schedules_both_sides_and_tells_of_another_schedule(decisions, monkeypatch):
    options = {"loss_fn": cross_entropy, "scheduler": halving, "steps": 2}
    found = verified(Perceptron, vectors(6), *decisions, **options)
    assert found.passed, str(found)
    plain = TrainingStep.update

    def always(step) -> None:
        scheduler, step.scheduler = step.scheduler, None
        plain(step)
        scheduler.step()
        step.scheduler = scheduler

    monkeypatch.setattr(TrainingStep, "update", always)
    found = verified(Perceptron, vectors(6), *decisions, **options)
    reported = {(row.comparison, row.kind, row.name) for row in found.failures}
    assert reported == ({("overflow", "state", "group 0.lr")} if FP16 in decisions else set())
