"""Helpers of the rules that run a forward again: a module's forward, and the arguments that an op writes to."""

from __future__ import annotations

import functools
import types

import torch

# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


def forward_function(module):
    """Return the module's forward as a function that takes the module as its first argument.

    If a rule keeps this function, a deep copy of the module runs with the weights of the copy, not of the original.
    """
    own = vars(module).get("forward")
    if own is None:
        return type(module).forward
    if isinstance(own, types.MethodType) and own.__self__ is module:
        return own.__func__
    return functools.wraps(own)(lambda _module, /, *args, **kwargs: own(*args, **kwargs))


def detached(tensor):
    """Detach a tensor from the graph. The result shares the tensor's version counter.

    Inside a dispatch mode `detach()` alone returns a view with a version counter of its own, which does not count later
    in-place writes to the tensor.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def written_by(op, args, kwargs):
    """Return the arguments that an op writes to, according to its schema."""
    arguments = op._schema.arguments
    by_name = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    return [by_name.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
