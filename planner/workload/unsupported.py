"""Refuses models, batches, functions and installed libraries that cannot be used, before something else fails."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import operator
import sys
import traceback
from collections.abc import Iterable
from typing import Any

import torch

from planner.errors import WorkloadError, first_line

_WAYS_OUT = {
    torch.sparse_csr: "convert it with .to_sparse_coo()",
    torch.sparse_csc: "convert it with .to_sparse_coo()",
    torch.sparse_bsr: "convert it with .to_sparse_coo()",
    torch.sparse_bsc: "convert it with .to_sparse_coo()",
    torch.jagged: "give its values and offsets, or a padded tensor and a mask",
}
"""Advice on tensors that cannot be rehearsed, by layout."""


_PARTS = {
    "transformers": ("AutoConfig", "AutoModelForCausalLM", "utils.logging"),
    "bitsandbytes": ("functional", "nn.Linear4bit", "optim.AdamW8bit"),
    "peft": ("LoraConfig", "get_peft_model", "PeftConfig"),
}
"""Parts that the planner needs of a library, by its name."""


def library(name: str, purpose: str) -> Any:
    """Imports a library, and returns its module.

    Args:
        purpose: what needs it, for messages.

    Raises:
        WorkloadError: the library is not installed, cannot be imported, or lacks what the planner needs.
    """
    if sys.modules.get(name, name) is None or (name not in sys.modules and importlib.util.find_spec(name) is None):
        raise WorkloadError(f"{purpose} needs {name}, which is not installed: pip install {name}")
    try:
        module = importlib.import_module(name)
        for part in _PARTS.get(name, ()):
            operator.attrgetter(part)(module)
    except Exception as error:  # a broken library may raise anything
        raise WorkloadError(
            f"{purpose} needs {name}, whose installation is broken or too old ({first_line(error)}): "
            f"pip install --upgrade --force-reinstall {_raised_by(error, name)}"
        ) from error
    return module


def _raised_by(error: Exception, name: str) -> str:
    """Returns the known library whose code raised an error of an import; `name` if it was none of them."""
    packages = [
        frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    return next((package for package in reversed(packages) if package in _PARTS), name)


def is_coroutine_function(value: Any) -> bool:
    """Returns True if a call of the value returns a coroutine or an asynchronous generator, and runs nothing."""
    if isinstance(value, type):
        return False
    methods = (inspect.getattr_static(value, "__call__", None), getattr(value, "forward", None))
    return any(
        inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function) for function in (value, *methods)
    )


def refuse_uncallable(value: Any, name: str, wanted: str) -> None:
    """Raises `WorkloadError` if the value is not a function or class, or if a call of it returns a coroutine.

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
