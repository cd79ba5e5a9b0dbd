"""What no backward reaches, or the optimizer does not hold, has no gradient or state; the bounds know that."""

from __future__ import annotations

import pytest
import torch

import planner
from planner.choose.choice import TIE
from planner.errors import DecisionError
from planner.plan_types.decisions import micro_batches_of

pytestmark = pytest.mark.slow


class Blocks(torch.nn.Module):
    """A chain of blocks, and a large layer that no forward calls."""

    def __init__(self, idle: int) -> None:
        super().__init__()
        self.blocks = torch.nn.Sequential(
            *(
                torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
                for _ in range(4)
            )
        )
        self.idle = torch.nn.Linear(idle, idle)

    def forward(self, x):
        return self.blocks(x).square().mean()


@pytest.mark.parametrize("force", [(), ("optimizer",)])
@pytest.mark.thorough_after(1)
def test_parameters_without_a_gradient_cost_no_state(force):
    model, batch = Blocks(1024), torch.zeros(256, 256)
    whole = planner.plan(model, batch, vram=None, gpu="bare").baseline.total_bytes
    plan = planner.plan(model, batch, vram=whole, gpu="bare", fidelity="rounded", force=force, forbid=["precision"])
    assert plan.fits and plan.slowdown <= 1.0
    assert abs(plan.solver.promised_bytes - plan.solver.certified_bytes) <= 0.01 * plan.solver.certified_bytes


@pytest.mark.thorough
def test_an_optimizer_over_a_part_of_the_model_is_bounded_by_that_part():
    model, batch = Blocks(8), torch.zeros(256, 256)
    optimizer = torch.optim.AdamW(model.blocks[3].parameters(), foreach=False)
    options = {"gpu": "bare", "forbid": ["precision"], "optimizer": optimizer}
    forced = planner.plan(model, batch, vram="1GiB", force=["optimizer"], **options)
    plan = planner.plan(model, batch, vram=forced.peak.total_bytes, **options)
    assert plan.fits and plan.peak.step_ns <= TIE * forced.peak.step_ns


class Penalty(torch.nn.Module):
    """Takes gradients in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(4))
        )

    def forward(self, x):
        x = x.requires_grad_()
        y = self.body(x).mean(-1)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.mean() + (slope.norm(dim=-1) - 1).square().mean()


@pytest.mark.thorough
def test_modules_that_a_gradient_penalty_goes_through_are_not_recomputed():
    model, batch = Penalty(), torch.zeros(512, 64)
    whole = planner.plan(model, batch, vram=None, gpu="bare").baseline.total_bytes
    plan = planner.plan(model, batch, vram=int(0.7 * whole), gpu="bare", fidelity="exact")
    assert plan.fits and {decision.kind for decision in plan.decisions} == {"accumulation"}
    assert plan.solver.promised_bytes == plan.solver.certified_bytes
    with pytest.raises(DecisionError, match="checkpoint is forced, but it cannot be applied to any module"):
        planner.plan(model, batch, vram="1GiB", gpu="bare", force=["checkpoint"])


@pytest.mark.parametrize("samples", [3, 5, 9])
@pytest.mark.thorough_after(1)
def test_the_smaller_half_of_an_odd_batch_is_counted_as_it_is(samples):
    model, batch = Blocks(8), torch.zeros(samples, 4096, 256)
    whole = planner.plan(model, batch, vram=None, gpu="bare", optimizer="sgd").baseline.total_bytes
    forbid = ["checkpoint", "segment-checkpoint"]
    plan = planner.plan(
        model, batch, vram=int(0.85 * whole), gpu="bare", optimizer="sgd", fidelity="exact", forbid=forbid
    )
    assert plan.fits and micro_batches_of(plan.decisions) == 2
    assert plan.solver.promised_bytes == plan.solver.certified_bytes
