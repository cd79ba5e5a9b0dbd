"""What speaks against running a forward twice: state that it changes, and that `torch.compile` took it over."""

from __future__ import annotations

import random
import sys

import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def module_state(module: torch.nn.Module) -> dict[str, object]:
    """What the module itself holds: plain values, which tensors are its attributes and buffers, random states.

    Values written into tensors in place are not seen here; the recorder sees them as ops.
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
    """The first thing that is not as it was; None if everything is."""
    return next((name for name, value in after.items() if name not in before or before[name] != value), None)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `torch.compile` took the module over, wrapped or in place: what runs inside is traced, not called."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None
