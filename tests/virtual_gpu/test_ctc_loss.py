"""CTC loss is rehearsed with lengths that only the batch knows: they are assumed to be as long as possible."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner import rewrite

SAMPLES, STEPS, CLASSES, TARGETS = 8, 30, 20, 10


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 64), nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).relu()).log_softmax(-1).transpose(0, 1)


def loss_fn(output: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return F.ctc_loss(output, *batch[1:])


def batch_with(targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    lengths = torch.full((SAMPLES,), STEPS), torch.full((SAMPLES,), TARGETS)
    return torch.randn(SAMPLES, STEPS, 16), targets, *lengths


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(SAMPLES, TARGETS), (SAMPLES * TARGETS,)], ids=["padded", "concatenated"])
@pytest.mark.thorough_after(1)
def test_a_step_with_ctc_loss_can_be_planned_and_trains_the_same(shape):
    torch.manual_seed(0)
    model, batch = Speech(), batch_with(torch.randint(1, CLASSES, shape))
    plan = planner.plan(
        model, batch, loss_fn=loss_fn, vram="150KiB", gpu="bare", optimizer="sgd", only=["checkpoint", "offload"]
    )
    assert plan.certified
    assert any("all inputs and targets of ctc_loss have full length" in note for note in plan.notes)
    parity = rewrite.verify(plan, model, batch, loss_fn=loss_fn)
    assert parity.passed, parity.failures
