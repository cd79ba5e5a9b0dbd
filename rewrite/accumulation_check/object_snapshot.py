"""Snapshot the Python state of a model and its loss function, and restore it in place.

A forward may count its calls, fill caches, update a queue of negative samples or draw from a generator of its own. A
check that runs the model must leave no trace of that. `ObjectSnapshot` searches all objects that can be reached from
the roots, breadth first, and notes for each object how to restore it: class, attributes, slots, containers, closure
variables, numpy and `array` arrays, generators of random numbers; for tensors their metadata, gradient and hooks.
Objects are restored in place, because others may refer to them. The bytes of tensors are not copied here:
`side_effects` copies those of the tensors that are written.

What is not restored:

- state in scripted modules, in iterators and files, and in `functools.lru_cache`;
- state in global variables and classes of libraries (`_LIBRARIES`), and in global variables that only functions read
  which methods of the model's classes or the loss function call;
- the state of objects that are keys of dicts, or that only weak references lead to;
- numpy arrays of objects or of more than 16 MiB;
- the state of objects in a container with more than a thousand entries (the container itself is restored, up to a
  million entries);
- anything that threads share: queues, executors, data loaders, and plain objects that hold one of them or a lock.
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

from planner.rewrite.accumulation_check.restoring import (
    EMPTY,
    HEAP_TYPE,
    attributes_of,
    cell_content,
    entries,
    has_own_hash,
    rebuild,
    restore_array,
    restore_attributes,
    restore_cell,
    restore_class,
    restore_entries,
    restore_hooks,
    restore_slot,
    restore_tensor,
    slot_content,
)

logger = logging.getLogger(__name__)

_MAX_OBJECTS = 100_000
"""Maximum number of objects in a snapshot. Those that are the fewest references away from the model come first."""
_MAX_WALKED_ENTRIES = 1000
"""If a container has more entries, the objects in it are not part of the snapshot."""
_MAX_NOTED_ENTRIES = 1_000_000
"""If a container has more entries, it is not restored."""
_MAX_ARRAY_BYTES = 16 << 20
"""Numpy arrays of more bytes are not restored."""

_CONTAINERS = (OrderedDict, dict, list, set, deque)
"""Builtin container types that are restored. A subclass comes before its base class."""
_WALKED = (*_CONTAINERS, tuple, frozenset)
"""Builtin container types whose entries the search visits."""
_IMMUTABLE = (type, types.ModuleType, str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)
"""Types of objects without state, or whose state is global. The search leaves them out."""
_THREADING_MODULES = {"queue", "_queue", "threading", "_thread", "multiprocessing", "concurrent", "asyncio"}
"""Modules of classes whose objects other threads may be using."""
_IGNORED_MODULES = _THREADING_MODULES | {
    "selectors", "socket", "ssl", "logging", "io", "_io", "subprocess", "weakref", "_weakref", "_weakrefset",
}  # fmt: skip
"""Modules of classes whose objects the search leaves out."""
_LIBRARIES = ("torch.", "transformers.")
"""Beginnings of the names of modules whose classes and global variables are known to keep no state of a forward."""
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of tensors that hold hooks."""

_Restore = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function that restores something, and the arguments to call it with."""


class ObjectSnapshot:
    """A snapshot of the state of some objects, and of all objects that can be reached from them.

    Attributes:
        is_complete: False if there were too many objects to note all of them.
        iterator: name of the type of an iterator that was found, whose position is not restored; None if there is none.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        self.is_complete = True
        self.iterator: str | None = None
        self._positions: list[tuple[Any, str | None]] = []
        """The iterators that were found, with the position of each; None if it cannot be read."""
        self._restores: list[_Restore] = []
        self._hashed: list[_Restore] = []
        """How to restore sets and mappings with keys whose hash may depend on their state. This is done last."""
        self._empty: list[Any] = []
        """Containers to empty. They are in a list of their own because most containers in modules are empty."""
        self._generators: list[tuple[Callable[[], Any], Callable[[Any], Any], Any]] = []
        """For each generator of random numbers: function that reads its state, function that sets it, former state."""
        self._types: dict[int, _TypeInfo] = {}
        self._warned_topics: set[str] = set()
        modules = [root.modules() if isinstance(root, torch.nn.Module) else [root] for root in roots]
        flat = list(itertools.chain(*modules))
        self._walk(itertools.chain(flat, self._outside_of(flat)))
        self._note_generator(random.getstate, random.setstate)
        if (numpy := sys.modules.get("numpy")) is not None:
            self._note_generator(numpy.random.get_state, numpy.random.set_state)

    def restore(self) -> bool:
        """Restore everything. May be called several times.

        Returns True if a generator of numpy or Python had drawn random numbers. A `KeyboardInterrupt` in between is
        raised after everything is restored.
        """
        interrupted = None
        for restore, arguments in (*self._restores, *self._hashed):
            try:
                try:
                    restore(*arguments)
                except KeyboardInterrupt as error:
                    interrupted = error
                    restore(*arguments)
            except Exception as error:  # one object that cannot be restored must not keep others from it
                self._warn_once(f"the check of micro-batches could not restore a {type(arguments[0]).__name__}", error)
        for container in self._empty:
            if container:
                container.clear()
        has_drawn = False
        for get_state, set_state, state in self._generators:
            if pickle.dumps(get_state()) != pickle.dumps(state):
                set_state(state)
                has_drawn = True
        if interrupted is not None:
            raise interrupted
        return has_drawn

    @property
    def lost_iterator(self) -> str | None:
        """Name of the type of an iterator that has moved since the snapshot or may have moved; None if none has."""
        lost = (value for value, position in self._positions if position is None or position != _position_of(value))
        return next((type(value).__name__ for value in lost), None)

    def _outside_of(self, roots: list[Any]) -> list[Any]:
        """Note plain values in classes and global variables that the code of the roots names; return the objects."""
        functions = [root for root in roots if isinstance(root, types.FunctionType)]
        found: list[Any] = []
        kinds = {id(type(root)): type(root) for root in roots}.values()  # a class may have no hash
        for kind in kinds:
            if kind.__module__.startswith(_LIBRARIES):
                continue
            functions += [value for value in vars(kind).values() if isinstance(value, types.FunctionType)]
            for name, value in vars(kind).items():
                if isinstance(value, (int, float, str)) and not name.startswith("__"):
                    self._restores.append((setattr, (kind, name, value)))
                elif isinstance(value, _CONTAINERS):
                    found.append(value)
        for function in functions:
            for name in function.__code__.co_names:
                value = function.__globals__.get(name)
                if isinstance(value, (int, float, str)):
                    self._restores.append((operator.setitem, (function.__globals__, name, value)))
                elif not getattr(type(value), "__module__", "").startswith(_LIBRARIES):
                    found.append(value)
        return found

    def _warn_once(self, message: str, error: Exception) -> None:
        if message not in self._warned_topics:
            logger.warning("%s (%s: %s)", message, type(error).__name__, error)
        self._warned_topics.add(message)

    def _walk(self, roots: Iterable[Any]) -> None:
        """Search all objects that can be reached from the roots, breadth first, and note how to restore each."""
        seen: dict[int, Any] = {}
        waiting = deque(roots)
        while waiting:
            value = waiting.popleft()
            info = self._info_of(value)
            if id(value) in seen or info.is_ignored:
                continue
            if info.is_plain and not value:
                self._empty.append(value)
                continue
            if len(seen) == _MAX_OBJECTS:
                self.is_complete = False
                return
            seen[id(value)] = value  # keeps it alive, so that its id is not reused
            if hasattr(info.type, "__next__"):
                self.iterator = info.type.__name__
                self._positions.append((value, _position_of(value)))
            try:
                held = list(info.held_by(value))
                if issubclass(info.type, torch.nn.Module) or not self._are_shared(held):
                    self._note(value, info)
                    waiting.extend(held)
            except Exception as error:  # raised by a class of the user's own; all other objects are still noted
                message = f"the check of micro-batches could not read a {info.type.__name__}, and will not restore it"
                self._warn_once(message, error)

    def _are_shared(self, held: list[Any]) -> bool:
        """True if other threads may be using the object that holds these objects."""
        return any(self._info_of(item).is_for_threads for item in held)

    def _info_of(self, value: Any) -> _TypeInfo:
        info = self._types.get(id(type(value)))
        if info is None:
            info = self._types[id(type(value))] = _TypeInfo(type(value))
        return info

    def _note(self, value: Any, info: _TypeInfo) -> None:
        """Note how to restore one object: class, attributes and slots, then what its builtin type (dict ...) holds."""
        kind = info.type
        if kind.__flags__ & HEAP_TYPE:
            self._restores.append((restore_class, (value, kind)))
        if (attributes := attributes_of(value)) is not None:
            self._restores.append((restore_attributes, (value, attributes)))
            self._note_container(attributes, dict)
        for slot in info.slots:
            self._restores.append((restore_slot, (value, slot, slot_content(value, slot))))
        if issubclass(kind, torch.Tensor):
            self._note_tensor(value)
        elif info.container in _CONTAINERS:
            self._note_container(value, info.container)
        elif kind is types.FunctionType:
            self._restores += [(restore_cell, (cell, cell_content(cell))) for cell in value.__closure__ or ()]
        elif issubclass(kind, (bytearray, array.array)):
            self._restores.append((operator.setitem, (value, slice(None), value[:])))
        elif issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):
            self._note_generator(value.getstate, value.setstate)
        elif issubclass(kind, torch.Generator):
            self._restores.append((torch.Generator.set_state, (value, value.get_state())))
        elif (numpy := sys.modules.get("numpy")) is not None:
            self._note_numpy(value, numpy)

    def _note_container(self, container: Any, kind: Any) -> None:
        if kind.__len__(container) > _MAX_NOTED_ENTRIES:
            return
        keys, values = entries(container, kind)
        if kind is not list and kind is not deque and any(map(has_own_hash, set(map(type, keys)))):
            self._hashed.append((rebuild, (container, kind, keys, values)))
        else:
            self._restores.append((restore_entries, (container, kind, keys, values)))

    def _note_tensor(self, tensor: torch.Tensor) -> None:
        if not torch.nn.parameter.is_lazy(tensor):
            self._restores.append((restore_tensor, (tensor, *_tensor_state(tensor))))
        for name in _HOOKS:
            hooks = getattr(tensor, name, None)
            self._restores.append((restore_hooks, (tensor, name, hooks)))
            if hooks is not None:
                self._note_container(hooks, OrderedDict)

    def _note_numpy(self, value: Any, numpy: types.ModuleType) -> None:
        """Note generators and arrays of numpy, which need not be installed."""
        kind = type(value)
        if issubclass(kind, numpy.random.RandomState):
            self._note_generator(value.get_state, value.set_state)
        elif issubclass(kind, numpy.random.Generator):
            self._note_numpy(value.bit_generator, numpy)
        elif issubclass(kind, numpy.random.BitGenerator):
            self._note_generator(lambda: value.state, lambda state: setattr(value, "state", state))
        elif issubclass(kind, numpy.ndarray) and not issubclass(kind, numpy.memmap) and _can_copy(value):
            self._restores.append((restore_array, (value, value.copy(), numpy)))

    def _note_generator(self, get_state: Callable[[], Any], set_state: Callable[[Any], Any]) -> None:
        self._generators.append((get_state, set_state, get_state()))


class _TypeInfo:
    """Facts about a class that the search needs, such as the builtin container that it derives from."""

    def __init__(self, kind: type) -> None:
        self.type = kind
        module = str(kind.__module__)
        package = module.partition(".")[0]
        self.is_for_threads = package in _THREADING_MODULES
        self.is_ignored = (
            issubclass(kind, _IMMUTABLE) or package in _IGNORED_MODULES or module.startswith("torch.utils.data")
        )
        self.container: Any = next((base for base in _WALKED if issubclass(kind, base)), None)
        """The builtin container type that the class is or derives from; None for other classes."""
        self.is_plain = any(kind is base for base in _CONTAINERS)
        bases = [base for base in kind.__mro__ if base.__flags__ & HEAP_TYPE and "__slots__" in vars(base)]
        self.slots = [
            slot for base in bases for slot in vars(base).values() if type(slot) is types.MemberDescriptorType
        ]

    def held_by(self, value: Any) -> Iterator[Any]:
        """Yields the objects that `value` refers to."""
        kind = self.type
        yield from (attributes_of(value) or {}).values()
        yield from (content for slot in self.slots if (content := slot_content(value, slot)) is not EMPTY)
        if self.container is not None:
            if self.container.__len__(value) <= _MAX_WALKED_ENTRIES:
                is_mapping = issubclass(self.container, dict)
                yield from self.container.values(value) if is_mapping else self.container.__iter__(value)
        elif issubclass(kind, functools.partial):
            yield from (value.func, value.args, value.keywords)
        elif kind is types.FunctionType:
            yield from (content for cell in value.__closure__ or () if (content := cell_content(cell)) is not EMPTY)
            yield from (value.__defaults__, value.__kwdefaults__)
        elif kind is types.MethodType:
            yield from (value.__self__, value.__func__)
        elif kind is types.BuiltinMethodType:
            yield value.__self__
        elif issubclass(kind, torch.Tensor):
            yield from (getattr(value, name, None) for name in _HOOKS)


# ---- reading state ---------------------------------------------------------------------------------------------------
# Containers and attributes are read by the methods of their builtin type, since a subclass may override them.


def _position_of(iterator: Any) -> str | None:
    """Return text that contains the position of an iterator; None if its type does not show the position."""
    return repr(iterator) if isinstance(iterator, (itertools.count, itertools.repeat)) else None


def _can_copy(array: Any) -> bool:
    return array.flags.writeable and array.nbytes <= _MAX_ARRAY_BYTES and not array.dtype.hasobject


def _tensor_state(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return data, `requires_grad` and gradient, without a copy. Data is None for sparse and nested tensors."""
    data = tensor.data if tensor.layout is torch.strided and not tensor.is_nested else None
    return data, tensor.requires_grad, tensor.grad if tensor.is_leaf else None
