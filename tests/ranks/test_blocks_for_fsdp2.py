"""Models that FSDP2 cannot train correctly are refused, or planned with another way to divide them.

Examples are blocks that write to a list among their arguments, blocks that return an object of an unknown class, and
optimizers that cannot update divided parameters. Notes describe what may differ between cards.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import planner
from planner.errors import BudgetError, StepError
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


@pytest.mark.thorough
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


class Box:
    """An output in which FSDP2 finds no tensors."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class ReturnsBox(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, box, _losses):
        x = box.x if isinstance(box, Box) else box
        return Box(x + self.down(torch.relu(self.up(x))))


class Boxes(Net):
    def forward(self, x, t):
        for block in self.blocks:
            x = block(x, ())
        return (x.x - t).square().mean()


class ReturnsView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)

    def forward(self, x, losses):
        return (x + self.linear(x)).view(-1, 24)


class ChangesViews(Net):
    def forward(self, x, t):
        for block in self.blocks:
            x = block(x, ())
            x += 1
        return (x - t).square().mean()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(("model", "block"), [(Boxes, ReturnsBox), (ChangesViews, ReturnsView)])
@pytest.mark.thorough_after(1)
def test_fsdp2_is_refused_if_backward_needs_a_parameter_that_is_not_gathered(model, block):
    given = {"x": torch.randn(4, 24, requires_grad=True), "t": torch.randn(4, 24)}
    with pytest.raises(StepError, match=r"backward needs parameter 'blocks\.1\.\w+\.weight', which FSDP2 has freed"):
        planner.plan(model(block), given, vram="1GiB", cards=2, sharding="fsdp")
    found = planner.plan(model(block), given, vram="1GiB", cards=2)
    assert found.fits
    assert any(note.startswith("left out: sharded") and "has freed after forward" in note for note in found.notes)


def test_blocks_that_stay_gathered_may_return_anything():
    given = {"x": torch.randn(4, 24, requires_grad=True), "t": torch.randn(4, 24)}
    assert planner.plan(Boxes(ReturnsBox), given, vram="1GiB", cards=2, sharding="zero2").fits


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24, bias=False), nn.ReLU()) for _ in range(2))

    def forward(self, x, t):
        for block in self.blocks:
            x = block(x)
        if x.sum() > 0:
            x = x + 1
        return (x - t).square().mean()


BRANCH = inspect.getsourcelines(Matrices.forward)[1] + 3


def plan_with(optimizer: type[torch.optim.Optimizer], **options):
    model, values = Matrices(), {f"{__file__}:{BRANCH}": 1}
    given = {"x": torch.randn(4, 24), "t": torch.randn(4, 24)}
    return planner.plan(
        model, given, vram="1GiB", cards=2, optimizer=optimizer(model.parameters()), values=values, **options
    )


def test_an_optimizer_that_cannot_update_divided_parameters_is_refused_with_the_ways_that_work():
    with pytest.raises(StepError, match=r"Adafactor cannot update .* choose --sharding zero1 or ddp"):
        plan_with(torch.optim.Adafactor, sharding="fsdp")
    assert plan_with(torch.optim.Adafactor, sharding="zero1").fits


def test_parameters_of_a_block_cannot_be_used_outside_of_its_forward():
    class Direct(Matrices):
        def forward(self, x, t):
            for block in self.blocks:
                x = torch.relu(nn.functional.linear(x, block[0].weight))
            return (x - t).square().mean()

    given = {"x": torch.randn(4, 24), "t": torch.randn(4, 24)}
    with pytest.raises(StepError, match="whole only while the forward of its block runs: call the block"):
        planner.plan(Direct(), given, vram="1GiB", cards=2, sharding="fsdp")
    assert planner.plan(Direct(), given, vram="1GiB", cards=2, sharding="ddp").fits


def test_notes_say_what_may_differ_between_cards():
    sharded = "\n".join(plan_with(torch.optim.Muon, sharding="fsdp").notes)
    assert f"each card reads its own values at {__file__}:{BRANCH}" in sharded
    assert "Muon computes its update in bf16" in sharded
    copied = "\n".join(plan_with(torch.optim.Muon, sharding="ddp").notes)
    assert "Muon computes" not in copied


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(2)
        )

    def forward(self, x, t):
        for block in self.blocks:
            x = block(x)
        return (x - t).square().mean()


def test_weights_of_a_batch_norm_are_not_gathered_in_bf16():
    given = {"x": torch.randn(4, 8, 16, 16), "t": torch.randn(4, 8, 16, 16)}
    options = {"vram": "2GiB", "cards": 2, "sharding": "fsdp", "gpu": "rtx-3090"}
    found = planner.plan(Normalized(), given, **options)
    assert found.fits and not any(decision.kind == "sharded-precision" for decision in found.decisions)
    assert any("parameters of 'blocks.0.1' need the dtype of its running statistics" in note for note in found.notes)
    with pytest.raises(StepError, match="tensors of one dtype"):
        planner.plan(Normalized(), given, force=["sharded-precision"], **options)


def test_a_way_that_can_be_planned_and_does_not_fit_is_the_answer_if_others_cannot_be_planned():
    """FSDP2 and ZeRO-1 refuse trained parameters of several dtypes, and DistributedDataParallel does not."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(2048), nn.Linear(2048, 2048).bfloat16()

        def forward(self, x, t):
            return (self.linear(self.norm(x).bfloat16()).float() - t).square().mean()

    given = {"x": torch.randn(4, 2048), "t": torch.randn(4, 2048)}
    found = planner.plan(Mixed(), given, vram="410MiB", gpu="rtx-3090", cards=2, fidelity="exact")
    assert found.shortfall is not None and found.shortfall.missing_bytes > 0
    assert any(note.startswith("left out: sharded") and "one dtype" in note for note in found.notes)


def test_a_budget_that_is_hopeless_for_the_way_that_divides_the_most_is_refused_for_that_way():
    model, given = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))), torch.randn(8, 2048)
    with pytest.raises(BudgetError, match="or more cards") as error:
        planner.plan(model, given, loss_fn=lambda out, _: out.square().mean(), vram="420MiB", gpu="rtx-3090", cards=2)
    assert "--sharding fsdp" not in str(error.value)


def test_synchronized_batch_norms_are_refused_by_name():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Normalized())
    given = {"x": torch.randn(4, 8, 16, 16), "t": torch.randn(4, 8, 16, 16)}
    with pytest.raises(StepError, match="SyncBatchNorm cannot be planned for several cards"):
        planner.plan(model, given, vram="2GiB", gpu="rtx-3090", cards=2, sharding="ddp")
