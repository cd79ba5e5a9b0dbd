"""Keeps the indices and values of fake sparse gradients alive.

A real sparse tensor refers to the tensors of indices and values from which it was created
(ATen/native/sparse/SparseTensor.cpp). A fake one has no elements and refers to no tensors
(`_sparse_coo_tensor_with_dims_and_tensors` in torch/_subclasses/fake_impls.py). Here it gets an attribute that refers
to them.

Because fake sparse tensors have no elements, temporaries that optimizers allocate for sparse gradients (to coalesce
gradients, or for the rows of an update) are not recorded. The plan's notes state this as an assumption.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from planner.virtual_gpu.data_dependence import DataDependence
from planner.virtual_gpu.kernels import Made, cuda_kernel

ASSUMED_TEMPORARIES = "temporaries of ops on sparse gradients are small enough to leave out"

_PARTS = "_planner_sparse_parts"
"""Name of the attribute of a sparse tensor that has its indices and values."""


def hold_parts(result: torch.Tensor, inputs: Iterable[torch.Tensor]) -> None:
    """Keeps the tensors from which a sparse result was created alive as long as the result.

    Args:
        result: the sparse tensor that an op returned.
        inputs: the tensor arguments of the op. For a sparse argument, its indices and values are kept.
    """
    parts: list[torch.Tensor] = []
    for tensor in inputs:
        parts += parts_of(tensor) if tensor.is_sparse else [tensor]
    setattr(result, _PARTS, parts)


def no_rows_of(table: torch.Tensor) -> torch.Tensor:
    """Returns a sparse tensor that has the shape of `table` but no rows."""
    indices = torch.empty(1, 0, dtype=torch.long, device=table.device)
    return torch.sparse_coo_tensor(
        indices, table.detach().new_empty(0, *table.shape[1:]), table.shape, check_invariants=False
    )


@cuda_kernel(torch.ops.aten.sparse_mask.default)
def _sparse_mask(dependence: DataDependence, op: Any, table: torch.Tensor, mask: torch.Tensor) -> Made:
    """Stands for `sparse_mask`, with which optimizers select rows of a table. The selected rows are not counted."""
    return no_rows_of(table), []


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the indices and values of a sparse tensor; empty if no recorded op returned the tensor."""
    return getattr(tensor, _PARTS, [])
