"""Runs ops whose output shape depends on tensor values, or which return a value (data-dependent ops)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from planner.virtual_gpu.data_dependence import DataDependence


def run_data_dependent_op(
    dependence: DataDependence, run: Callable[..., Any], op: Any, args: tuple, kwargs: dict
) -> tuple[bool, Any, Any]:
    """Runs a data-dependent op if the values that it depends on are known.

    Indexing with a boolean mask runs as on CUDA: `nonzero`, and then an index with positions (`expandTensors` in
    ATen/native/IndexingUtils.h).

    Args:
        run: `run(op, *args)` runs and records another op in place of this one.

    Returns:
        Whether the op was run, its result, and the arguments to run it with if it was not.
    """
    known = dependence.known
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
    real_result = known.compute(op, args, kwargs)
    if real_result is None:
        return False, None, args
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    assumed = known.assumptions(inputs)
    dependence.assume(assumed)

    def fake(value: Any) -> Any:
        """Returns a fake copy of a real tensor, whose values the rehearsal then knows."""
        if not isinstance(value, torch.Tensor):
            return value
        tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=inputs[0].device)
        known.learn(tensor, value, assumed)
        return tensor

    return True, tree_map(fake, real_result), None
