"""Samples that are coupled in the backward only are found, and a backward that works sample by sample is accepted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner import rewrite
from planner.errors import DecisionError
from planner.plan_types.decisions import Accumulation
from tests.support.training import cross_entropy, plan_for, seeded, vectors


class Hooked(nn.Module):
    """A module that returns a copy of its input with a gradient hook."""

    def __init__(self, hook: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.hook = hook

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        if x.requires_grad:
            x.register_hook(self.hook)
        return x


COUPLED = {
    "over the norm of the batch": lambda g: g / g.norm(),
    "centred over the batch": lambda g: g - g.mean(0),
    "times the samples": lambda g: g * len(g),
}
BY_SAMPLE = {
    "reversed": lambda g: -g,
    "clamped": lambda g: g.clamp(-1e-3, 1e-3),
    "of unit length": lambda g: F.normalize(g, dim=1),
    "signs": torch.sign,
}


def train_a_step(hook: Callable[[torch.Tensor], torch.Tensor], micro_batch_size: int) -> list[torch.Tensor]:
    """Train a perceptron for a step with SGD, and return its parameters."""
    layers = seeded(lambda: nn.Sequential(nn.Linear(16, 8), nn.Tanh(), Hooked(hook), nn.Linear(8, 4)))
    batch = vectors(16)
    count = -(-16 // micro_batch_size)
    split = (Accumulation(micro_batch_size=micro_batch_size, micro_batches=count),) if count > 1 else ()
    plan = plan_for(layers, batch, *split, loss_fn=cross_entropy, optimizer="sgd")
    optimizer = torch.optim.SGD(layers.parameters(), lr=1.0)
    rewrite.apply(plan, layers, optimizer, loss_fn=cross_entropy).step(batch)
    return list(layers.parameters())


@pytest.mark.parametrize("size", [2, 6, 8])
@pytest.mark.parametrize("hook", COUPLED.values(), ids=COUPLED)
def test_a_gradient_that_depends_on_other_samples_is_refused(hook, size):
    with pytest.raises(DecisionError, match="computed in two parts like micro-batches, the gradient of"):
        train_a_step(hook, size)


@pytest.mark.parametrize("size", [2, 6, 8])
@pytest.mark.parametrize("hook", BY_SAMPLE.values(), ids=BY_SAMPLE)
def test_a_gradient_that_depends_on_its_sample_only_is_accepted_even_if_it_is_not_linear(hook, size):
    torch.testing.assert_close(train_a_step(hook, size), train_a_step(hook, 16))
