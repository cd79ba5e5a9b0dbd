"""Observers of a training step see each micro-batch, and are notified of errors before the step raises them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.plan_types.decisions import Accumulation, Decision
from planner.rewrite import apply_decisions
from planner.rewrite.step_observer import StepObserver
from planner.workload.call_convention import Calling

BATCH = torch.arange(12, dtype=torch.float32).view(6, 2) / 12


class Noting(StepObserver):
    """Notes the calls of its hooks, and fails in the given one."""

    def __init__(self, fails_in: str = "") -> None:
        self.calls: list[tuple] = []
        self.fails_in = fails_in

    def note(self, hook: str, *values: object) -> None:
        self.calls.append((hook, *values))
        if hook == self.fails_in:
            raise KeyboardInterrupt

    def before_step(self, batch):
        self.note("before_step", batch)

    def before_forward(self, weight):
        self.note("before_forward", weight)

    def after_forward(self):
        self.note("after_forward")

    def after_loss(self, loss):
        self.note("after_loss", loss.item())

    def before_update(self, batch):
        self.note("before_update", batch)

    def after_error(self):
        self.note("after_error")


def observed(observer: Noting, *decisions: Decision):
    model = nn.Linear(2, 1)
    rewritten = apply_decisions(
        decisions, model, optimizer="sgd", calling=Calling.SINGLE, batch_size=6,
        loss_fn=lambda output, batch: output.square().mean(),
    )  # fmt: skip
    rewritten.step.observers = (observer,)
    return rewritten


def test_hooks_are_called_for_each_micro_batch_and_once_before_the_update():
    observer = Noting()
    loss = observed(observer, Accumulation(micro_batch_size=4, micro_batches=2)).step(BATCH)
    hooks = ["before_forward", "after_forward", "after_loss"]
    assert [call[0] for call in observer.calls] == ["before_step", *hooks, *hooks, "before_update"]
    weights = [call[1] for call in observer.calls if call[0] == "before_forward"]
    losses = [call[1] for call in observer.calls if call[0] == "after_loss"]
    assert weights == [pytest.approx(4 / 6), pytest.approx(2 / 6)]
    assert sum(w * x for w, x in zip(weights, losses, strict=True)) == pytest.approx(loss.item())
    assert observer.calls[-1][1] is BATCH


def test_a_batch_that_is_not_split_has_no_weight():
    observer = Noting()
    observed(observer).step(BATCH)
    assert observer.calls[1] == ("before_forward", None)


@pytest.mark.parametrize("hook", ["before_step", "before_forward", "after_forward", "after_loss", "before_update"])
def test_an_error_in_a_hook_trains_nothing(hook):
    observer = Noting(fails_in=hook)
    rewritten = observed(observer, Accumulation(micro_batch_size=4, micro_batches=2))
    before = rewritten.module.weight.clone()
    with pytest.raises(KeyboardInterrupt):
        rewritten.step(BATCH)
    assert observer.calls[-1] == ("after_error",)
    assert torch.equal(rewritten.module.weight, before)
    assert rewritten.module.weight.grad is None
