"""Facts that forbid running a forward twice: state that it changes, or that `torch.compile` compiled it."""

from __future__ import annotations

import random
import sys

import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def module_state(module: torch.nn.Module) -> dict[str, object]:
    """Returns the state that a forward could change, for comparison with `changed_state`.

    It consists of plain attributes, the identities of tensors that are attributes and buffers, and the states of the
    random generators of Python and numpy. In-place writes to tensors do not show here; the recorder sees them as ops.
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
    state["Python's random state"] = random.getstate()
    if "numpy" in sys.modules:
        _, keys, *position = sys.modules["numpy"].random.get_state()
        state["numpy's random state"] = (keys.tobytes(), *position)
    return state


def changed_state(before: dict[str, object], after: dict[str, object]) -> str | None:
    """Returns the name of the first entry that has changed, or None."""
    return next((name for name, value in after.items() if name not in before or before[name] != value), None)


def is_compiled(module: torch.nn.Module) -> bool:
    """True if `torch.compile` has wrapped the module, or compiled it in place."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None
