"""The tutorial's example of `rewrite.verify`: train a small network with and without a plan, and compare."""

from __future__ import annotations

import torch
from torch import nn

import planner
from planner import rewrite


def loss_fn(output, batch):
    return nn.functional.cross_entropy(output, batch[-1])


torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
model = nn.Sequential(*blocks, nn.Linear(128, 10))
inputs = torch.randn(256, 128)
batch = (inputs, inputs[:, :10].argmax(1))

plan = planner.plan(model, batch, vram="3.5MB", gpu="bare", loss_fn=loss_fn, fidelity="exact")
for decision in plan.decisions:
    print(f"- {decision.describe()}")
print(rewrite.verify(plan, model, batch, loss_fn=loss_fn))
