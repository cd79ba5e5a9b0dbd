"""What rules that run a forward again share: which forward it is, and what its ops write to."""

from __future__ import annotations

import functools
import types

import torch


def forward_function(module: torch.nn.Module):
    """The module's forward as a function of the module, so that a deep copy of the module runs its own weights."""
    own = vars(module).get("forward")
    if own is None:
        return type(module).forward
    if isinstance(own, types.MethodType) and own.__self__ is module:
        return own.__func__
    return functools.wraps(own)(lambda _module, /, *args, **kwargs: own(*args, **kwargs))


# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


def detached(tensor):
    """Apart from the graph, but counting what is written to the tensor, as a view made below autograd does not."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def written_by(op, args, kwargs):
    """The arguments that an op writes to."""
    arguments = op._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    return [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
