"""Restore the state of one object in place: containers, attributes, slots, closure cells, tensors and arrays."""

from __future__ import annotations

import operator
import types
from collections import deque
from typing import Any

import torch

HEAP_TYPE = 1 << 9
"""`Py_TPFLAGS_HEAPTYPE` in `type.__flags__`: the class was made by a class statement."""
EMPTY = object()
"""Stands for the value of a closure variable or slot that has no value."""


def restore_entries(container: Any, kind: Any, keys: list[Any], values: list[Any]) -> None:
    """Restore a container in place, unless nothing has changed.

    Args:
        kind: the builtin type of the container. Its methods are used, because a subclass may override them.
        keys, values: as `entries` returned them.
    """
    now = entries(container, kind)
    if all(map(_are_same, now, (keys, values))):
        return
    if kind is list:
        list.__setitem__(container, slice(None), keys)
    elif kind is set:
        set.intersection_update(container, keys)
        set.update(container, keys)
    elif kind is deque:
        deque.clear(container)
        deque.extend(container, keys)
    else:
        _restore_mapping(container, kind, now[0], keys, values)


def _restore_mapping(container: Any, kind: Any, now: list[Any], keys: list[Any], values: list[Any]) -> None:
    """Restore the entries of a mapping and their order.

    No entry is missing in between, for the case that other threads read the mapping. Only if the order has changed,
    each entry is removed and inserted again.
    """
    known = set(keys)
    for key in now:
        if key not in known:
            kind.__delitem__(container, key)
    for key, value in zip(keys, values, strict=True):
        kind.__setitem__(container, key, value)
    if not _are_same(list(kind.__iter__(container)), keys):
        for key, value in zip(keys, values, strict=True):
            kind.__delitem__(container, key)
            kind.__setitem__(container, key, value)


def _are_same(now: list[Any], before: list[Any]) -> bool:
    """True if both lists hold the same objects in the same order."""
    return len(now) == len(before) and all(map(operator.is_, now, before))


def rebuild(container: Any, kind: Any, keys: list[Any], values: list[Any]) -> None:
    """Clear a set or mapping and insert its former entries, because the hashes of its keys may have changed."""
    kind.clear(container)
    if kind is set:
        set.update(container, keys)
    else:
        for key, value in zip(keys, values, strict=True):
            kind.__setitem__(container, key, value)


def has_own_hash(kind: type) -> bool:
    """True for a class that defines `__hash__`, which may depend on the state of its objects."""
    return bool(kind.__flags__ & HEAP_TYPE) and kind.__hash__ not in (object.__hash__, torch.Tensor.__hash__)


def restore_attributes(value: Any, attributes: dict[str, Any]) -> None:
    if attributes_of(value) is not attributes:
        object.__setattr__(value, "__dict__", attributes)


def restore_class(value: Any, kind: type) -> None:
    if type(value) is not kind:
        object.__setattr__(value, "__class__", kind)


def restore_hooks(tensor: torch.Tensor, name: str, hooks: dict[int, Any] | None) -> None:
    """Restore the dict of hooks of a tensor.

    If the tensor had none, a new dict is emptied and not removed, because autograd refers to it.
    """
    now = getattr(tensor, name, None)
    if hooks is None and now is not None:
        now.clear()
    elif now is not hooks:
        setattr(tensor, name, hooks)


def restore_slot(value: Any, slot: Any, content: Any) -> None:
    if slot_content(value, slot) is content:
        return
    if content is EMPTY:
        slot.__delete__(value)
    else:
        slot.__set__(value, content)


def restore_cell(cell: types.CellType, content: Any) -> None:
    """Undo an assignment to a closure variable (`nonlocal`)."""
    if cell_content(cell) is content:
        return
    if content is EMPTY:
        del cell.cell_contents
    else:
        cell.cell_contents = content


def restore_tensor(
    tensor: torch.Tensor, data: torch.Tensor | None, requires_grad: bool, gradient: torch.Tensor | None
) -> None:
    """Restore data (unless it is None), `requires_grad` and gradient of a tensor.

    They change by `tensor.data = other`, `resize_`, `t_`, `requires_grad_`, or a backward that the model runs itself.
    """
    if data is not None and _layout(tensor) != _layout(data):
        tensor.data = data
    if tensor.requires_grad != requires_grad:
        if not tensor.is_leaf:  # an in-place op put it into a graph
            tensor.detach_()
        tensor.requires_grad_(requires_grad)
    if tensor.is_leaf and tensor.grad is not gradient:
        tensor.grad = gradient


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Address, shape, strides and dtype of a tensor."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def restore_array(array: Any, before: Any, numpy: types.ModuleType) -> None:
    if not numpy.array_equal(array, before):
        numpy.copyto(array, before)


def entries(container: Any, kind: Any) -> tuple[list[Any], list[Any]]:
    """Return the keys and the values of a mapping. For any other container, return its items and an empty list."""
    return list(kind.__iter__(container)), list(kind.values(container)) if issubclass(kind, dict) else []


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The `__dict__` of an object; None if it has none."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except Exception:  # it has no `__dict__`, or computes it in a way that fails
        return None
    return attributes if type(attributes) is dict else None


def slot_content(value: Any, slot: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return EMPTY


def cell_content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY
