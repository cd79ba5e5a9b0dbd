"""What a rewriting must leave as it is: which objects a model is made of, what it saves, and what watches it."""

from __future__ import annotations

from collections.abc import Hashable

import torch

_HOOKS = (
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
"""Of a `torch.nn.Module`, by what they are called inside."""

Structure = dict[str, dict[str, Hashable]]
"""Aspect -> place in the model -> what is there."""


def identity_facts(model: torch.nn.Module) -> Structure:
    """What `apply` promises to keep, by name: identities, keys of the state, modes and hooks, but no values."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {
        "classes": {name: (id(module), type(module)) for name, module in modules.items()},
        "modes": {name: module.training for name, module in modules.items()},
        "parameters": {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)},
        "state_dict": {key: number for number, key in enumerate(model.state_dict())},
        "hooks": {
            f"{name}.{kind}".lstrip("."): tuple((key, id(hook)) for key, hook in getattr(module, kind).items())
            for name, module in modules.items()
            for kind in _HOOKS
        }
        | {
            f"{name}.{kind}": tuple(getattr(parameter, kind) or ())
            for name, parameter in model.named_parameters()
            for kind in ("_backward_hooks", "_post_accumulate_grad_hooks")
        },
    }


def mutable_settings(model: torch.nn.Module) -> Structure:
    """What a rule may change as long as it is applied: forwards, what is trained, and how a model is configured."""
    configured = {name: module.config for name, module in model.named_modules() if hasattr(module, "config")}
    return {
        "forwards": {name: id(vars(module).get("forward")) for name, module in model.named_modules()},
        "configurations": {name: repr(getattr(config, "__dict__", config)) for name, config in configured.items()},
        "flags": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
    }


def difference(before: Structure, after: Structure) -> dict[str, str]:
    """By aspect: a place where the two differ, first one that only one of them has; '' where there is none."""
    found = {}
    for aspect, places in before.items():
        now = after[aspect]
        others = [*sorted(places.keys() ^ now.keys()), *(name for name in places if places[name] != now.get(name))]
        found[aspect] = f"changed at '{others[0]}'" if others else ""
    return found
