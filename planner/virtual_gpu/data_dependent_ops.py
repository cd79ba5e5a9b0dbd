"""Ops whose result's shape depends on values, or whose result is a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from planner.virtual_gpu.data_dependence import DataDependence


def run_by_value(
    answers: DataDependence, run: Callable[..., Any], op: Any, args: tuple, kwargs: dict
) -> tuple[bool, Any, Any]:
    """Run an op whose result's shape depends on values, or which returns a value, where they are known.

    `run(op, *args)` runs another op in its place, recorded.

    -> (whether it was run, result, arguments to run it with instead). Selecting by a boolean mask is what CUDA
    makes of it: `nonzero` and then an index (`expandTensors` in ATen/native/IndexingUtils.h).
    """
    known = answers.known
    if op is torch.ops.aten.masked_select.default:
        return True, run(torch.ops.aten.index.Tensor, torch.broadcast_tensors(*args)[0], [args[1]]), None
    if op is torch.ops.aten.index.Tensor:
        indices = []
        for index in args[1]:
            if index is None or index.dtype not in (torch.bool, torch.uint8) or index not in known:
                indices.append(index)
                continue
            positions = run(torch.ops.aten.nonzero.default, index)
            indices += [run(torch.ops.aten.select.int, positions, 1, dim) for dim in range(index.dim())]
        return False, None, (args[0], indices)
    real = known.compute(op, args, kwargs)
    if real is None:
        return False, None, args
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    assumed = known.assumptions(given)
    answers.assume(assumed)

    def fake(value):
        if not isinstance(value, torch.Tensor):
            return value
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=given[0].device)
        known.learn(made, value, assumed)
        return made

    return True, tree_map(fake, real), None
