"""Refuses models and batches that cannot be rehearsed, before a rehearsal fails with a message about something else."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from planner.errors import WorkloadError

_WAYS_OUT = {
    torch.sparse_csr: "convert it with .to_sparse_coo()",
    torch.sparse_csc: "convert it with .to_sparse_coo()",
    torch.sparse_bsr: "convert it with .to_sparse_coo()",
    torch.sparse_bsc: "convert it with .to_sparse_coo()",
    torch.jagged: "give its values and offsets, or a padded tensor and a mask",
}
"""Advice on tensors that cannot be rehearsed, by layout."""


def refuse_unsupported(model: torch.nn.Module, batch_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises `WorkloadError` for TorchScript modules, for an empty batch, and for layouts that no rehearsal can hold.

    Args:
        model: the model that is trained.
        batch_tensors: (path, tensor) for every tensor of the batch.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            which = f"module '{name}' is" if name else "the model is"
            raise WorkloadError(
                f"{which} a TorchScript module (torch.jit.script or torch.jit.trace), which runs without Python, so "
                "that its ops cannot be recorded or recomputed: give the module from which it was made"
            )
    batch_tensors = list(batch_tensors)
    sizes = [tensor.numel() for _, tensor in batch_tensors if tensor.dim() and not tensor.is_nested]
    if sizes and not any(sizes):
        raise WorkloadError("the batch has no samples: all its tensors are empty; give a batch as in training")
    of_model = itertools.chain(model.named_parameters(), model.named_buffers())
    for owner, name, tensor in (
        *(("the model", name, tensor) for name, tensor in of_model),
        *(("the batch", name, tensor) for name, tensor in batch_tensors),
    ):
        if tensor.is_nested or tensor.layout not in (torch.strided, torch.sparse_coo):
            layout = torch.jagged if tensor.is_nested else tensor.layout
            raise WorkloadError(
                f"tensor '{name}' of {owner} has layout {layout}, which a rehearsal cannot hold: "
                f"{_WAYS_OUT.get(layout, 'convert it with .to_dense()')}"
            )
        if tensor.is_sparse and isinstance(tensor, torch.nn.Parameter):
            raise WorkloadError(
                f"parameter '{name}' is a sparse tensor, which a rehearsal cannot train: keep its values as a dense "
                "parameter, and create the sparse tensor in the forward"
            )
