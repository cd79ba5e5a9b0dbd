"""A look at a model that leaves no trace: what is written while it lasts is afterwards as it was.

Of every tensor that is older than the look and written by an op, the bytes are copied to the host before the first
write, and put back. So is what modules and the loss function hold under their names, their modes among it, generators,
and what lies in lists, dicts and sets there or in the closure of a function. Not seen: what is written by other code
than torch's ops, state in global variables, and how often hooks are called.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, MutableSet, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.op_schema import traits_of


@contextlib.contextmanager
def untouched(model: torch.nn.Module, function: Callable | None = None) -> Iterator[None]:
    """Around forwards and backwards of a model, and calls of its loss function."""
    with contextlib.ExitStack() as stack:
        for holder in (*model.modules(), *_holders(function)):
            for restore in _of_attributes(holder):
                stack.callback(restore)
        for cell in getattr(function, "__closure__", None) or ():
            stack.callback(_fill, cell, _content(cell))
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
        for tensor in tree_leaves(traits.written_arguments(args, kwargs)):
            self._copy(tensor)
        result = op(*args, **kwargs)
        if not traits.is_view:
            given = {_storage(leaf) for leaf in tree_leaves((args, kwargs))}
            self._made.update(key for leaf in tree_leaves(result) if (key := _storage(leaf)) not in given)
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


def _put_back_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """After `tensor.data = other`."""
    if tensor.layout == torch.strided and (tensor.data_ptr(), tensor.shape) != (data.data_ptr(), data.shape):
        tensor.data = data


def _holders(function: Callable | None) -> Iterator[Any]:
    """What a loss function may keep its state in."""
    bound = getattr(function, "__self__", None)
    cells = [_content(cell) for cell in getattr(function, "__closure__", None) or ()]
    for value in (function, bound, *cells):
        if isinstance(value, torch.nn.Module):
            yield from value.modules()
        elif hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType)):
            yield value
    yield _Cells(getattr(function, "__closure__", None) or ())


class _Cells:
    """Contents of a closure, under numbers."""

    def __init__(self, cells: Sequence[Any]) -> None:
        self.__dict__.update({str(number): _content(cell) for number, cell in enumerate(cells)})


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet given
        return None


def _fill(cell: Any, content: Any) -> None:
    """After a function has given another value to a variable of the one around it."""
    if content is not None and _content(cell) is not content:
        cell.cell_contents = content


def _of_attributes(holder: Any) -> Iterator[Callable[[], None]]:
    """Functions that put back what an object holds."""
    attributes = vars(holder)
    if isinstance(attributes, MutableMapping):
        yield _put_back(attributes)
    for value in list(attributes.values()):
        if isinstance(value, (MutableMapping, MutableSequence, MutableSet, deque)):
            yield _put_back(value)
        elif isinstance(value, random.Random):
            yield _put_back_generator(value.setstate, value.getstate())
        elif (bits := getattr(value, "bit_generator", None)) is not None:  # numpy's
            yield _put_back_generator(functools.partial(setattr, bits, "state"), bits.state)
        elif isinstance(value, torch.Generator):
            yield _put_back_generator(value.set_state, value.get_state())


def _put_back_generator(function: Callable[[Any], Any], state: Any) -> Callable[[], None]:
    return lambda: function(state)


def _put_back(container: Any) -> Callable[[], None]:
    """Of a mapping, sequence or set: what it holds, in its order."""
    is_mapping = isinstance(container, MutableMapping)
    keys, values = list(container), list(container.values() if is_mapping else ())

    def put_back() -> None:
        now, held = list(container), list(container.values() if is_mapping else ())
        pairs = itertools.zip_longest([*now, *held], [*keys, *values], fillvalue=_NOTHING)
        if all(one is other or (isinstance(one, str) and one == other) for one, other in pairs):
            return
        container.clear()
        if is_mapping:
            container.update(zip(keys, values, strict=True))
        elif isinstance(container, MutableSet):
            container.update(keys)
        else:
            container.extend(keys)

    return put_back


_NOTHING = object()
