"""The GPU lane: what was promised without a card, held against what the card does. Skips where there is none."""

from __future__ import annotations

import pytest
import torch

import planner
import rewrite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.version.cuda is None or not torch.cuda.is_available(), reason="needs a CUDA card"),
]


def test_allocated_memory_of_a_rewritten_step_is_what_was_promised():
    """Planned in a process that has not used CUDA yet, which the fork needs; measured in this one."""
    width, depth, samples = 2048, 12, 8192
    layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(depth)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 16))
    batch = (torch.randn(samples, width), torch.randn(samples, 16))

    def loss_fn(output, batch):
        return torch.nn.functional.mse_loss(output, batch[-1])

    whole = planner.plan(model, batch, vram=None, loss_fn=loss_fn)
    plan = planner.plan(
        model, batch, vram=f"{int(0.7 * whole.baseline.total_bytes)}B", loss_fn=loss_fn, fidelity="exact"
    )
    assert plan.fits
    model.cuda()
    batch = tuple(tensor.cuda() for tensor in batch)
    rewritten = rewrite.apply(plan, model, loss_fn=loss_fn)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        rewritten.step(batch)
    measured = torch.cuda.max_memory_allocated()
    assert measured <= 1.01 * plan.peak.allocated_bytes
    assert measured >= 0.95 * plan.peak.allocated_bytes
