"""A technique is left out of a search because its step fails; the techniques that work with this model stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import planner
from planner.errors import WorkloadError

pytestmark = pytest.mark.slow

FORBIDDEN = ["8bit-optimizer", "mixed-precision", "accumulation", "step-in-backward"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class RefusesTapes(nn.Module):
    """Its blocks can be checkpointed, but its own forward fails if its ops are recorded for a replay."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.weights = nn.ParameterList(torch.randn(64, 64) / 8 for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if any(type(mode).__name__ == "Tape" for mode in _get_current_dispatch_mode_stack()):
            raise RuntimeError("no tapes")
        for block in self.blocks:
            x = block(x)
        for weight in self.weights:
            x = torch.tanh(torch.sigmoid(x @ weight) * x) + x
        return x.square().mean()


def planned(**options) -> planner.Plan:
    torch.manual_seed(0)
    return planner.plan(RefusesTapes(), {"x": torch.randn(4096, 64)}, gpu="bare", progress=False, **options)


@pytest.fixture(scope="module")
def whole_bytes() -> int:
    return planned(vram=None).total_bytes


@pytest.mark.parametrize("share", [0.6, 0.5, 0.4])
def test_the_technique_that_fails_is_left_out_and_not_another_one(whole_bytes, share):
    vram = int(share * whole_bytes)
    found = planned(vram=vram, forbid=[*FORBIDDEN])
    by_hand = planned(vram=vram, forbid=[*FORBIDDEN, "segment-checkpoint"])
    assert "checkpoint" in {decision.kind for decision in by_hand.decisions}
    assert found.decisions == by_hand.decisions
    assert (found.fits, found.peak) == (by_hand.fits, by_hand.peak)
    notes = [note for note in found.notes if note.startswith("left out")]
    assert all(note.startswith("left out (segment-checkpoint): the training step failed") for note in notes)


def test_a_technique_that_works_may_be_forced_next_to_one_that_fails(whole_bytes):
    found = planned(vram=whole_bytes // 2, forbid=FORBIDDEN, force=["checkpoint"])
    assert "checkpoint" in {decision.kind for decision in found.decisions}
    with pytest.raises(WorkloadError, match=r"no tapes .*: if the step runs without the planner, forbid segment"):
        planned(vram=whole_bytes // 2, forbid=FORBIDDEN, force=["segment-checkpoint"])
