"""Bytes that each op takes from the allocator while it runs, outputs and scratch memory together."""

from __future__ import annotations

from collections.abc import Callable

from torch.utils._python_dispatch import TorchDispatchMode


class TakenByOp(TorchDispatchMode):
    """Measures a step that runs inside it. `totals` has the bytes by name of the op, `calls` the number of calls.

    Args:
        taken_bytes: returns the bytes of all allocations so far.
    """

    def __init__(self, taken_bytes: Callable[[], int]) -> None:
        super().__init__()
        self._taken_bytes = taken_bytes
        self.totals: dict[str, int] = {}
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        before = self._taken_bytes()
        result = op(*args, **(kwargs or {}))
        name = str(op)
        self.totals[name] = self.totals.get(name, 0) + self._taken_bytes() - before
        self.calls[name] = self.calls.get(name, 0) + 1
        return result


def differing(measured: dict[str, int], rehearsed: dict[str, int]) -> dict[str, list[int]]:
    """Returns [measured, rehearsed] bytes of the ops for which they differ, the largest difference first."""
    pairs = {name: [measured.get(name, 0), rehearsed.get(name, 0)] for name in {*measured, *rehearsed}}
    different = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return dict(sorted(different.items(), key=lambda item: (-abs(item[1][0] - item[1][1]), item[0])))
