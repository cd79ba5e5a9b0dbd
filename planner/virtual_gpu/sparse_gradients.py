"""Sparse gradients: a fake sparse tensor forgets its indices and values, so they are held beside it.

`_sparse_coo_tensor_with_dims_and_tensors` on fake tensors makes one without elements (torch/_subclasses/fake_impls.py);
a real one holds the tensors it was made of (ATen/native/sparse/SparseTensor.cpp). What optimizers allocate for sparse
gradients in between (coalescing, updates of rows) is therefore not seen, which is told as an assumption.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from planner.virtual_gpu.data_dependence import DataDependence
from planner.virtual_gpu.kernels import Made, cuda_kernel

ASSUMED_TEMPORARIES = "temporaries of ops on sparse gradients are small"

_PARTS = "_planner_sparse_parts"


def hold_parts(made: torch.Tensor, given: Iterable[torch.Tensor]) -> None:
    """Let a sparse result live as long as what it was made of, and the other way round."""
    parts: list[torch.Tensor] = []
    for tensor in given:
        parts += parts_of(tensor) if tensor.is_sparse else [tensor]
    setattr(made, _PARTS, parts)


def no_rows_of(table: torch.Tensor) -> torch.Tensor:
    """A sparse tensor of the shape of a table, with none of its rows."""
    indices = torch.empty(1, 0, dtype=torch.long, device=table.device)
    return torch.sparse_coo_tensor(
        indices, table.detach().new_empty(0, *table.shape[1:]), table.shape, check_invariants=False
    )


@cuda_kernel(torch.ops.aten.sparse_mask.default)
def _sparse_mask(answers: DataDependence, op: Any, table: torch.Tensor, mask: torch.Tensor) -> Made:
    """Rows of a table: as all of an update by rows a temporary, and not counted."""
    return no_rows_of(table), []


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Indices and values of a sparse tensor that a recorded op made."""
    return getattr(tensor, _PARTS, [])
