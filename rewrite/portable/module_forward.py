"""What rules that run a forward again share: which forward it is, and what its ops write to."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable

import torch

from planner.errors import DecisionError
from planner.rewrite.rewriting import Rewriting


def modules_to_run_again(
    rewriting: Rewriting, names: Iterable[str], kind: str, *, nested: bool
) -> dict[str, torch.nn.Module]:
    """Module by name; one that is shared under several names once.

    Args:
        nested: whether they may be nested in each other.

    Raises:
        DecisionError: for a module that does not exist or is never called, and for nested ones that may not be.
    """
    chosen: dict[str, torch.nn.Module] = {}
    known: dict[int, str] = {}
    for name in names:
        module = rewriting.module(name, kind)
        if getattr(type(module).forward, "__name__", "") == "_forward_unimplemented":
            raise DecisionError(
                f"{kind} names '{name}', a {type(module).__name__} without a forward of its own: name its children"
            )
        if id(module) not in known:
            known[id(module)] = name
            chosen[name] = module
    for name, module in () if nested else chosen.items():
        for part in module.modules():
            if part is not module and id(part) in known:
                raise DecisionError(
                    f"{kind} names '{name}' and '{known[id(part)]}' inside it, which would be recomputed twice: "
                    "keep one of them"
                )
    return chosen


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
