"""Runs data-dependent ops: ops that return a tensor value, or whose output shape depends on tensor values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from planner.virtual_gpu.data_dependence import DataDependence

WAYS_OUT: dict[Any, tuple[str]] = {
    torch.ops.aten._pack_padded_sequence.default: ("plan the model with padded sequences instead of packed ones",),
}
"""Advice on data-dependent ops that a rehearsal cannot run even if the values are known, by op."""


def run_data_dependent_op(
    dependence: DataDependence, run: Callable[..., Any], op: Any, args: tuple, kwargs: dict
) -> tuple[bool, Any, Any]:
    """Runs a data-dependent op if the values that it depends on are known.

    Indexing with a boolean mask is converted as on CUDA: to `nonzero`, and then indexing with the positions
    (`expandTensors` in ATen/native/IndexingUtils.h).

    Args:
        dependence: knows the values.
        run: `run(op, *args)` runs and records another op.
        op, args, kwargs: the data-dependent op and its arguments.

    Returns:
        (True, result, None) if the op was run. Otherwise (False, None, arguments): the caller has to run the op with
        these positional arguments.
    """
    known = dependence.known
    if op is torch.ops.aten.masked_select.default:
        table, mask = torch.broadcast_tensors(*args)
        return True, run(torch.ops.aten.index.Tensor, table, [mask]), None
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
        """Returns a fake copy of a real tensor, and makes its values known to the rehearsal."""
        if not isinstance(value, torch.Tensor):
            return value
        tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=inputs[0].device)
        known.learn(tensor, value, assumed)
        return tensor

    return True, tree_map(fake, real_result), None
