"""A technique is left out of a search because its step fails; the techniques that work with this model stay."""

from __future__ import annotations

import contextvars

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import planner
from planner.errors import WorkloadError
from planner.plan_types.recompute_decisions import Checkpoint

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

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.weights = nn.ParameterList(torch.randn(64, 64) / 8 for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if any(type(mode).__name__ == "Tape" for mode in _get_current_dispatch_mode_stack()):
            raise RuntimeError("no tapes")
        for block in self.blocks:
            x = block(x)
        for weight in self.weights:
            x = torch.tanh(torch.sigmoid(x @ weight) * x) + x
        return x.square().mean()


def planned(*, blocks: int = 4, **options) -> planner.Plan:
    torch.manual_seed(0)
    return planner.plan(RefusesTapes(blocks), {"x": torch.randn(4096, 64)}, gpu="bare", progress=False, **options)


@pytest.fixture(scope="module")
def whole_bytes() -> int:
    return planned(vram=None).total_bytes


@pytest.mark.parametrize("share", [0.6, 0.5, 0.4])
@pytest.mark.thorough_after(2)
def test_the_technique_that_fails_is_left_out_and_not_another_one(whole_bytes, share):
    vram = int(share * whole_bytes)
    found = planned(vram=vram, forbid=[*FORBIDDEN])
    by_hand = planned(vram=vram, forbid=[*FORBIDDEN, "segment-checkpoint"])
    assert "checkpoint" in {decision.kind for decision in by_hand.decisions}
    assert found.decisions == by_hand.decisions
    assert (found.fits, found.peak) == (by_hand.fits, by_hand.peak)
    notes = [note for note in found.notes if note.startswith("left out")]
    assert all(note.startswith("left out (segment-checkpoint of the whole model") for note in notes)


def test_a_technique_that_works_may_be_forced_next_to_one_that_fails(whole_bytes):
    found = planned(vram=whole_bytes // 2, forbid=FORBIDDEN, force=["checkpoint"])
    assert "checkpoint" in {decision.kind for decision in found.decisions}
    found = planned(vram=whole_bytes // 2, forbid=FORBIDDEN, force=["segment-checkpoint"])
    modules = {decision.kind: getattr(decision, "modules", ()) for decision in found.decisions}
    assert found.fits and set(modules["segment-checkpoint"]) <= {f"blocks.{number}" for number in range(4)}


def test_a_forced_technique_that_works_with_no_module_is_an_error():
    with pytest.raises(WorkloadError, match=r"no tapes .*: if the step runs without the planner, forbid segment"):
        planned(blocks=0, vram="20MiB", forbid=FORBIDDEN, force=["segment-checkpoint"])


INSIDE = contextvars.ContextVar("inside", default=False)


class NeedsAContext(nn.Module):
    """Its forward runs only inside of a context that its caller enters, or only in fp32."""

    def __init__(self, under_autocast: bool) -> None:
        super().__init__()
        self.up, self.down, self.under_autocast = nn.Linear(64, 256), nn.Linear(256, 64), under_autocast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not INSIDE.get() and (torch.is_autocast_enabled("cuda") or not self.under_autocast):
            raise RuntimeError("no context")
        return x + self.down(nn.functional.gelu(self.up(x)))


class Mixed(nn.Module):
    def __init__(self, under_autocast: bool) -> None:
        super().__init__()
        self.fine = nn.ModuleList(Block() for _ in range(3))
        self.blocks = nn.ModuleList(NeedsAContext(under_autocast) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, fine in zip(self.blocks, self.fine, strict=True):
            token = INSIDE.set(True)
            x = block(x)
            INSIDE.reset(token)
            x = fine(x)
        return x.square().mean()


def mixed_plan(under_autocast: bool, vram: int | str | None, **options) -> planner.Plan:
    torch.manual_seed(0)
    model, batch = Mixed(under_autocast), {"x": torch.randn(4096, 64)}
    return planner.plan(model, batch, vram=vram, gpu="bare", optimizer="sgd", progress=False, **options)


def checkpointed(plan: planner.Plan) -> set[str]:
    return {module for d in plan.decisions if isinstance(d, Checkpoint) for module in d.modules}


def test_a_technique_is_left_out_only_for_modules_of_the_class_with_which_it_fails():
    whole = mixed_plan(False, None).total_bytes
    found = mixed_plan(False, whole * 3 // 4, only=["checkpoint"])
    assert found.fits
    assert checkpointed(found) and all(module.startswith("fine.") for module in checkpointed(found))
    [note] = [note for note in found.notes if note.startswith("left out")]
    assert note.startswith("left out (checkpoint of blocks.{0-2}): ")
    assert "no context" in note


def test_a_technique_that_fails_in_one_precision_is_left_out_only_there():
    techniques = ["checkpoint", "mixed-precision"]
    smallest = mixed_plan(True, "8MiB", only=techniques)
    alone = mixed_plan(True, "8MiB", only=["checkpoint"])
    assert not smallest.fits and not alone.fits
    assert smallest.total_bytes <= alone.total_bytes  # more techniques never need more memory
    notes = [note for note in smallest.notes if note.startswith("left out")]
    assert notes and all(
        note.startswith("left out (checkpoint of blocks.{0-2}, with mixed precision: ") for note in notes
    )


class InSequences(nn.Module):
    """Both kinds of blocks are in containers of the same class."""

    def __init__(self) -> None:
        super().__init__()
        self.bad = nn.Sequential(*(NeedsAContext(under_autocast=False) for _ in range(2)))
        self.good = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Tanh(), nn.Sigmoid()) for _ in "abcd"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        token = INSIDE.set(True)
        x = self.bad(x)
        INSIDE.reset(token)
        for block in self.good:
            x = block(x)
        return x.square().mean()


def test_a_container_that_fails_does_not_take_the_technique_from_other_containers():
    found = planner.plan(
        InSequences(), {"x": torch.randn(4096, 64)}, vram="1MiB", gpu="bare", optimizer="sgd", only=["checkpoint"]
    )
    assert {f"good.{number}" for number in range(3)} <= checkpointed(found)
    assert not [module for module in checkpointed(found) if module == "bad"]


class NeedsTwoSamples(nn.Module):
    """Its forward cannot be run again with a single sample."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not INSIDE.get() and len(x) < 2:
            raise RuntimeError("needs two samples")
        return x + self.down(nn.functional.gelu(self.up(x)))


class InsideAContext(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        token = INSIDE.set(True)
        x = super().forward(x)
        INSIDE.reset(token)
        return x.square().mean()


def test_a_technique_that_fails_with_micro_batches_is_left_out_only_there():
    def plan(*only: str) -> planner.Plan:
        model, batch = InsideAContext(*(NeedsTwoSamples() for _ in range(6))), torch.randn(2, 4096, 64)
        return planner.plan(
            model,
            batch,
            vram="1MiB",
            gpu="bare",
            optimizer="sgd",
            only=[*only],
            loss_fn=lambda output, batch: output,
        )

    both, alone = plan("checkpoint", "accumulation"), plan("checkpoint")
    assert both.total_bytes <= alone.total_bytes
    assert checkpointed(alone)
    assert not [note for note in alone.notes if "with micro-batches" in note]
