"""Explains published peaks by cuDNN 7's Winograd algorithm. We looked for this explanation after the errors were known.

    python -m benchmarks.published.convolutional.winograd "FCN R-50, Cityscapes" ...

For each row whose setting is named, the command prints the published figure, the peak of tensors, and the peak if each
3 x 3 convolution with stride 1, and the gradient of its input, ran the algorithm F(4 x 4, 3 x 3) (Lavin and Gray, 2015)
and held its transformed image, result and weights in memory: 36 numbers for every 16 of the images and every 9 of the
weights.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator

from benchmarks.published.convolutional.__main__ import ROWS
from benchmarks.published.convolutional.rows import MIB, graph_of
from planner.recording.step_graph import Op, StepGraph
from planner.workspaces.cudnn.dispatch import BACKWARD_OP, is_convolution

_TILE, _TRANSFORMED, _ITEM_BYTES = 4, 36, 4


def alive_bytes(graph: StepGraph) -> list[int]:
    """Returns the bytes of tensors that are alive at each tick."""
    changes = [0] * (graph.ticks + 2)
    for storage in graph.storages:
        for born, died in storage.lives:
            changes[born] += storage.size_bytes
            changes[died] -= storage.size_bytes
    return list(itertools.accumulate(changes))


def peaks_with_winograd(graph: StepGraph, alive: list[int]) -> Iterator[int]:
    """Yields the bytes that are alive while the algorithm runs, for each convolution that it can compute."""
    for op in graph.ops:
        if is_convolution(op.name) and _can_run(op):
            assert op.kernel is not None
            (samples, channels, height, width), kernels = (
                op.kernel.tensor("input").shape,
                op.kernel.tensor("weight").shape,
            )
            tiles = samples * math.ceil(height / _TILE) * math.ceil(width / _TILE)
            numbers = tiles * (channels + kernels[0]) + channels * kernels[0]
            result = samples * height * width * (channels if op.name == BACKWARD_OP else kernels[0])
            yield alive[op.tick] + _ITEM_BYTES * (result + _TRANSFORMED * numbers)


def _can_run(op: Op) -> bool:
    assert op.kernel is not None
    arguments = op.kernel.arguments
    is_plain = {*arguments["stride"], *arguments["dilation"], arguments["groups"]} == {1}
    return is_plain and tuple(op.kernel.tensor("weight").shape[2:]) == (3, 3)


def main() -> None:
    for row in ROWS:
        if row.setting in sys.argv[1:]:
            graph = graph_of(row)
            alive = alive_bytes(graph)
            tensors, winograd = max(alive), max([*peaks_with_winograd(graph, alive), max(alive)])
            numbers = (row.published * row.unit_bytes, tensors, winograd)
            print(row.setting, *(f"{number / MIB:,.0f} MiB" for number in numbers), sep=" | ", flush=True)


if __name__ == "__main__":
    main()
