"""Finds reasons why a forward must not be run twice: it or its caller changes state, or `torch.compile` compiled it."""

from __future__ import annotations

import functools
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, deque, set, frozenset, dict)
_OF_TORCH = frozenset(vars(torch.nn.Module())) - {"training"}
"""Attributes that every module has: parameters, hooks and so on."""
_OF_OPTIMIZERS = ("state", "param_groups", "defaults", "_step_count", "_opt_called")
"""Attributes that torch's optimizers have, also with a learning-rate scheduler."""
_LIBRARIES = ("torch.", "transformers.")
"""Beginnings of the names of modules whose forwards and objects are known to keep no such state."""
_MOST_LEVELS, _MOST_ENTRIES, _MOST_BYTES = 3, 1000, 1 << 20
"""Limits for the search of an attribute: nested containers, entries of a container, bytes of an array."""


Identity = Callable[[object], int | None]
"""A function that returns the identity of an object: `id`, or `_no_identity` where identities do not matter."""


def module_state(module: torch.nn.Module) -> dict[str, object]:
    """Returns the state that a forward could change; `changed_state` compares it before and after the forward.

    These are the attributes of the module (`attributes_of`), and the states of Python's and numpy's random generators.
    In-place writes to tensors are not included: the recorder sees them as ops.
    """
    state = attributes_of(module)
    state["Python's random state"] = random.getstate()
    if "numpy" in sys.modules:
        _, keys, *position = sys.modules["numpy"].random.get_state()
        state["numpy's random state"] = (keys.tobytes(), *position)
    return state


def attributes_of(module: torch.nn.Module) -> dict[str, object]:
    """Returns a mapping from a description of each attribute and buffer of a module to a value that can be compared.

    Containers and objects are described by what they hold (`_content`). Variables that the forward or a hook closes
    over or reads from its file count as attributes.
    """
    return _attributes_of(module, id)


def plain_state(model: torch.nn.Module, function: object = None, name: str = "loss function") -> dict[str, object]:
    """Returns the numbers and text that modules and a function hold in attributes, by a description of each.

    Tensors and the identities of objects are left out, because a forward may make new ones without any consequence.
    """
    state = {
        f"{name.replace('its', 'the', 1)} of '{path or type(model).__name__}'": value
        for path, module in model.named_modules()
        for name, value in _attributes_of(module, _no_identity).items()
    }
    return state | ({} if function is None else {f"the state of the {name}": _plain_content_of(function)})


def optimizer_state(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, object]:
    """Returns the numbers and text in attributes of optimizers that are not from torch, transformers or bitsandbytes.

    They are returned by a description of each attribute. Parameter groups and the state of parameters are left out,
    because many optimizers count their steps there.
    """
    return {
        f"the attribute '{name}' of {type(optimizer).__name__}" + f" (optimizer {number})" * (number > 1): _content(
            value, _MOST_LEVELS, _no_identity
        )
        for number, optimizer in enumerate(optimizers, start=1)
        if not type(optimizer).__module__.startswith((*_LIBRARIES, "bitsandbytes."))
        for name, value in vars(optimizer).items()
        if name not in _OF_OPTIMIZERS
    }


def host_random_state() -> tuple[object, object]:
    """Returns the states of Python's and numpy's global random generators."""
    state = module_state(torch.nn.Identity())
    return state["Python's random state"], state.get("numpy's random state")


def _plain_content_of(function: object) -> object:
    """Returns the numbers and text that a function or callable object holds."""
    if isinstance(function, torch.nn.Module):
        return tuple(plain_state(function).items())
    functions = _functions_of(getattr(function, "__func__", function))
    variables = tuple(tuple(_variables_of(each, _no_identity).items()) for each in functions)
    defaults = tuple(_content(each.__defaults__ or (), _MOST_LEVELS, _no_identity) for each in functions)
    return variables, defaults, _content_of_hook(function, _no_identity)


def _functions_of(function: object) -> list[types.FunctionType]:
    """Returns a function and the functions of the user's that it calls by name, and those that these call."""
    found: dict[types.FunctionType, None] = {}
    waiting = [function]
    while waiting and len(found) < _MOST_ENTRIES:
        each = waiting.pop()
        if isinstance(each, types.FunctionType) and each not in found and not _is_of_library(each):
            found[each] = None
            waiting += _outer_variables(each).values()
    return list(found)


def _no_identity(value: object) -> None:
    """Returns None for every object, so that two objects with equal content compare as equal."""


def _attributes_of(module: torch.nn.Module, identity: Identity) -> dict[str, object]:
    state: dict[str, object] = {}
    kind = type(module)
    is_known = kind.__module__.startswith(_LIBRARIES)
    for name, value in vars(module).items():
        if name not in _OF_TORCH:
            state[f"its attribute '{name}'"] = _content(value, 0 if is_known else _MOST_LEVELS, identity)
    if not is_known:
        own = {name: value for name, value in vars(kind).items() if isinstance(value, (*_PLAIN, *_CONTAINERS))}
        state |= {f"the attribute '{name}' of its class": _content(own[name], _MOST_LEVELS, identity) for name in own}
    state |= _variables_of(kind.forward, identity)
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if not getattr(hook, "__module__", "").startswith("planner."):  # not the recorder's own
            state |= _variables_of(getattr(hook, "__func__", hook), identity)
            state[f"what its hook {id(hook)} holds"] = _content_of_hook(hook, identity)
    for name, value in module._buffers.items():
        state[f"its buffer '{name}'"] = identity(value)
    return state


def memory_of_own(module: torch.nn.Module, path: str) -> list[tuple[str, int | None]]:
    """Returns the memory of the module's own parameters and buffers, which is replaced when `.data` is set."""
    prefix = f"{path}." if path else ""
    parameters, buffers = module._parameters.items(), module._buffers.items()
    named: list[tuple[str, torch.Tensor | None]] = [
        (f"parameter '{prefix}{name}'", tensor) for name, tensor in parameters
    ]
    named += [(f"buffer '{prefix}{name}'", tensor) for name, tensor in buffers]
    return [(name, memory_of(tensor)) for name, tensor in named if tensor is not None]


def memory_of(tensor: torch.Tensor) -> int | None:
    """Returns a number that identifies the memory of a tensor; None for a tensor without memory of its own.

    The wrappers that a transform of torch.func makes have the memory of the tensor that they wrap.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    is_wrapper = is_traceable_wrapper_subclass(tensor) or torch.nn.parameter.is_lazy(tensor)
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided and not is_wrapper else None


def _content_of_hook(hook: object, identity: Identity) -> object:
    """Returns the state that a hook can change: attributes of its object, or arguments of a `functools.partial`.

    The object may be another module, whose attributes are not compared when the hook's module is called.
    """
    if isinstance(hook, functools.partial):
        held = (*hook.args, *hook.keywords.values())
        return _content_of_hook(hook.func, identity), tuple(_content_of_owner(value, identity) for value in held)
    if isinstance(hook, types.FunctionType):  # `_variables_of` returns what it reads
        return None
    return _content_of_owner(getattr(hook, "__self__", hook), identity)


def _content_of_owner(value: object, identity: Identity) -> object:
    if isinstance(value, torch.nn.Module) and not type(value).__module__.startswith(_LIBRARIES):
        own = ((name, held) for name, held in vars(value).items() if name not in _OF_TORCH)
        return tuple((name, _content(held, _MOST_LEVELS - 1, identity)) for name, held in own)
    return _content(value, _MOST_LEVELS, identity)


def _variables_of(forward: object, identity: Identity) -> dict[str, object]:
    """Returns the contents of the variables outside of a function that it reads, by a description of each."""
    if not isinstance(forward, types.FunctionType) or _is_of_library(forward):
        return {}
    outer = _outer_variables(forward).items()
    return {f"the variable '{name}'": _content(value, _MOST_LEVELS, identity) for name, value in outer}


def _is_of_library(function: types.FunctionType) -> bool:
    return (function.__module__ or "").startswith(_LIBRARIES)


def _outer_variables(function: types.FunctionType) -> dict[str, object]:
    """Returns the variables outside of a function that it reads, by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    outer = {name: cell.cell_contents for name, cell in cells if not _is_empty(cell)}
    return outer | {
        name: function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__
    }


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises if the variable has no value yet
    except ValueError:
        return True
    return False


def _content(value: object, levels: int, identity: Identity) -> object:
    """Returns a value that differs if a forward has changed `value`: its content, or an identity.

    Args:
        levels: number of nested containers and objects to look into.
        identity: `id`, or `_no_identity` to leave out tensors and the identities of objects.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return identity(value) and (id(value), None if value.is_inference() else value._version)
    if isinstance(value, (itertools.count, itertools.repeat)):
        return repr(value)
    if "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray):
        return value.tobytes() if value.dtype.hasobject is False and value.nbytes <= _MOST_BYTES else identity(value)
    if isinstance(value, _CONTAINERS):
        if not levels or len(value) > _MOST_ENTRIES:
            return len(value)
        if isinstance(value, dict):
            pairs = value.items()
            return tuple((_content(key, 0, identity), _content(entry, levels - 1, identity)) for key, entry in pairs)
        entries = tuple(_content(entry, levels - 1, identity) for entry in value)
        return frozenset(entries) if isinstance(value, (set, frozenset)) else entries
    if levels and isinstance(value, types.FunctionType) and value.__closure__:
        held = (cell.cell_contents for cell in value.__closure__ if not _is_empty(cell))
        return identity(value), tuple(_content(item, levels - 1, identity) for item in held)
    attributes = getattr(value, "__dict__", None)
    is_state = not isinstance(value, (torch.nn.Module, type, types.ModuleType))
    if levels and is_state and isinstance(attributes, dict) and not type(value).__module__.startswith(_LIBRARIES):
        return identity(value), _content(attributes, levels - 1, identity)
    return identity(value)


def changed_state(before: dict[str, object], after: dict[str, object]) -> str | None:
    """Returns the description of the first entry that is new or has changed; None if there is none."""
    return next((name for name, value in after.items() if name not in before or before[name] != value), None)


def is_compiled(module: torch.nn.Module) -> bool:
    """True if `torch.compile` has wrapped the module, or compiled it in place."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None
