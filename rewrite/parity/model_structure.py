"""Properties of a model that a rewriting must not change: its objects, the keys of its `state_dict`, and its hooks."""

from __future__ import annotations

from collections.abc import Hashable

import torch

_HOOKS = (
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
"""Attributes of `torch.nn.Module` that hold hooks."""

Structure = dict[str, dict[str, Hashable]]
"""Aspect (such as 'hooks') -> name in the model -> a value that changes if the object or setting is replaced."""


def identity_facts(model: torch.nn.Module) -> Structure:
    """Return the properties that `apply` must keep: object identities, `state_dict` keys, train/eval modes and hooks.

    Values of tensors are not included.
    """
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
    """Return the settings that rules may change until `undo`: forwards, configurations and `requires_grad`."""
    configs = {name: module.config for name, module in model.named_modules() if hasattr(module, "config")}
    return {
        "forwards": {name: id(vars(module).get("forward")) for name, module in model.named_modules()},
        "configurations": {name: repr(getattr(config, "__dict__", config)) for name, config in configs.items()},
        "flags": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
    }


def difference(before: Structure, after: Structure) -> dict[str, str]:
    """Return the first difference of each aspect as text, '' if there is none.

    Names that only one of the two structures has come before names with different values.
    """
    differences = {}
    for aspect, values in before.items():
        now = after[aspect]
        changed = [*sorted(values.keys() ^ now.keys()), *(name for name in values if values[name] != now.get(name))]
        differences[aspect] = f"changed at '{changed[0]}'" if changed else ""
    return differences
