"""Refuses models, batches, functions and installed libraries that cannot be used, before something else fails."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import itertools
import operator
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nested._internal.nested_tensor import NestedTensor

from planner.errors import WorkloadError, first_line

_WAYS_OUT = {
    torch.sparse_csr: "convert it with .to_sparse_coo()",
    torch.sparse_csc: "convert it with .to_sparse_coo()",
    torch.sparse_bsr: "convert it with .to_sparse_coo()",
    torch.sparse_bsc: "convert it with .to_sparse_coo()",
    torch.jagged: "give its values and offsets, or a padded tensor and a mask",
}
"""Advice on tensors that cannot be rehearsed, by layout."""
_MOST_DEPTH = 100
"""Maximum depth to which lists, tuples and dicts of a batch are nested."""


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
        with _compiling_later():
            module = importlib.import_module(name)
        for part in _PARTS.get(name, ()):
            operator.attrgetter(part)(module)
    except Exception as error:  # a broken library may raise anything
        raise WorkloadError(
            f"{purpose} needs {name}, whose installation is broken or too old ({first_line(error)}): "
            f"pip install --upgrade --force-reinstall {_raised_by(error, name)}"
        ) from error
    return module


@contextlib.contextmanager
def _compiling_later() -> Iterator[None]:
    """Lets functions that are compiled inside of this context be compiled when they are first called.

    bitsandbytes calls `torch.compile` while it is imported. That imports the compiler, which takes longer than the
    rehearsal of a small model, and no rehearsal calls these functions.
    """
    compile_now = torch.compile

    def compile_later(model: Callable | None = None, **options: Any) -> Callable:
        if model is None:
            return functools.partial(compile_later, **options)
        compiled = functools.cache(lambda: compile_now(model, **options))
        return functools.wraps(model)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    torch.compile = compile_later
    try:
        yield
    finally:
        torch.compile = compile_now


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


def refuse_nesting(batch: Any) -> None:
    """Raises `WorkloadError` if lists, tuples and dicts of a batch are nested too deeply, or contain themselves."""
    level, depth = [batch], 0
    while level := list({id(part): part for value in level for part in _containers(value)}.values()):
        depth += 1
        if depth > _MOST_DEPTH:
            raise WorkloadError(
                f"the batch is nested more than {_MOST_DEPTH} levels deep, or contains itself: give tensors in a dict, "
                "a tuple or a list"
            )


def _containers(value: Any) -> list[Any]:
    """Returns the lists, tuples, dicts and dataclasses directly inside of a value."""
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        parts = list(value) if isinstance(value, (list, tuple)) else []
    return [part for part in parts if isinstance(part, (Mapping, list, tuple)) or dataclasses.is_dataclass(part)]


def refuse_unsupported(
    model: torch.nn.Module,
    batch: Any,
    batch_tensors: Iterable[tuple[str, torch.Tensor]],
    loss_fn: Any = None,
    step: Any = None,
) -> None:
    """Raises `WorkloadError` for what cannot be rehearsed, before a rehearsal fails with another message.

    These are TorchScript modules, coroutines, a batch that is empty or nested too deeply, and tensors that no rehearsal
    can hold.

    Args:
        model: the model that is trained.
        batch_tensors: (path, tensor) for every tensor of the batch. They are taken from the batch after its depth was
            checked.
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
    refuse_nesting(batch)
    batch_tensors = list(batch_tensors)
    of_model = itertools.chain(model.named_parameters(), model.named_buffers())
    of_both = (
        *((f"tensor '{name}' of the model", tensor) for name, tensor in of_model),
        *((f"tensor '{name}' of the batch" if name else "the batch", tensor) for name, tensor in batch_tensors),
    )
    for name, tensor in of_both:
        if torch.nn.parameter.is_lazy(tensor):
            raise WorkloadError(
                f"{name} has no shape yet, because its lazy module has not run: call the model once with a batch (on "
                "the meta device, this takes no memory), and plan then"
            )
        _refuse_kind(name, tensor)
    sizes = [tensor.numel() for _, tensor in batch_tensors if tensor.dim() and not tensor.is_nested]
    if sizes and not any(sizes):
        raise WorkloadError("the batch has no samples: all its tensors are empty; give a batch as in training")
    for name, parameter in model.named_parameters():
        if parameter.is_sparse:
            raise WorkloadError(
                f"parameter '{name}' is a sparse tensor, which a rehearsal cannot train: keep its values as a dense "
                "parameter, and create the sparse tensor in the forward"
            )


def _refuse_kind(name: str, tensor: torch.Tensor) -> None:
    """Raises `WorkloadError` if a rehearsal cannot hold a tensor: because of its class, its layout or its dtype."""
    kind = type(tensor)
    if _holds_others(tensor):
        raise WorkloadError(
            f"{name} is of class {kind.__name__}, which runs code of its own for each op (__torch_dispatch__), so that "
            "a rehearsal does not see the memory of what it holds: give plain tensors"
        )
    try:
        is_quantized, dtype = tensor.is_quantized, tensor.dtype
        layout = torch.jagged if tensor.is_nested else tensor.layout
    except Exception as error:  # a class of the user's
        raise WorkloadError(
            f"{name} is of class {kind.__name__}, whose code fails ({first_line(error)}): give "
            "tensor.as_subclass(torch.Tensor)"
        ) from error
    if layout not in (torch.strided, torch.sparse_coo):
        raise WorkloadError(
            f"{name} has layout {layout}, which a rehearsal cannot hold: "
            f"{_WAYS_OUT.get(layout, 'convert it with .to_dense()')}"
        )
    if is_quantized:
        raise WorkloadError(
            f"{name} is quantized ({dtype}), which a rehearsal cannot hold: give its values with .dequantize(), or its "
            "whole numbers with .int_repr()"
        )
    if str(dtype).startswith("torch.bits"):
        raise WorkloadError(
            f"{name} has dtype {dtype}, with which PyTorch does not compute: convert it with .view(dtype)"
        )


def _holds_others(tensor: torch.Tensor) -> bool:
    """True if the class of a tensor runs code of its own for each op, as classes that hold other tensors do."""
    dispatch = getattr(type(tensor), "__torch_dispatch__", None)
    plain = torch.Tensor.__torch_dispatch__
    is_known = isinstance(tensor, (FakeTensor, NestedTensor)) or type(tensor).__name__ == "DTensor"
    return dispatch is not plain and not is_known
