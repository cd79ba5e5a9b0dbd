"""The modules whose forward a rule runs again in backward."""

from __future__ import annotations

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
