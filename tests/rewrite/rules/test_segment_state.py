"""Segments and state outside of them: running statistics, buffers that are written in place, and `torch.compile`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.plan_types.recompute_decisions import Replay
from planner.rewrite.portable import replay_tape
from tests.support.flat_models import Flat
from tests.support.training import cross_entropy, rewritten, seeded, vectors

pytestmark = pytest.mark.slow


def segment(start: int, stop: int, **changes) -> Replay:
    return Replay(modules=("",), stretches=((start, stop),), kept=((),), **changes)


# ---- running statistics ----------------------------------------------------------------------------------------------


class Normalised(Flat):
    """Two batch norms; `forward` takes their mode from the module."""

    def __init__(self) -> None:
        super().__init__(weight=(16, 16), depth=2)
        self.register_buffer("mean", torch.randn(16))
        self.register_buffer("var", torch.rand(16) + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(2):
            (weight,) = self.of(number, "weight")
            y = nn.functional.linear(x, weight)
            x = nn.functional.batch_norm(y, self.mean, self.var, training=self.training).tanh()
        return nn.functional.linear(x, self.head)


@pytest.mark.parametrize("with_gradients", [True, False])
def test_statistics_that_change_after_a_norm_in_evaluation_mode_are_not_read_by_a_replay(with_gradients):
    def gradients(*decisions) -> list[torch.Tensor]:
        module = rewritten(seeded(Normalised), *decisions, batch=vectors(), loss_fn=cross_entropy).module.eval()
        loss = cross_entropy(module(vectors()[0]), vectors())
        module.train()
        with torch.set_grad_enabled(with_gradients):
            other = cross_entropy(module(vectors(seed=1)[0]), vectors(seed=1))
        (loss + other if with_gradients else loss).backward()
        return [*(parameter.grad for parameter in module.parameters()), module.mean, module.var]

    wanted = gradients()
    for decision in (segment(0, 7), segment(2, 6), segment(0, 7, stops=((3,),))):
        assert all(map(torch.equal, gradients(decision), wanted)), decision
    assert not replay_tape.Segment.with_norms
