"""Keeps the indices and values of fake sparse gradients alive.

On fake tensors `_sparse_coo_tensor_with_dims_and_tensors` creates a sparse tensor without elements
(torch/_subclasses/fake_impls.py), whereas a real one refers to the tensors that it was created from
(ATen/native/sparse/SparseTensor.cpp). Here the fake sparse tensor gets an attribute that refers to them.

Temporaries that optimizers allocate for sparse gradients (to coalesce gradients, or for the rows of an update) are
therefore not seen. The plan's notes state this as an assumption.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from planner.virtual_gpu.data_dependence import DataDependence
from planner.virtual_gpu.kernels import Made, cuda_kernel

ASSUMED_TEMPORARIES = "temporaries of ops on sparse gradients are small enough to leave out"

_PARTS = "_planner_sparse_parts"
"""Name of the attribute with the indices and values."""


def hold_parts(result: torch.Tensor, inputs: Iterable[torch.Tensor]) -> None:
    """Keeps the tensors that a sparse result was created from alive as long as the result."""
    parts: list[torch.Tensor] = []
    for tensor in inputs:
        parts += parts_of(tensor) if tensor.is_sparse else [tensor]
    setattr(result, _PARTS, parts)


def no_rows_of(table: torch.Tensor) -> torch.Tensor:
    """Returns a sparse tensor with the shape of a table and none of its rows."""
    indices = torch.empty(1, 0, dtype=torch.long, device=table.device)
    return torch.sparse_coo_tensor(
        indices, table.detach().new_empty(0, *table.shape[1:]), table.shape, check_invariants=False
    )


@cuda_kernel(torch.ops.aten.sparse_mask.default)
def _sparse_mask(dependence: DataDependence, op: Any, table: torch.Tensor, mask: torch.Tensor) -> Made:
    """Selects rows of a table. They are a temporary of the optimizer's update, and are not counted."""
    return no_rows_of(table), []


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the indices and values of a sparse tensor that a recorded op returned."""
    return getattr(tensor, _PARTS, [])
