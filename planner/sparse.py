"""Sparse gradients: a fake sparse tensor forgets its indices and values, so they are held beside it.

`_sparse_coo_tensor_with_dims_and_tensors` on fake tensors makes one without elements (torch/_subclasses/fake_impls.py);
a real one holds the tensors it was made of (ATen/native/sparse/SparseTensor.cpp). What optimizers allocate for sparse
gradients in between (coalescing, updates of rows) is therefore not seen, which is told as an assumption.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

ASSUMED_TEMPORARIES = "temporaries of ops on sparse gradients are small"

_PARTS = "_planner_sparse_parts"


def hold_parts(made: torch.Tensor, given: Iterable[torch.Tensor]) -> None:
    """Let a sparse result live as long as what it was made of, and the other way round."""
    parts: list[torch.Tensor] = []
    for tensor in given:
        parts += parts_of(tensor) if tensor.is_sparse else [tensor]
    setattr(made, _PARTS, parts)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Indices and values of a sparse tensor that a recorded op made."""
    return getattr(tensor, _PARTS, [])
