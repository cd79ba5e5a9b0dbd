"""Models that need groups of samples, modules that take dicts, and frozen parameters that other modules share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from planner import rewrite
from planner.errors import PlannerError
from planner.plan_types.decision_base import frozen_modules_of, has_role, micro_batches_of
from planner.plan_types.decisions import Accumulation, Role
from planner.plan_types.recompute_decisions import Checkpoint
from tests.support.training import gpt2, tokens

pytestmark = pytest.mark.slow

OPTIONS = {"gpu": "bare", "optimizer": "sgd", "fidelity": "exact"}


class Groups(nn.Module):
    """Takes samples in groups of four."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x.unflatten(0, (-1, 4)))).flatten(0, 1))


class Fixed(Groups):
    """Takes batches of 64 or 128 samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x.unflatten(0, (-1, 64)))).flatten(0, 1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, arguments: dict, flags: set[str]) -> dict:
        return {"y": self.second(torch.tanh(self.first(arguments["x"]))), "number": arguments["number"]}


class OfDicts(nn.Module):
    """Its blocks take and return nested dicts, tensors among numbers and sets."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block({"x": x, "number": number, "nested": [x, {"again": x}]}, flags={"a"})["y"]
        return self.head(x)


def squares(output: torch.Tensor, batch: object) -> torch.Tensor:
    return output.pow(2).mean()


def within(model: nn.Module, fraction: float, **options) -> planner.Plan:
    batch = (torch.randn(64, 64),)
    start = planner.plan(model, batch, vram=None, loss_fn=squares, **OPTIONS).peak.total_bytes
    return planner.plan(model, batch, vram=int(start * fraction), loss_fn=squares, **OPTIONS, **options)


@pytest.mark.parametrize("force", [[], ["accumulation"]])
@pytest.mark.thorough_after(1)
def test_a_model_that_needs_groups_of_samples_is_split_between_groups(force):
    plan = within(Groups(), 0.9, only=["accumulation"], force=force)
    accumulation = plan.decision(Accumulation)
    assert plan.fits and accumulation is not None
    assert accumulation.micro_batch_size % 4 == 0
    assert rewrite.verify(plan, Groups(), (torch.randn(64, 64),), loss_fn=squares).passed


def test_the_smallest_plan_has_the_smallest_group():
    assert within(Groups(), 0.01, only=["accumulation", "checkpoint"]).decision(Accumulation).micro_batch_size == 4


@pytest.mark.thorough
def test_a_model_that_cannot_be_split_is_refused_with_the_size_that_failed():
    with pytest.raises(PlannerError, match=r"^the model fails with micro-batches of \d+.*unflatten"):
        within(Fixed(), 0.9, only=["accumulation"], force=["accumulation"])
    free = within(Fixed(), 0.9, only=["accumulation"])
    assert micro_batches_of(free.decisions) == 1
    assert sum("micro-batches of" in note for note in free.notes) == 1  # one note for all sizes


def test_modules_that_take_and_return_dicts_are_planned():
    plan = within(OfDicts(), 1.0, only=["checkpoint"], force=["checkpoint"])
    assert plan.decision(Checkpoint) is not None
    assert rewrite.verify(plan, OfDicts(), (torch.randn(64, 64),), loss_fn=squares).passed


@pytest.mark.thorough
def test_a_plan_says_that_freezing_the_embedding_freezes_the_output_layer():
    model, batch = gpt2(), tokens()
    plan = planner.plan(model, batch, vram="1GiB", gpu="bare", fidelity="partial", force=["freeze"])
    assert has_role(plan.decisions, Role.FREEZING) and "transformer.wte" in frozen_modules_of(plan.decisions)
    assert "'lm_head.weight' is frozen too: it is the same parameter as 'transformer.wte.weight'" in plan.notes
