"""What a model and its loss function hold, noted once and given back after each look at them.

Modules and plain objects with what they hold: attributes, slots, containers, variables of closures, arrays, caches,
generators of random numbers; of tensors what they are, not what is in them. Left alone: state in global variables and
in classes, iterators, files, what lies behind weak references or in containers of more than a thousand entries, arrays
of more than 16 MiB, and what threads share: queues, executors, loaders, objects that hold a lock.
"""

from __future__ import annotations

import array
import functools
import itertools
import logging
import operator
import pickle
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)

_MOST_OBJECTS = 100_000
_LONG = 1000
"""Entries of a container that is not walked through; its own entries are noted up to the next number."""
_LONGEST = 1_000_000
_LARGEST_ARRAY_BYTES = 16 << 20

_CONTAINERS = (OrderedDict, dict, list, set, deque)
_LEFT_ALONE = (type, types.ModuleType, str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)
_SHARED = {
    "queue", "_queue", "threading", "_thread", "multiprocessing", "concurrent", "asyncio", "selectors", "socket", "ssl",
    "logging", "io", "_io", "subprocess",
}  # fmt: skip
"""Modules whose objects other threads may use meanwhile."""
_EMPTY = object()
"""In place of what a variable or a slot holds that holds nothing."""
_HEAP_TYPE = 1 << 9
"""Of `type.__flags__`: made by a class statement."""


class HeldState:
    """Of these objects and all that can be reached from them.

    Attributes:
        is_whole: whether there were no more objects than are noted.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        self.is_whole = True
        self._restores: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._empty: list[Any] = []
        self._generators: list[tuple[Callable[[], Any], Callable[[Any], Any], Any]] = []
        self._is_left_alone = functools.cache(_is_left_alone)
        self._slots = functools.cache(_slots)
        modules = [root.modules() if isinstance(root, torch.nn.Module) else [root] for root in roots]
        for value in self._reached(itertools.chain(*modules)):
            try:
                self._note(value)
            except Exception as why:  # of a class of the user's own; it is told, and the others are noted
                logger.warning("what a %s holds is not known (%s: %s)", type(value).__name__, type(why).__name__, why)
        self._note_generator(random.getstate, random.setstate)
        if (numpy := sys.modules.get("numpy")) is not None:
            self._note_generator(numpy.random.get_state, numpy.random.set_state)

    def give_back(self) -> bool:
        """Whether generators of random numbers other than torch's had moved."""
        for container in self._empty:
            if container:
                container.clear()
        for restore, arguments in self._restores:
            try:
                restore(*arguments)
            except Exception as why:  # one object that cannot be put back does not keep others from it; it is told
                name = type(arguments[0]).__name__
                logger.warning("a %s could not be put back (%s: %s)", name, type(why).__name__, why)
        moved = False
        for get, put, state in self._generators:
            if pickle.dumps(get()) != pickle.dumps(state):
                put(state)
                moved = True
        return moved

    def _reached(self, roots: Iterable[Any]) -> Iterator[Any]:
        """The nearest first."""
        seen: dict[int, Any] = {}
        waiting = deque(roots)
        while waiting:
            value = waiting.popleft()
            if id(value) in seen or self._is_left_alone(type(value)) or _is_shared(value):
                continue
            if type(value) in _CONTAINERS and not value:  # most of what modules hold
                self._empty.append(value)
                continue
            if len(seen) == _MOST_OBJECTS:
                self.is_whole = False
                return
            seen[id(value)] = value
            yield value
            waiting.extend(self._held_by(value))

    def _held_by(self, value: Any) -> Iterable[Any]:
        kind = type(value)
        held: list[Any] = list((_attributes(value) or {}).values())
        held += [content for slot in self._slots(kind) if (content := _slot_of(value, slot)) is not _EMPTY]
        if issubclass(kind, dict):
            held += dict.values(value) if len(value) <= _LONG else ()
        elif issubclass(kind, (list, tuple, set, frozenset, deque)):
            held += value if len(value) <= _LONG else ()
        elif issubclass(kind, functools.partial):
            held += [value.func, value.args, value.keywords]
        elif kind is types.FunctionType:
            held += [content for cell in value.__closure__ or () if (content := _content(cell)) is not _EMPTY]
            held += [value.__defaults__, value.__kwdefaults__]
        elif kind is types.MethodType:
            held += [value.__self__, value.__func__]
        elif kind is types.BuiltinMethodType:
            held.append(value.__self__)
        elif kind is functools._lru_cache_wrapper:
            held.append(value.__wrapped__)
        return held

    def _note(self, value: Any) -> None:
        kind = type(value)
        if (attributes := _attributes(value)) is not None:
            self._note_container(attributes)
        for slot in self._slots(kind):
            self._restores.append((_put_into_slot, (value, slot, _slot_of(value, slot))))
        if issubclass(kind, torch.Tensor):
            self._restores.append((_put_back_tensor, (value, *_state_of(value))))
        elif issubclass(kind, _CONTAINERS):
            self._note_container(value)
        elif kind is types.FunctionType:
            self._restores += [(_put_into_cell, (cell, _content(cell))) for cell in value.__closure__ or ()]
        elif kind is functools._lru_cache_wrapper:
            self._restores.append((_clear_if_used, (value, [value.cache_info().misses])))
        elif issubclass(kind, (bytearray, array.array)):
            self._restores.append((operator.setitem, (value, slice(None), value[:])))
        elif issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):
            self._note_generator(value.getstate, value.setstate)
        elif issubclass(kind, torch.Generator):
            self._restores.append((torch.Generator.set_state, (value, value.get_state())))
        elif (numpy := sys.modules.get("numpy")) is not None:
            self._note_of_numpy(value, numpy)

    def _note_container(self, container: Any) -> None:
        if len(container) <= _LONGEST:
            kind = next(kind for kind in _CONTAINERS if issubclass(type(container), kind))
            self._restores.append((_refill, (container, kind, *_entries(container, kind))))

    def _note_of_numpy(self, value: Any, numpy: types.ModuleType) -> None:
        kind = type(value)
        if issubclass(kind, numpy.random.RandomState):
            self._note_generator(value.get_state, value.set_state)
        elif issubclass(kind, numpy.random.Generator):
            self._note_of_numpy(value.bit_generator, numpy)
        elif issubclass(kind, numpy.random.BitGenerator):
            self._note_generator(lambda: value.state, lambda state: setattr(value, "state", state))
        elif issubclass(kind, numpy.ndarray) and not issubclass(kind, numpy.memmap) and _is_copied(value):
            self._restores.append((_put_back_array, (value, value.copy(), numpy)))

    def _note_generator(self, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self._generators.append((get, put, get()))


def _is_left_alone(kind: type) -> bool:
    module = str(kind.__module__)
    return issubclass(kind, _LEFT_ALONE) or module.partition(".")[0] in _SHARED or module.startswith("torch.utils.data")


def _is_shared(value: Any) -> bool:
    """By threads: it holds a lock."""
    if issubclass(type(value), torch.nn.Module):
        return False
    return any(type(held).__module__ in ("_thread", "threading") for held in (_attributes(value) or {}).values())


def _attributes(value: Any) -> dict[str, Any] | None:
    """Past a `__getattr__` of its class."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if type(found) is dict else None


def _is_copied(array: Any) -> bool:
    return array.flags.writeable and array.nbytes <= _LARGEST_ARRAY_BYTES and not array.dtype.hasobject


def _slots(kind: type) -> list[Any]:
    bases = [base for base in kind.__mro__ if base.__flags__ & _HEAP_TYPE and "__slots__" in vars(base)]
    return [slot for base in bases for slot in vars(base).values() if type(slot) is types.MemberDescriptorType]


def _slot_of(value: Any, slot: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return _EMPTY


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _entries(container: Any, kind: type) -> tuple[list[Any], list[Any]]:
    """Keys or items, and values."""
    return list(kind.__iter__(container)), list(kind.values(container)) if issubclass(kind, dict) else []


def _state_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    data = tensor.data if tensor.layout is torch.strided else None
    return data, tensor.requires_grad, tensor.grad if tensor.is_leaf else None


# ---- to give back ----------------------------------------------------------------------------------------------------


def _refill(container: Any, kind: type, keys: list[Any], values: list[Any]) -> None:
    """By the methods of the builtin type: those of classes made from it may do more."""
    if all(
        len(now) == len(before) and all(map(operator.is_, now, before))
        for now, before in zip(_entries(container, kind), (keys, values), strict=True)
    ):
        return
    kind.clear(container)
    if issubclass(kind, dict):
        for key, value in zip(keys, values, strict=True):
            kind.__setitem__(container, key, value)
    elif kind is set:
        set.update(container, keys)
    else:
        kind.extend(container, keys)


def _put_into_slot(value: Any, slot: Any, content: Any) -> None:
    if _slot_of(value, slot) is content:
        return
    if content is _EMPTY:
        slot.__delete__(value)
    else:
        slot.__set__(value, content)


def _put_into_cell(cell: types.CellType, content: Any) -> None:
    """After a function has given another value to a variable of the one around it."""
    if _content(cell) is content:
        return
    if content is _EMPTY:
        del cell.cell_contents
    else:
        cell.cell_contents = content


def _put_back_tensor(
    tensor: torch.Tensor, data: torch.Tensor | None, requires_grad: bool, gradient: torch.Tensor | None
) -> None:
    """After `tensor.data = other`, `resize_`, `t_`, `requires_grad_`, or a backward of the model's own."""
    if data is not None and _place(tensor) != _place(data):
        tensor.data = data
    if tensor.requires_grad != requires_grad:
        if not tensor.is_leaf:  # an op on it in place made it so
            tensor.detach_()
        tensor.requires_grad_(requires_grad)
    if tensor.is_leaf and tensor.grad is not gradient:
        tensor.grad = gradient


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _put_back_array(array: Any, before: Any, numpy: types.ModuleType) -> None:
    if not numpy.array_equal(array, before):
        numpy.copyto(array, before)


def _clear_if_used(cache: Any, misses: list[int]) -> None:
    """What was made meanwhile is made of numbers that were not drawn; without it the function is called again."""
    if cache.cache_info().misses != misses[0]:
        cache.cache_clear()
        misses[0] = 0
