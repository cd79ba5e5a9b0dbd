"""Refuses models and batches that cannot be rehearsed, before a rehearsal fails with a message about something else."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable
from typing import Any

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


def is_coroutine_function(value: Any) -> bool:
    """Returns True if a call of the value returns a coroutine or an asynchronous generator, and runs nothing."""
    if isinstance(value, type):
        return False
    methods = (inspect.getattr_static(value, "__call__", None), getattr(value, "forward", None))
    return any(
        inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function) for function in (value, *methods)
    )


def refuse_uncallable(value: Any, name: str, wanted: str) -> None:
    """Raises `WorkloadError` if the value is no function or class, or if a call of it returns a coroutine.

    Args:
        name: what messages call the value.
        wanted: what to give instead.
    """
    if not callable(value):
        raise WorkloadError(f"{name} is of type {type(value).__name__}, not a function or class: write {wanted}")
    if is_coroutine_function(value):
        raise WorkloadError(
            f"{name} is a coroutine function (`async def`), and a call of it runs nothing: write {wanted}, with `def`"
        )


def refuse_unsupported(
    model: torch.nn.Module, batch_tensors: Iterable[tuple[str, torch.Tensor]], loss_fn: Any = None, step: Any = None
) -> None:
    """Raises `WorkloadError` for what cannot be rehearsed, before a rehearsal fails with another message.

    These are TorchScript modules, coroutines, an empty batch, and layouts of tensors that no rehearsal can hold.

    Args:
        model: the model that is trained.
        batch_tensors: (path, tensor) for every tensor of the batch.
        loss_fn, step: the user's functions; None if there are none.
    """
    for function, what, wanted in (
        (loss_fn, "the loss function", "a function of the output and the batch that returns the loss"),
        (step, "the step function", "a function of the model, the optimizer and the batch"),
    ):
        if function is not None:
            refuse_uncallable(function, what, wanted)
    for name, module in model.named_modules():
        refuse_uncallable(module, f"the forward of module '{name}'" if name else "the model's forward", "it")
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
