"""A transformers model without a stated batch size is planned for a batch that its baseline can take."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner import profiles
from planner.default_batch import with_default_batch
from planner.estimate.footprint import measure
from planner.pipeline import record_step
from planner.workload.budget import Budget
from planner.workload.loading import ONE_SAMPLE
from planner.workload.workload import workload

CARD = profiles.load("bare")


def with_loss(samples, notes=()):
    model = nn.Sequential(nn.Linear(8, 1024), nn.GELU(), nn.Linear(1024, 1))
    batch = (torch.zeros(samples, 8), torch.zeros(samples, 1))
    return workload(model, batch, loss_fn=lambda output, batch: nn.functional.mse_loss(output, batch[1]), notes=notes)


def needed(samples):
    return measure(record_step(with_loss(samples), CARD), CARD, vram_bytes=None).footprint.total_bytes


def chosen(budget_bytes, notes=(ONE_SAMPLE,)):
    return with_default_batch(with_loss(1, notes), with_loss, CARD, Budget.of_total(CARD, budget_bytes))


@pytest.mark.slow
def test_the_batch_is_the_largest_power_of_two_whose_baseline_fits():
    for samples in (8, 16):
        found = chosen(needed(samples))
        assert found.batch_size == samples
        assert found.notes[0].startswith(f"the batch has {samples} samples, the largest power of two up to 64")
        assert "--largest-batch" in found.notes[0]
    assert chosen(needed(16) - 1).batch_size == 8


def test_a_batch_is_never_larger_than_the_limit_and_never_empty():
    assert chosen(1 << 40).batch_size == 64
    one = chosen(needed(1) // 2)
    assert one.batch_size == 1 and one.notes == (ONE_SAMPLE,)


@pytest.mark.parametrize("notes", [(), ("something else",)])
def test_a_stated_batch_stays(notes):
    assert chosen(1 << 40, notes).batch_size == 1
