"""Describes the Python state that a step can reach, so that it can be compared before two steps.

The description is that of all objects that can be reached from the roots, breadth first: attributes, slots, containers,
arrays, generators of random numbers, closures, and the global variables, classes and modules that the user's functions
name. Code of `_LIBRARIES` is not searched, and of other installed packages only forwards are. The objects of both are
searched, such as the configuration of a model.

An object whose state Python does not show, such as an iterator or a file, differs from itself: a step that reaches it
is never taken for one that begins alike. Exceptions are types that are known to be fixed (`_FIXED`).
"""

from __future__ import annotations

import array
import contextvars
import datetime
import enum
import functools
import itertools
import logging
import pathlib
import pickle
import random
import re
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_MOST_OBJECTS = 200_000
"""If more objects can be reached, the state is not known."""
_MOST_BYTES = 64 << 20
"""The state of larger numpy arrays is not known."""
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, deque, set, frozenset)
_FIXED = (
    enum.Enum, re.Pattern, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, logging.Logger,
    slice, range, types.CodeType, types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.ClassMethodDescriptorType, types.GenericAlias, types.UnionType,
    type(threading.Lock()), type(threading.RLock()), type(Ellipsis), type(NotImplemented),
)  # fmt: skip
"""Types whose objects keep no state that a forward reads, although Python does not show what they hold."""
_LIBRARIES = frozenset({"torch", "transformers", "numpy", "planner", *sys.stdlib_module_names} - {"__main__"})
"""Packages whose functions and classes are known to keep no state of a forward."""
_NOT_STATE_OF_CLASS = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "_abc_impl", "__annotations__", "__annotations_cache__"}
)
"""Attributes of a class that a forward does not read."""
_OF_FAKE = frozenset({"fake_mode", "constant", "pytype", "dispatch_keys", "real_tensor"})
"""Attributes of a fake tensor, besides those whose names begin with an underscore."""


class _Unknown:
    """Stands for state that Python does not show. It differs from everything."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = object.__hash__


class _Same:
    """Stands for a tensor, and equals only itself. It does not keep the tensor alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference = weakref.ref(tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._reference is other._reference

    __hash__ = object.__hash__


def python_state(roots: Iterable[object], value_of_buffer: Callable[[str, Any, torch.Tensor], object]) -> list[object]:
    """Returns the state of all objects that can be reached from `roots`. Two states are equal if none has changed.

    The values of tensors are not part of it, except those of buffers. In-place writes to parameters and buffers do not
    change it, and those to other tensors do.

    Args:
        value_of_buffer: returns what is known of the values of a buffer, from its name, its module and the tensor.
    """
    search = _Search(value_of_buffer)
    shared = [value for name, value in vars(torch.nn.modules.module).items() if name.startswith("_global_")]
    state = search.run([*roots, *shared, random.getstate(), _numpy_random_state()])
    return [*state, *_settings()]


def _numpy_random_state() -> bytes | None:
    return pickle.dumps(sys.modules["numpy"].random.get_state()) if "numpy" in sys.modules else None


def _settings() -> tuple[object, ...]:
    """Returns the settings of PyTorch that a forward can change for the next one."""
    kernels = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        *(kernels.flash_sdp_enabled(), kernels.mem_efficient_sdp_enabled()),
        *(kernels.math_sdp_enabled(), kernels.cudnn_sdp_enabled()),
    )


class _Search:
    """A search of objects, breadth first."""

    def __init__(self, value_of_buffer: Callable[[str, Any, torch.Tensor], object]) -> None:
        self._value_of_buffer = value_of_buffer
        self._found: dict[int, tuple[int, object]] = {}
        """Number of each object in the order of the search, by id; and the object, so that no id is used twice."""
        self._buffers: dict[int, tuple[str, torch.nn.Module]] = {}
        self._waiting: deque[object] = deque()

    def run(self, roots: Iterable[object]) -> list[object]:
        """Returns the states of all objects that can be reached."""
        self._waiting.extend(roots)
        state: list[object] = []
        while self._waiting:
            value = self._waiting.popleft()
            if type(value) in _PLAIN:
                state.append(value)
            elif id(value) in self._found:
                state.append(self._found[id(value)][0])
            elif len(self._found) == _MOST_OBJECTS:
                return [_Unknown()]
            else:
                self._found[id(value)] = len(self._found), value
                state += (type(value), *self._states(value))
        return state

    def _states(self, value: Any) -> Iterator[object]:
        """Yields the state of an object that is not plain, and adds the objects that it refers to."""
        add, kind = self._waiting.extend, type(value)
        if isinstance(value, torch.Tensor):
            yield from self._of_tensor(value)
        elif isinstance(value, type):
            add(_parts_of_class(value))
        elif isinstance(value, types.FunctionType):
            add(_parts_of_function(value))
        elif isinstance(value, types.MethodType):
            add((value.__self__, value.__func__))
        elif isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
            add((value.__name__, value.__self__))
        elif isinstance(value, (staticmethod, classmethod)):
            add((value.__func__,))
        elif isinstance(value, (property, functools.partial)):
            names = ("fget", "fset") if isinstance(value, property) else ("func", "args", "keywords")
            add(getattr(value, name) for name in names)
        elif isinstance(value, functools._lru_cache_wrapper):
            yield value.cache_info().misses
            add((value.cache_info().currsize, value.__wrapped__))
        elif isinstance(value, weakref.ref):
            add((value(),))
        elif isinstance(value, contextvars.ContextVar):
            add((value.get(None),))
        elif isinstance(value, types.MappingProxyType):
            add((dict(value),))
        elif isinstance(value, (types.ModuleType, *_FIXED)) or _is_fixed_of_torch(kind):
            yield id(value)
        elif _package(kind.__module__) != "planner":
            yield from self._of_object(value, kind)

    def _of_tensor(self, tensor: torch.Tensor) -> Iterator[object]:
        yield _Same(tensor)
        if isinstance(tensor, torch.nn.Parameter):
            yield tensor.requires_grad
            yield tensor.grad is None
        elif id(tensor) in self._buffers:
            yield self._value_of_buffer(*self._buffers[id(tensor)], tensor)
        elif not tensor.is_inference():
            yield tensor._version
        own = [*vars(tensor).items()]
        if isinstance(tensor, FakeTensor):
            own = [(name, value) for name, value in own if name not in _OF_FAKE and not name.startswith("_")]
        self._waiting.extend(itertools.chain(*own))

    def _of_object(self, value: Any, kind: type) -> Iterator[object]:
        """Yields the state of an object, and adds its class, attributes and slots, and what its builtin type holds."""
        attributes, slots = _attributes_of(value), _slots_of(kind)
        self._waiting += (kind, *attributes.keys(), *attributes.values(), *(_content(value, slot) for slot in slots))
        if isinstance(value, torch.nn.Module):
            self._buffers |= {id(buffer): (name, value) for name, buffer in value._buffers.items()}
        container = next((base for base in _CONTAINERS if isinstance(value, base)), None)
        if container is not None:
            entries = [*container.__iter__(value), *(dict.values(value) if container is dict else ())]
            yield len(entries)
            if {type(entry) for entry in entries} <= _PLAIN:
                yield entries
            else:
                self._waiting += entries
        elif isinstance(value, (int, float, complex, str, bytes)):
            yield value
        elif isinstance(value, (bytearray, array.array)):
            yield bytes(value)
        elif isinstance(value, random.Random):
            yield value.getstate()
        elif isinstance(value, (itertools.count, itertools.repeat)):
            yield repr(value)
        elif _package(kind.__module__) == "numpy":
            yield _numpy_state(value)
        elif _hides_state(kind, len(slots)):
            yield _Unknown()


# ---- parts of objects ------------------------------------------------------------------------------------------------


def _attributes_of(value: object) -> dict[str, object]:
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return attributes if type(attributes) is dict else {}


def _slots_of(kind: type) -> list[types.MemberDescriptorType]:
    bases = (base for base in kind.__mro__ if "__slots__" in vars(base))
    return [slot for base in bases for slot in vars(base).values() if type(slot) is types.MemberDescriptorType]


def _content(value: object, slot: types.MemberDescriptorType) -> object:
    """Returns the content of a slot; the slot itself if it is empty."""
    try:
        return slot.__get__(value)
    except AttributeError:
        return slot


def _hides_state(kind: type, slots: int) -> bool:
    """True if the objects of a class have memory besides that for their attributes and slots."""
    pointers = slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__itemsize__ > 0 or kind.__basicsize__ > object.__basicsize__ + 8 * pointers


def _is_fixed_of_torch(kind: type) -> bool:
    """True for classes of PyTorch that are written in C++, such as `torch.dtype`."""
    return _package(kind.__module__) == "torch" and _hides_state(kind, 0) and not issubclass(kind, (*_CONTAINERS, str))


def _parts_of_class(kind: type) -> Iterator[object]:
    if _package(kind.__module__) not in _LIBRARIES:
        is_installed = _is_installed(kind.__module__)
        for name, value in vars(kind).items():
            if name not in _NOT_STATE_OF_CLASS and (not is_installed or name == "forward" or _holds_values(value)):
                yield from (name, value)
        yield from kind.__bases__


def _parts_of_function(function: types.FunctionType) -> Iterator[object]:
    """Yields what a function closes over, its defaults and attributes, and the global variables that it names."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the variable has no value yet
            yield cell
    yield from (function.__defaults__, function.__kwdefaults__, vars(function))
    module = function.__globals__.get("__name__", "")
    if _package(module) not in _LIBRARIES:
        named = _named(function.__globals__, _names(function.__code__), set())
        yield from filter(_holds_values, named) if _is_installed(module) else named


def _holds_values(value: object) -> bool:
    """True for numbers, text and containers."""
    return type(value) in _PLAIN or isinstance(value, _CONTAINERS)


@functools.cache
def _is_installed(module: str) -> bool:
    """True for a module of an installed package. Its forwards may count; what else it calls is not searched."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(pathlib.PurePath(file).parts)


def _names(code: types.CodeType) -> set[str]:
    """Returns the names of global variables and attributes in a code object and in those of its inner functions."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return {*code.co_names}.union(*inner)


def _named(variables: dict[str, object], names: set[str], searched: set[int]) -> Iterator[object]:
    """Yields the variables of a module that have one of the names, and those of the modules among them."""
    searched.add(id(variables))
    for name in sorted(names):
        value = variables.get(name, sys.modules.get(name))
        if isinstance(value, types.ModuleType):
            if _package(value.__name__) not in _LIBRARIES and id(vars(value)) not in searched:
                yield from _named(vars(value), names, searched)
        elif name in variables:
            yield value


def _package(module: object) -> str:
    """Returns the name of the package that a module belongs to."""
    return str(module).partition(".")[0]


def _numpy_state(value: Any) -> object:
    """Returns the state of an array, a number, or a generator of numpy."""
    numpy = sys.modules["numpy"]
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        is_known = not value.dtype.hasobject and value.nbytes <= _MOST_BYTES
        return (value.dtype.str, value.shape, value.tobytes()) if is_known else _Unknown()
    if isinstance(value, numpy.random.Generator):
        return pickle.dumps(value.bit_generator.state)
    if isinstance(value, (numpy.random.RandomState, numpy.random.BitGenerator)):
        return pickle.dumps(value.get_state() if isinstance(value, numpy.random.RandomState) else value.state)
    return id(value)  # a dtype or a function
