"""A look at a model that leaves no trace: what is written while it lasts is afterwards as it was.

Of every tensor that is older than the look and written by an op, the bytes are copied to the host before the first
write, and put back. So is what modules and the loss function hold, their modes among it, and what that holds: plain
objects, containers, closures, arrays, generators. Not seen: what is written by other code than torch's ops, state in
global variables and in classes, and how often hooks are called.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import random
import sys
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.op_schema import traits_of

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def untouched(model: torch.nn.Module, function: Callable | None = None) -> Iterator[None]:
    """Around forwards and backwards of a model, and calls of its loss function."""
    with contextlib.ExitStack() as stack:
        for value in list(_reached([model, function])):
            for restore in _put_back(value):
                stack.callback(_or_told, restore, value)
        for tensor in (*model.parameters(), *model.buffers()):
            stack.callback(_put_back_data, tensor, tensor.data)
        stack.callback(random.setstate, random.getstate())
        if (numpy := sys.modules.get("numpy")) is not None:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        cards = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
        stack.enter_context(torch.random.fork_rng(list(cards)))
        stack.callback(torch.clear_autocast_cache)  # of weights without gradients
        writes = _CopiesOfWritten()
        stack.callback(writes.restore)
        with writes:
            yield


class _CopiesOfWritten(TorchDispatchMode):
    """Copies what is written, unless an op made it meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        traits = traits_of(op)
        if traits.writes:
            for tensor in tree_leaves(traits.written_arguments(args, kwargs)):
                self._copy(tensor)
        result = op(*args, **kwargs)
        if not traits.is_view:
            made = [result] if isinstance(result, torch.Tensor) else tree_leaves(result)
            new = {_storage(leaf) for leaf in made} - self._made
            if new:
                self._made |= new - {_storage(leaf) for leaf in tree_leaves((args, kwargs))}
        return result

    def _copy(self, tensor: Any) -> None:
        key = _storage(tensor)
        if key is None or key in self._made or key in self._copies:
            return
        whole = tensor.detach().new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        self._copies[key] = whole, whole.to("cpu", copy=True)

    def restore(self) -> None:
        with torch.no_grad():
            for written, before in self._copies.values():
                if len(written) == len(before):  # or else it was resized
                    written.copy_(before)


def _storage(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return value.untyped_storage()._cdata


def _or_told(restore: Callable[[], None], value: Any) -> None:
    """One object that cannot be put back does not keep others from it."""
    try:
        restore()
    except Exception as why:  # of a class of the user's own; it is told, and the others are put back
        logger.warning("a %s could not be put back (%s: %s)", type(value).__name__, type(why).__name__, why)


def _put_back_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """After `tensor.data = other`."""
    if tensor.layout == torch.strided and (tensor.data_ptr(), tensor.shape) != (data.data_ptr(), data.shape):
        tensor.data = data


def _reached(roots: Sequence[Any]) -> Iterator[Any]:
    """Objects that may keep state: what modules, plain objects, containers, closures and partial functions hold."""
    seen: set[int] = set()
    level = list(roots)
    for _ in range(_DEPTH):
        level = [value for value in level if id(value) not in seen]
        following: list[Any] = []
        for value in level:
            if id(value) not in seen and not isinstance(value, _LEFT_ALONE):
                seen.add(id(value))
                yield value
                following += _held_by(value)
        level = following
        if len(seen) > _MOST_OBJECTS:
            return


def _held_by(value: Any) -> list[Any]:
    if isinstance(value, torch.nn.Module):
        return [*value.modules(), *vars(value).values()]
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, deque)):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    held = [getattr(value, "__self__", None), *map(_content, getattr(value, "__closure__", None) or ())]
    held += [*(getattr(value, "__defaults__", None) or ()), *(getattr(value, "__kwdefaults__", None) or {}).values()]
    held += [getattr(value, name, None) for kind in type(value).__mro__ for name in _slots(kind)]
    return held + list(getattr(value, "__dict__", {}).values())


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(name for name in slots if not name.startswith("__"))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet given
        return None


def _put_back(value: Any) -> Iterator[Callable[[], None]]:
    """Functions that give an object what it holds now."""
    for holder in (value, getattr(value, "__dict__", None)):
        if type(holder) in _CLEARED or isinstance(holder, tuple(_CLEARED)):
            yield _refill(holder)
    for cell in getattr(value, "__closure__", None) or ():
        yield functools.partial(_fill, cell, _content(cell))
    for kind in type(value).__mro__:
        for name in _slots(kind):
            if hasattr(value, name):
                yield functools.partial(object.__setattr__, value, name, getattr(value, name))
    if isinstance(value, random.Random):
        yield functools.partial(value.setstate, value.getstate())
    elif isinstance(value, torch.Generator):
        yield functools.partial(value.set_state, value.get_state())
    elif (bits := getattr(value, "bit_generator", None)) is not None:  # numpy's
        yield functools.partial(setattr, bits, "state", bits.state)
    elif type(value).__module__ == "numpy" and hasattr(value, "setflags") and value.flags.writeable:
        yield functools.partial(value.__setitem__, ..., value.copy())


def _fill(cell: Any, content: Any) -> None:
    """After a function has given another value to a variable of the one around it."""
    if content is not None and _content(cell) is not content:
        cell.cell_contents = content


def _refill(container: Any) -> Callable[[], None]:
    """By the methods of the builtin type: those of classes made from it may do more."""
    kind = next(kind for kind in _CLEARED if isinstance(container, kind))
    is_mapping = issubclass(kind, dict)
    keys, values = list(kind.__iter__(container)), list(dict.values(container)) if is_mapping else []

    def refill() -> None:
        now, held = list(kind.__iter__(container)), list(dict.values(container)) if is_mapping else []
        pairs = itertools.zip_longest([*now, *held], [*keys, *values], fillvalue=_NOTHING)
        if all(one is other or (isinstance(one, str) and one == other) for one, other in pairs):
            return
        kind.clear(container)
        if is_mapping:
            for key, value in zip(keys, values, strict=True):
                kind.__setitem__(container, key, value)
        elif kind is set:
            set.update(container, keys)
        else:
            kind.extend(container, keys)

    return refill


_DEPTH, _MOST_OBJECTS = 6, 100_000
_CLEARED = (OrderedDict, dict, list, set, deque)
_LEFT_ALONE = (
    torch.Tensor, torch.dtype, torch.device, torch.optim.Optimizer, torch.utils.data.DataLoader,
    type, types.ModuleType, str, bytes, int, float, bool, type(None), logging.Logger, threading.Thread,
)  # fmt: skip
_NOTHING = object()
