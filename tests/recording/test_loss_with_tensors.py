"""A loss function with tensors of its own, such as weights of classes, is planned, or the message says how."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from planner.errors import WorkloadError


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(weight=torch.ones(1000))

    def forward(self, output, batch):
        return self.loss(output, batch[1])


def planned(loss_fn, vram=None):
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1000))
    batch = torch.ones(64, 8), torch.zeros(64, dtype=torch.long)
    return planner.plan(model, batch, vram=vram, gpu="bare", loss_fn=loss_fn)


def test_the_tensors_of_a_loss_that_is_a_module_are_on_the_card():
    with_weights = planned(Weighted())
    without = planned(lambda output, batch: nn.functional.cross_entropy(output, batch[1]))
    # The weights, and the total weight instead of a number of samples, which both losses keep.
    assert with_weights.peak.allocated_bytes - without.peak.allocated_bytes in range(4000, 4200)
    assert planned(Weighted(), vram="1500KiB").certified


def test_tensors_in_a_function_are_refused_with_a_way_out():
    weights = torch.ones(1000)
    with pytest.raises(WorkloadError, match=r"write it as a torch.nn.Module, or move them with .to\(output.device\)"):
        planned(lambda output, batch: nn.functional.cross_entropy(output, batch[1], weight=weights))

    def moving(output, batch):
        return nn.functional.cross_entropy(output, batch[1], weight=weights.to(output.device))

    assert planned(moving).certified
