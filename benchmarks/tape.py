"""Show how much longer the host takes for an op that a segment checkpoint records or replays.

    python -m benchmarks.tape

The tensors are tiny, so that only the time of the host counts. The network keeps the outputs of its products and is
divided after each product, as a block is by `planner.recompute.units`. Two multiples are printed, and
`planner.recompute.replay_cost` uses both:

- "recorded" is the CPU time of a forward under a tape, divided by that of a forward without a tape;
- "replayed" is the CPU time of an op that runs again, divided by that of an op in the forward without a tape. The time
  of all ops that run again is the additional time of forward and backward that is not spent on recording.
"""

from __future__ import annotations

import time
import types
import unittest.mock
from collections.abc import Callable

import torch
from torch import nn

from planner.assemble import versions
from planner.rewrite.portable.replay_ops import TapeEntry
from planner.rewrite.portable.replay_tape import replayed

LAYERS, ROUNDS, REPEATS = 20, 7, 60


class Net(nn.Module):
    """Layers of four ops each: a matrix product, an activation, a multiplication by a number, and an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * 1.5 + x
        return x


def seconds(function: Callable[[], object]) -> float:
    """Returns the CPU seconds of a call, in the quickest of several rounds."""
    rounds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(REPEATS):
            function()
        rounds.append((time.process_time() - start) / REPEATS)
    return min(rounds)


def main() -> None:
    """Prints the two multiples."""
    torch.set_num_threads(1)
    net, batch, ops = Net(), torch.randn(2, 4), 4 * LAYERS

    def step() -> None:
        net(batch).sum().backward()

    plain_forward, plain_step = seconds(lambda: net(batch)), seconds(step)
    products = tuple(range(0, ops, 4))
    segment = (0, ops, products, tuple(product + 1 for product in products))
    # As the rule of segment checkpoints replaces a forward. mypy refuses to replace a method.
    net.forward = types.MethodType(replayed(Net.forward, (segment,)), net)  # type: ignore[method-assign]
    taped_forward, taped_step = seconds(lambda: net(batch)), seconds(step)
    with unittest.mock.patch.object(
        TapeEntry, "run_again", autospec=True, side_effect=TapeEntry.run_again
    ) as run_again:
        step()
    replayed_s = taped_step - plain_step - (taped_forward - plain_forward)
    print(", ".join(f"{name} {version}" for name, version in versions().items()))
    print(f"recorded: {taped_forward / plain_forward:.1f} launches for each op")
    again = run_again.call_count
    print(f"replayed: {replayed_s / again / (plain_forward / ops):.1f} launches for each of {again} ops")


if __name__ == "__main__":
    main()
