"""Debugging modes of PyTorch that are active around the call to the planner do not reach the rehearsal."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import planner

AROUND = {
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "hooks for saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor),
    "saved tensors on the CPU": lambda: torch.autograd.graph.save_on_cpu(),
    "two of them": lambda: nested(torch.autograd.set_detect_anomaly(True), torch.autograd.graph.save_on_cpu()),
}


@contextlib.contextmanager
def nested(*contexts):
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@pytest.mark.parametrize("case", AROUND)
def test_the_plan_is_the_same_as_without(case):
    def planned():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        return planner.plan(
            model, torch.ones(64, 64), vram="200KiB", gpu="bare", loss_fn=lambda output, batch: output.sum()
        )

    expected = planned()
    was_on = torch.is_anomaly_enabled()
    with AROUND[case]():
        found = planned()
    assert (found.peak, found.baseline, found.decisions) == (expected.peak, expected.baseline, expected.decisions)
    assert torch.is_anomaly_enabled() is was_on
