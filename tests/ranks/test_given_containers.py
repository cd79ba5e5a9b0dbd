"""FSDP2 copies lists and dicts that a block is given, so it does not divide a model whose blocks write to them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from planner.errors import StepError
from planner.recording.given_containers import GivenContainers

pytestmark = pytest.mark.slow


class WritesToList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.router = nn.Linear(24, 24), nn.Linear(24, 2)

    def forward(self, x, losses):
        losses.append(self.router(x).square().mean())
        return x + self.linear(x)


class WritesToDict(WritesToList):
    def forward(self, x, losses):
        losses[-1]["loss"] = losses[-1]["loss"] + self.router(x).square().mean()
        return x + self.linear(x)


class Reads(WritesToList):
    def forward(self, x, losses):
        return x + self.linear(x) * len(losses)


class Net(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x, t):
        losses = [{"loss": torch.zeros((), device=x.device)}]
        for block in self.blocks:
            x = block(x, losses)
        return (x - t).square().mean() + losses[0]["loss"] + sum(losses[1:])


def plan(block: type[nn.Module], **options):
    return planner.plan(Net(block), {"x": torch.randn(4, 24), "t": torch.randn(4, 24)}, vram="1GiB", cards=2, **options)


@pytest.mark.parametrize(("block", "kind"), [(WritesToList, "list"), (WritesToDict, "dict")])
def test_fsdp2_is_refused_if_a_block_writes_to_what_it_is_given(block, kind):
    with pytest.raises(StepError, match=f"'blocks.0' writes to a {kind} that it is given"):
        plan(block, sharding="fsdp")


def test_other_ways_to_divide_the_model_are_planned_and_the_note_says_why_fsdp2_was_left_out():
    found = plan(WritesToList)
    assert found.fits
    assert any(note.startswith("left out: sharded") and "writes to a list" in note for note in found.notes)


def test_a_block_may_read_what_it_is_given():
    assert plan(Reads, sharding="fsdp").fits


def test_contents_are_compared_by_identity_and_at_every_depth():
    value = torch.zeros(2)
    given = {"a": [value], "b": (value, {"c": value})}
    containers = GivenContainers((), given)
    containers.refuse_changes("block")
    given["b"][1]["c"] = torch.zeros(2)
    with pytest.raises(StepError, match="'block' writes to a dict"):
        containers.refuse_changes("block")


def test_one_card_is_the_answer_if_more_cards_cannot_be_planned():
    """Only the comparison is lost: DDP refuses a parameter without a gradient, and FSDP2 a scalar parameter."""

    class Scalar(Net):
        def __init__(self) -> None:
            super().__init__(Reads)
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x, t):
            return super().forward(x, t) * self.scale

    batch = {"x": torch.randn(4, 24), "t": torch.randn(4, 24)}
    found = planner.plan(Scalar(), batch, vram="2GiB", gpu="rtx-3090", cards="fewest")
    assert found.fits
    assert any("2 cards: not compared" in note for note in found.notes)
