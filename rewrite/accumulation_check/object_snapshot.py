"""What a model and its loss function hold, noted once and given back after each look at them.

Modules and plain objects with what they hold: their class, attributes, slots, containers, variables of closures,
arrays, generators of random numbers; of tensors what they are and their hooks, not what is in them. Left alone: state
in global variables and in classes, of scripted modules, in iterators, files, `functools.lru_cache`, of keys of dicts,
in arrays of objects, behind weak references or in containers of more than a thousand entries, arrays of more than
16 MiB, and what threads share: queues, executors, loaders, objects that hold one or a lock.
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
_WALKED = (*_CONTAINERS, tuple, frozenset)
_LEFT_ALONE = (type, types.ModuleType, str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)
_OF_THREADS = {"queue", "_queue", "threading", "_thread", "multiprocessing", "concurrent", "asyncio"}
"""Modules whose objects other threads may use meanwhile."""
_LEFT_ALONE_MODULES = _OF_THREADS | {
    "selectors", "socket", "ssl", "logging", "io", "_io", "subprocess", "weakref", "_weakref", "_weakrefset",
}  # fmt: skip
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_EMPTY = object()
"""In place of what a variable or a slot holds that holds nothing."""
_HEAP_TYPE = 1 << 9
"""Of `type.__flags__`: made by a class statement."""


class ObjectSnapshot:
    """Of these objects and all that can be reached from them.

    Attributes:
        is_whole: whether there were no more objects than are noted.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        self.is_whole = True
        self._restores: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._hashed: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        """Sets and mappings by what may hash by its state: they come when that is given back."""
        self._empty: list[Any] = []
        self._generators: list[tuple[Callable[[], Any], Callable[[Any], Any], Any]] = []
        self._kinds: dict[int, _Kind] = {}
        self._told: set[str] = set()
        modules = [root.modules() if isinstance(root, torch.nn.Module) else [root] for root in roots]
        self._walk(itertools.chain(*modules))
        self._note_generator(random.getstate, random.setstate)
        if (numpy := sys.modules.get("numpy")) is not None:
            self._note_generator(numpy.random.get_state, numpy.random.set_state)

    def restore(self) -> bool:
        """Whether generators of random numbers other than torch's had moved.

        An interruption is raised when all is done.
        """
        interrupted = None
        for restore, arguments in (*self._restores, *self._hashed):
            try:
                try:
                    restore(*arguments)
                except KeyboardInterrupt as why:
                    interrupted = why
                    restore(*arguments)
            except Exception as why:  # one object that cannot be put back does not keep others from it; it is told
                self._tell(f"a {type(arguments[0]).__name__} could not be put back", why)
        for container in self._empty:
            if container:
                container.clear()
        moved = False
        for get, put, state in self._generators:
            if pickle.dumps(get()) != pickle.dumps(state):
                put(state)
                moved = True
        if interrupted is not None:
            raise interrupted
        return moved

    def _tell(self, what: str, why: Exception) -> None:
        if what not in self._told:
            logger.warning("%s (%s: %s)", what, type(why).__name__, why)
        self._told.add(what)

    def _walk(self, roots: Iterable[Any]) -> None:
        """Note what is reached, the nearest first."""
        seen: dict[int, Any] = {}
        waiting = deque(roots)
        while waiting:
            value = waiting.popleft()
            kind = self._kind_of(value)
            if id(value) in seen or kind.is_left_alone:
                continue
            if kind.is_plain and not value:  # most of what modules hold
                self._empty.append(value)
                continue
            if len(seen) == _MOST_OBJECTS:
                self.is_whole = False
                return
            seen[id(value)] = value
            try:
                held = list(kind.held_by(value))
                if issubclass(kind.type, torch.nn.Module) or not any(self._kind_of(one).is_of_threads for one in held):
                    self._note(value, kind)
                    waiting.extend(held)
            except Exception as why:  # of a class of the user's own; it is told, and the others are noted
                self._tell(f"what a {kind.type.__name__} holds is not known", why)

    def _kind_of(self, value: Any) -> _Kind:
        kind = self._kinds.get(id(type(value)))
        if kind is None:
            kind = self._kinds[id(type(value))] = _Kind(type(value))
        return kind

    def _note(self, value: Any, of: _Kind) -> None:
        kind = of.type
        if kind.__flags__ & _HEAP_TYPE:
            self._restores.append((_put_back_class, (value, kind)))
        if (attributes := _attributes(value)) is not None:
            self._restores.append((_put_back_attributes, (value, attributes)))
            self._note_container(attributes, dict)
        for slot in of.slots:
            self._restores.append((_put_into_slot, (value, slot, _slot_of(value, slot))))
        if issubclass(kind, torch.Tensor):
            self._note_tensor(value)
        elif of.container in _CONTAINERS:
            self._note_container(value, of.container)
        elif kind is types.FunctionType:
            self._restores += [(_put_into_cell, (cell, _content(cell))) for cell in value.__closure__ or ()]
        elif issubclass(kind, (bytearray, array.array)):
            self._restores.append((operator.setitem, (value, slice(None), value[:])))
        elif issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):
            self._note_generator(value.getstate, value.setstate)
        elif issubclass(kind, torch.Generator):
            self._restores.append((torch.Generator.set_state, (value, value.get_state())))
        elif (numpy := sys.modules.get("numpy")) is not None:
            self._note_of_numpy(value, numpy)

    def _note_container(self, container: Any, kind: type) -> None:
        if kind.__len__(container) > _LONGEST:
            return
        keys, values = _entries(container, kind)
        if kind is not list and kind is not deque and any(map(_has_own_hash, set(map(type, keys)))):
            self._hashed.append((_fill_anew, (container, kind, keys, values)))
        else:
            self._restores.append((_refill, (container, kind, keys, values)))

    def _note_tensor(self, tensor: torch.Tensor) -> None:
        if not torch.nn.parameter.is_lazy(tensor):
            self._restores.append((_put_back_tensor, (tensor, *_state_of(tensor))))
        for name in _HOOKS:
            hooks = getattr(tensor, name, None)
            self._restores.append((_put_back_hooks, (tensor, name, hooks)))
            if hooks is not None:
                self._note_container(hooks, OrderedDict)

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


class _Kind:
    """What is to know of a class, by the builtin types that it is made from."""

    def __init__(self, kind: type) -> None:
        self.type = kind
        module = str(kind.__module__)
        package = module.partition(".")[0]
        self.is_of_threads = package in _OF_THREADS
        self.is_left_alone = (
            issubclass(kind, _LEFT_ALONE) or package in _LEFT_ALONE_MODULES or module.startswith("torch.utils.data")
        )
        self.container = next((base for base in _WALKED if issubclass(kind, base)), None)
        self.is_plain = any(kind is base for base in _CONTAINERS)
        bases = [base for base in kind.__mro__ if base.__flags__ & _HEAP_TYPE and "__slots__" in vars(base)]
        self.slots = [
            slot for base in bases for slot in vars(base).values() if type(slot) is types.MemberDescriptorType
        ]

    def held_by(self, value: Any) -> Iterator[Any]:
        kind = self.type
        yield from (_attributes(value) or {}).values()
        yield from (content for slot in self.slots if (content := _slot_of(value, slot)) is not _EMPTY)
        if self.container is not None:
            if self.container.__len__(value) <= _LONG:
                is_mapping = issubclass(self.container, dict)
                yield from self.container.values(value) if is_mapping else self.container.__iter__(value)
        elif issubclass(kind, functools.partial):
            yield from (value.func, value.args, value.keywords)
        elif kind is types.FunctionType:
            yield from (content for cell in value.__closure__ or () if (content := _content(cell)) is not _EMPTY)
            yield from (value.__defaults__, value.__kwdefaults__)
        elif kind is types.MethodType:
            yield from (value.__self__, value.__func__)
        elif kind is types.BuiltinMethodType:
            yield value.__self__
        elif issubclass(kind, torch.Tensor):
            yield from (getattr(value, name, None) for name in _HOOKS)


def _attributes(value: Any) -> dict[str, Any] | None:
    """Past a `__getattr__` of its class."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception:  # it has none, or its class makes it of something else
        return None
    return found if type(found) is dict else None


def _is_copied(array: Any) -> bool:
    return array.flags.writeable and array.nbytes <= _LARGEST_ARRAY_BYTES and not array.dtype.hasobject


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
    data = tensor.data if tensor.layout is torch.strided and not tensor.is_nested else None
    return data, tensor.requires_grad, tensor.grad if tensor.is_leaf else None


# ---- to give back ----------------------------------------------------------------------------------------------------


def _refill(container: Any, kind: type, keys: list[Any], values: list[Any]) -> None:
    """By the methods of the builtin type: those of classes made from it may do more."""
    now = _entries(container, kind)
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
        _refill_mapping(container, kind, now[0], keys, values)


def _refill_mapping(container: Any, kind: type, now: list[Any], keys: list[Any], values: list[Any]) -> None:
    """None of its entries is away meanwhile, not even for other threads, but those whose order has changed."""
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
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _fill_anew(container: Any, kind: type, keys: list[Any], values: list[Any]) -> None:
    """Each key by the hash that it has now."""
    kind.clear(container)
    if kind is set:
        set.update(container, keys)
    else:
        for key, value in zip(keys, values, strict=True):
            kind.__setitem__(container, key, value)


def _has_own_hash(kind: type) -> bool:
    return bool(kind.__flags__ & _HEAP_TYPE) and kind.__hash__ not in (object.__hash__, torch.Tensor.__hash__)


def _put_back_attributes(value: Any, attributes: dict[str, Any]) -> None:
    if _attributes(value) is not attributes:
        object.__setattr__(value, "__dict__", attributes)


def _put_back_class(value: Any, kind: type) -> None:
    if type(value) is not kind:
        object.__setattr__(value, "__class__", kind)


def _put_back_hooks(tensor: torch.Tensor, name: str, hooks: dict[int, Any] | None) -> None:
    """Where there were none, the dict stays, which autograd refers to."""
    now = getattr(tensor, name, None)
    if hooks is None and now is not None:
        now.clear()
    elif now is not hooks:
        setattr(tensor, name, hooks)


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
