"""Sends objects to another process with the structure of a model, but without its weights.

`cloudpickle` also takes functions and classes that are defined in a script, in a notebook or inside a function. A
parameter arrives as a meta tensor with its shape, strides, dtype, class, attributes and hooks. Other tensors on the CPU
keep their values, unless they are large floating-point tensors, whose values no rehearsal reads.
"""

from __future__ import annotations

import functools
import io
import types
from collections import OrderedDict
from typing import Any

import cloudpickle
import torch
from torch.nn.utils.parametrize import is_parametrized

from planner.spawned import CannotBeSentError

_MOST_FLOATS = 1 << 16
"""Floating-point tensors with more elements arrive without their values."""


def send(value: Any) -> bytes:
    """Returns the bytes of an object for `pickle.loads` in another process.

    Raises:
        CannotBeSentError: a part of the object cannot be pickled.
    """
    try:
        return _dumped(value)
    except Exception as error:  # objects of the user's decide what they raise
        raise CannotBeSentError(f"{_place(value, '') or 'an argument'} ({_text(error)})") from error


def _dumped(value: Any) -> bytes:
    buffer = io.BytesIO()
    _StructurePickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


class _StructurePickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.layout is torch.strided:
            return _reduced(obj)
        if isinstance(obj, torch.nn.Module) and is_parametrized(obj):
            return object.__new__, (type(obj),), vars(obj)  # its own `__getstate__` refuses, because of older files
        return super().reducer_override(obj)


def _reduced(tensor: torch.Tensor) -> Any:
    """Returns how to make a tensor again: with its values, or empty."""
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    is_large = tensor.numel() > _MOST_FLOATS and (tensor.is_floating_point() or tensor.is_complex())
    if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and not is_large:
        copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)  # without the rest of a shared storage
        return copy.__reduce_ex__(5)
    # A large tensor stays on the CPU, because code of the model may use it with others. Its memory is not touched.
    device = "cpu" if tensor.device.type == "cpu" and not is_parameter else "meta"
    arguments = (type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, device, tensor.requires_grad)
    hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return _empty, arguments, (vars(tensor), *hooks), None, None, _complete


def _empty(kind: type, shape: tuple, stride: tuple, dtype: torch.dtype, device: str, requires_grad: bool) -> Any:
    data = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    if kind is torch.Tensor:
        return data.requires_grad_(requires_grad)
    return torch.Tensor._make_subclass(kind, data, requires_grad)


def _complete(tensor: Any, state: tuple[dict[str, Any], OrderedDict | None, OrderedDict | None]) -> None:
    """Adds attributes and hooks, which may refer to the tensor."""
    attributes, backward_hooks, accumulate_hooks = state
    vars(tensor).update(attributes)
    if backward_hooks:
        tensor._backward_hooks = backward_hooks
    if accumulate_hooks:
        tensor._post_accumulate_grad_hooks = accumulate_hooks


def _place(value: Any, name: str) -> str | None:
    """Returns words for the innermost part of an object that cannot be pickled; None if all of it can."""
    try:
        _dumped(value)
        return None
    except Exception:
        parts = _parts(value)
    found = (_place(part, f"{name}.{key}".strip(".")) for key, part in parts)
    innermost = next(filter(None, found), None)
    return innermost or f"'{name.removeprefix('work.').removeprefix('self.')}' of type {type(value).__name__}"


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Returns the parts of an object that may fail, each with its name."""
    if isinstance(value, torch.nn.Module):
        own = {key: part for key, part in vars(value).items() if key != "_modules"}
        return [*value._modules.items(), *own.items()]
    if isinstance(value, dict):
        return [(str(key), part) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [("", part) for part in value]
    if isinstance(value, functools.partial):
        return [("", value.func), *(("", part) for part in value.args)]
    if isinstance(value, types.FunctionType) and value.__closure__:
        return [
            (name, cell.cell_contents) for name, cell in zip(value.__code__.co_freevars, value.__closure__, strict=True)
        ]
    if hasattr(value, "__self__"):  # a bound method
        return [("", value.__self__)]
    return list(getattr(value, "__dict__", {}).items())


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), 'no message')}"
