"""Plans for small budgets: the allocator holds segments of 20 MiB, so the smallest promise is not the best plan."""

from __future__ import annotations

import itertools

import pytest
import torch

import planner
from planner.decisions import micro_batches_of

MIB = 1 << 20


def dense() -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Dropout(0.1))]
    batch = torch.zeros(4096, 256), torch.zeros(4096, dtype=torch.int64)
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, 10)), batch


def loss_fn(out: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(out, batch[1])


@pytest.fixture(scope="module")
def plans() -> dict[int, planner.Plan]:
    """By budget in MiB; the baseline takes 160 MiB, of which the context is 68 MiB."""
    with torch.device("meta"):
        model, batch = dense()
    return {budget: planner.plan(model, batch, vram=budget * MIB, loss_fn=loss_fn) for budget in (90, 100, 114)}


def test_what_fits_a_budget_fits_every_larger_one(plans):
    fits = [plan.fits for _, plan in sorted(plans.items())]
    assert fits == sorted(fits) and not fits[0] and fits[-1]


def test_a_fitting_plan_is_inside_its_budget(plans):
    assert all(plan.peak.total_bytes <= budget * MIB for budget, plan in plans.items() if plan.fits)


def test_what_is_called_the_smallest_is_near_what_fits(plans):
    reached = min(plan.peak.total_bytes for plan in plans.values() if plan.fits)
    said = [plan.peak.total_bytes for plan in plans.values() if not plan.fits]
    assert said and all(total <= reached + 2 * MIB for total in said)


def test_a_larger_budget_buys_no_slower_plan(plans):
    """But for what small segments make of it."""
    times = [plan.peak.step_ns for _, plan in sorted(plans.items()) if plan.fits]
    assert all(later <= 1.5 * earlier for earlier, later in itertools.pairwise(times))


def test_the_batch_is_not_cut_into_single_samples(plans):
    """The smallest promise has one sample in each of 4096 micro-batches, and needs no fewer segments than a few."""
    assert all(micro_batches_of(plan.decisions) <= 64 for plan in plans.values())
