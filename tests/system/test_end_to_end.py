"""From a live model to training under a plan: `planner.plan`, `rewrite.apply`, ten real steps on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch

import planner
from planner import rewrite
from planner.errors import PlanFileError
from planner.plan_types.decisions import Accumulation
from planner.plan_types.recompute_decisions import Checkpoint, Replay

pytestmark = pytest.mark.slow


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Regression(torch.nn.Module):
    def __init__(self, width: int = 32, depth: int = 8) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(depth))
        self.head = torch.nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mean_square(output, batch):
    return torch.nn.functional.mse_loss(output, batch[1])


@pytest.fixture
def task():
    torch.manual_seed(0)
    inputs = torch.randn(512, 32)
    return Regression(), (inputs, inputs[:, :1] * 2 + inputs[:, 1:2])


def budget_for(model, batch, share: float) -> int:
    whole = planner.plan(model, batch, vram=None, loss_fn=mean_square, gpu="bare")
    return int(share * whole.baseline.total_bytes)


def train(step, batch, steps: int = 10) -> list[float]:
    torch.manual_seed(1)
    return [step(batch).item() for _ in range(steps)]


@pytest.mark.parametrize("kind", [Checkpoint, Replay], ids=lambda kind: kind.kind)
@pytest.mark.thorough
def test_under_a_recomputing_plan_losses_and_gradients_are_those_of_the_original_and_the_loss_falls(task, kind):
    model, batch = task
    plan = planner.plan(
        model,
        batch,
        vram=budget_for(model, batch, 0.6),
        loss_fn=mean_square,
        gpu="bare",
        fidelity="exact",
        only=kind.kind,
    )
    assert plan.fits
    assert [type(decision) for decision in plan.decisions] == [kind]

    original = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(original.parameters(), lr=1e-3)

    def plain(batch):
        loss = mean_square(original(batch[0]), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    rewritten = rewrite.apply(
        plan, model, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), loss_fn=mean_square
    )
    losses = train(rewritten.step, batch)
    assert losses == train(plain, batch)
    assert losses[-1] < losses[0]
    for ours, theirs in zip(rewritten.module.parameters(), original.parameters(), strict=True):
        assert torch.equal(ours, theirs)

    torch.manual_seed(2)
    mean_square(model(batch[0]), batch).backward()
    torch.manual_seed(2)
    mean_square(original(batch[0]), batch).backward()
    for ours, theirs in zip(model.parameters(), original.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.thorough
def test_under_an_accumulating_plan_the_gradients_are_those_of_the_full_batch(task):
    model, batch = task
    model.eval()  # dropout draws other masks for micro-batches than for the batch
    model = model.double()
    batch = tuple(tensor.double() for tensor in batch)
    plan = planner.plan(
        model,
        batch,
        vram=budget_for(model, batch, 0.6),
        loss_fn=mean_square,
        gpu="bare",
        fidelity="exact",
        forbid=("checkpoint", "replay"),
    )
    assert plan.decision(Accumulation) is not None
    original = copy.deepcopy(model)
    mean_square(original(batch[0]), batch).backward()
    seen = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.__setitem__(name, p.grad.clone()))
    rewrite.apply(plan, model, loss_fn=mean_square).step(batch)
    for name, parameter in original.named_parameters():
        difference = (seen[name] - parameter.grad).norm() / parameter.grad.norm()
        assert difference < 1e-12


@pytest.mark.thorough
def test_a_certificate_can_be_had_again_and_says_what_the_plan_says(task, tmp_path):
    model, batch = task
    plan = planner.plan(model, batch, vram=budget_for(model, batch, 0.7), loss_fn=mean_square, gpu="bare")
    plan.save(tmp_path / "plan.json")
    loaded = planner.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    certificate = rewrite.certify(loaded, model, batch, loss_fn=mean_square)
    assert certificate.fits
    assert certificate.footprint == plan.peak
    assert certificate.certified_bytes == plan.solver.certified_bytes


@pytest.mark.thorough
def test_a_certificate_for_another_model_or_batch_is_refused(task):
    model, batch = task
    plan = planner.plan(model, batch, vram="1GiB", loss_fn=mean_square, gpu="bare")
    with pytest.raises(PlanFileError, match="another"):
        rewrite.certify(plan, Regression(depth=2), batch, loss_fn=mean_square)
    with pytest.raises(PlanFileError, match="256"):
        rewrite.certify(plan, model, tuple(tensor[:256] for tensor in batch), loss_fn=mean_square)


def test_a_live_optimizer_is_planned_for_and_left_alone(task):
    model, batch = task
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan = planner.plan(model, batch, vram="1GiB", loss_fn=mean_square, gpu="bare", optimizer=optimizer)
    parameter_bytes = sum(p.numel() * 4 for p in model.parameters())
    assert plan.workload.optimizer == "torch.optim.sgd.SGD"
    whole = planner.plan(model, batch, vram=None, loss_fn=mean_square, gpu="bare", optimizer=optimizer)
    assert whole.baseline.breakdown["optimizer state"] == parameter_bytes
    assert not optimizer.state
    assert all(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])


def test_batch_norm_forbids_accumulation_and_the_plan_says_so():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    plan = planner.plan(model, (torch.zeros(64, 8), torch.zeros(64, 1)), vram="1GiB", loss_fn=mean_square, gpu="bare")
    assert any("normalizes over the micro-batch" in note for note in plan.notes)


@pytest.mark.thorough
def test_a_frozen_prefix_is_the_last_resort_and_only_where_it_is_allowed(task):
    model, batch = task
    smallest = planner.plan(model, batch, vram="100KiB", loss_fn=mean_square, gpu="bare", fidelity="exact")
    assert not smallest.fits
    budget = f"{int(0.98 * smallest.peak.total_bytes)}B"
    rounded = planner.plan(
        model, batch, vram=budget, loss_fn=mean_square, gpu="bare", forbid=("optimizer", "precision")
    )
    assert not rounded.fits
    partial = planner.plan(
        model,
        batch,
        vram=budget,
        loss_fn=mean_square,
        gpu="bare",
        fidelity="partial",
        forbid=("optimizer", "precision"),
    )
    assert partial.fits
    assert partial.decisions[0].kind == "freeze"
    assert "blocks.0" in partial.decisions[0].modules
    assert rounded.shortfall.next_step.relax in ("--fidelity partial", "allow mixed-precision", "allow 8bit-optimizer")
