"""Copy a step function of the user's own with the state that it keeps, such as schedulers, scalers and counters."""

from __future__ import annotations

import copy
import functools
import sysconfig
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

_SHARED = (types.ModuleType, type, torch.utils.data.DataLoader, torch.utils.data.Dataset)
"""Types of objects that are not copied: a training step does not change them, and they may be large."""
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
"""Folders of functions that are not copied: they belong to Python or to an installed package."""


def copy_of_function(function: Callable, memo: dict[int, Any]) -> Callable:
    """Return a copy of a function that reads and changes copies of all objects that the function closes over or names.

    Functions that it calls are copied in the same way, if they belong to the user's code. Objects that cannot be
    copied, such as open files, are shared.

    Args:
        memo: the memo of `copy.deepcopy`, with the objects that are copied already, such as the model and the
            optimizer.
    """
    if isinstance(function, types.MethodType):
        owner = _copied(function.__self__, memo)
        return types.MethodType(copy_of_function(function.__func__, memo), owner)
    if isinstance(function, functools.partial):
        given = [_copied(value, memo) for value in function.args]
        named = {name: _copied(value, memo) for name, value in function.keywords.items()}
        return functools.partial(copy_of_function(function.func, memo), *given, **named)
    if not isinstance(function, types.FunctionType):
        return _copied(function, memo)
    if id(function) in memo or function.__code__.co_filename.startswith(_LIBRARIES):
        return memo.get(id(function), function)
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    own = dict(function.__globals__)
    made = types.FunctionType(function.__code__, own, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    memo[id(function)] = made  # before its variables are copied, which may refer to the function
    for cell, given_cell in zip(cells, function.__closure__ or (), strict=True):
        cell.cell_contents = _copied(given_cell.cell_contents, memo)
    own.update((name, _copied(own[name], memo)) for name in _names(function.__code__) if name in own)
    return made


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of global variables and attributes in a function's code, and in functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        return copy_of_function(value, memo)
    if isinstance(value, _SHARED):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # the user's object has no copy
        return value
