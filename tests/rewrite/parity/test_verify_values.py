"""Values that look like a fault of the plan and are none: masks of -inf, and losses in a lower precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.plan_types.decisions import Accumulation, Precision
from planner.plan_types.recompute_decisions import Checkpoint, Replay
from planner.rewrite.parity.result import compare
from tests.support.training import Perceptron, vectors, verified

pytestmark = pytest.mark.slow

INF, NAN = float("inf"), float("nan")
UNEVEN = Accumulation(micro_batch_size=4, micro_batches=2)
FLAT = Replay(modules=("layers",), stretches=((0, 8),), kept=((),))


def squared(output: torch.Tensor, batch: object) -> torch.Tensor:
    """A loss of ops that autocast leaves in the precision of the output."""
    return (output * output).mean()


class Masked(nn.Module):
    """Attention over four features with a causal mask in a buffer, whose blocked entries have one value."""

    def __init__(self, blocked: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 12))
        self.register_buffer("mask", torch.full((4, 4), blocked).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.layers(x).unflatten(1, (4, 3)).unbind(2)
        scores = query.unsqueeze(2) * key.unsqueeze(1) + self.mask
        return (scores.softmax(2) * value.unsqueeze(1)).sum(2)


@pytest.mark.parametrize("decisions", [(FLAT,), (Checkpoint(modules=("layers",)), Precision(dtype="bf16")), (UNEVEN,)])
@pytest.mark.parametrize("blocked", [-INF, -1e38])
def test_a_mask_in_a_buffer_is_no_difference(blocked, decisions):
    found = verified(lambda: Masked(blocked), vectors(6), *decisions, loss_fn=squared)
    assert found.passed, str(found)


@pytest.mark.parametrize("decisions", [(), (UNEVEN,), (FLAT,)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_loss_that_autocast_leaves_in_a_lower_precision_passes(dtype, decisions):
    found = verified(Perceptron, vectors(6), Precision(dtype=dtype), *decisions, loss_fn=squared)
    assert found.passed, str(found)


def row(kind: str, plain: list[float], planned: list[float], *, bound: float = 0.0):
    (only,) = compare("as planned", kind, {"x": torch.tensor(plain)}, {"x": torch.tensor(planned)}, bound=bound)
    return only


@pytest.mark.parametrize("bound", [0.0, 1e-3])
@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_entries_that_are_not_finite_must_be_the_same_on_both_sides(kind, bound):
    assert row(kind, [1.0, -INF, NAN], [1.0, -INF, NAN], bound=bound).bit_equal
    assert not row(kind, [1.0, -INF], [1.0, INF], bound=bound).passed
    assert not row(kind, [1.0, -INF], [1.0, 2.0], bound=bound).passed
    assert not row(kind, [1.0, -INF], [1.0, NAN], bound=bound).passed
    assert not row(kind, [1.0, -INF], [1.5, -INF], bound=bound).passed
    assert row(kind, [1.0, -INF], [1.0001, -INF], bound=bound).passed == (bound > 0)


@pytest.mark.parametrize("kind", ["loss", "gradient", "state"])
def test_losses_gradients_and_state_that_are_not_finite_fail(kind):
    assert not row(kind, [1.0, INF], [1.0, INF]).passed


def test_a_buffer_that_stays_the_same_hides_no_difference_of_another():
    mask = torch.full((2,), -1e38)
    plain = {"mask": mask, "norm.mean": torch.tensor([1.0])}
    planned = {"mask": mask, "norm.mean": torch.tensor([1.5])}
    rows = {found.name: found for found in compare("in double", "buffer", plain, planned, bound=1e-9)}
    assert rows["mask"].passed and not rows["norm.mean"].passed
