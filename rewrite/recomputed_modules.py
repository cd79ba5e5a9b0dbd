"""Look up the modules that a rule recomputes in backward, and check that they can be recomputed."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from planner.errors import DecisionError
from planner.rewrite.rewriting import Rewriting


def modules_to_run_again(
    rewriting: Rewriting, names: Iterable[str], kind: str, *, nested: bool
) -> dict[str, torch.nn.Module]:
    """Return the modules that a decision names, by name. A module with several names is returned once.

    Args:
        names: names of modules in the model.
        kind: kind of the decision, for error messages.
        nested: True if one of the modules may contain another.

    Raises:
        DecisionError: if a module does not exist or has no forward, or if modules are nested but must not be.
    """
    chosen: dict[str, torch.nn.Module] = {}
    name_of: dict[int, str] = {}
    for name in names:
        module = rewriting.module(name, kind)
        if getattr(type(module).forward, "__name__", "") == "_forward_unimplemented":
            raise DecisionError(
                f"{kind} names '{name}', a {type(module).__name__}, which has no forward: name its children instead"
            )
        if id(module) not in name_of:
            name_of[id(module)] = name
            chosen[name] = module
    for name, module in () if nested else chosen.items():
        for submodule in module.modules():
            if submodule is not module and id(submodule) in name_of:
                raise DecisionError(
                    f"{kind} names '{name}' and '{name_of[id(submodule)]}' inside it, which would be recomputed twice: "
                    "keep one of them"
                )
    return chosen
