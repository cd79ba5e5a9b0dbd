"""Graph algorithms on a recorded training step: `python examples/recording/step_graph.py`.

`planner.record` runs the step on a virtual GPU, which needs neither a card nor the memory; `planner.to_networkx` makes
a `networkx.DiGraph` of it. The same works for any model that `planner.plan` takes.
"""

from __future__ import annotations

import networkx
import torch

import planner


class Residual(torch.nn.Module):
    """One layer of a residual network: x + down(relu(up(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def record(depth: int = 4, width: int = 64, samples: int = 32) -> torch.fx.Graph:
    """Records two training steps of a residual network."""
    with torch.device("meta"):  # the weights need no memory
        model = torch.nn.Sequential(*(Residual(width) for _ in range(depth)))
        batch = (torch.empty(samples, width), torch.empty(samples, width))
    return planner.record(model, batch, loss_fn=lambda output, batch: torch.nn.functional.mse_loss(output, batch[1]))


def largest_op(ops: networkx.DiGraph) -> str:
    """Returns the op that allocates the most bytes."""
    return max(ops, key=lambda node: ops.nodes[node]["bytes"] if ops.nodes[node]["kind"] == "op" else 0)


def cheapest_checkpoint(graph: torch.fx.Graph, first: str, last: str) -> tuple[int, set[str]]:
    """Returns the bytes and the names of the tensors that a checkpoint between two ops of the forward has to keep.

    They are a minimum cut of what lies between the two ops.
    """
    whole = planner.to_networkx(graph, storages=True)
    between = networkx.descendants(whole, first) & networkx.ancestors(whole, last)
    forward = whole.subgraph({first, *between, last})
    size_bytes, (before, after) = networkx.minimum_cut(forward, first, last, capacity="bytes")
    return size_bytes, {target for source, target in forward.edges if source in before and target in after}


def main() -> None:
    graph = record()
    ops = planner.to_networkx(graph)
    node = largest_op(ops)
    print(f"most bytes: {node} in '{ops.nodes[node]['module']}', {ops.nodes[node]['bytes']:,} bytes")

    products = [n for n in ops if ops.nodes[n]["name"] == "aten.addmm.default" and ops.nodes[n]["step"] == 0]
    first, last = products[0], products[-1]
    size_bytes, tensors = cheapest_checkpoint(graph, first, last)
    print(f"between {first} and {last} the fewest bytes cross at {sorted(tensors)}: {size_bytes:,} bytes")

    backward = sum(ops.nodes[n]["phase"] == "backward" for n in networkx.descendants(ops, first))
    print(f"{backward} ops of backward depend on {first}")


if __name__ == "__main__":
    main()
