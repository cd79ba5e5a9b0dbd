"""Finds reasons why a forward must not be run twice: it or its caller changes state, or `torch.compile` compiled it."""

from __future__ import annotations

import random
import sys

import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


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

    This value is the attribute if it is plain, the length of a list, or the identity of a tensor.
    """
    state: dict[str, object] = {}
    for name, value in vars(module).items():
        if isinstance(value, _PLAIN):
            state[f"its attribute '{name}'"] = value
        elif isinstance(value, torch.Tensor):
            state[f"its attribute '{name}'"] = id(value)
        elif isinstance(value, list):
            state[f"its attribute '{name}'"] = len(value)
    for name, value in module._buffers.items():
        state[f"its buffer '{name}'"] = id(value)
    return state


def changed_state(before: dict[str, object], after: dict[str, object]) -> str | None:
    """Returns the description of the first entry that is new or has changed; None if there is none."""
    return next((name for name, value in after.items() if name not in before or before[name] != value), None)


def is_compiled(module: torch.nn.Module) -> bool:
    """True if `torch.compile` has wrapped the module, or compiled it in place."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None
