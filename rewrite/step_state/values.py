"""Checks of values in a saved state: numbers, tensors, and the states of gradient scalers and schedulers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from planner.errors import PlanFileError, plain_line

_MOST_STEPS = 2**31 - 1
"""Maximum of the numbers of steps of a gradient scaler, which are in tensors of int32."""
_NUMBERS_OF_STEPS = ("growth_interval", "_growth_tracker")
"""Entries of a gradient scaler's state that are whole numbers. A factor may be one, such as 2 instead of 2.0."""
MOST_STEPS_OF_OPTIMIZER = 2**53
"""Maximum of the numbers of steps of an optimizer or a scheduler: above it, adding 1 may change nothing."""
_AT_ONCE = 1 << 22
"""Elements of a tensor that are checked at once, so that the check of a large tensor needs little memory."""


def refuse(where: str, what: str) -> PlanFileError:
    """Return the error that says that a part of a saved state cannot be loaded."""
    return PlanFileError(
        f"the saved state cannot be loaded: {plain_line(f'{where} {what}', 500)}. Nothing was changed; load an "
        "undamaged state, or start with new optimizer state"
    )


def is_number(value: Any) -> bool:
    """Return True for an int or float that is neither a bool nor NaN, and an int that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < 2**1023 if isinstance(value, int) else not math.isnan(value)


def shown(value: Any) -> str:
    """Return a short text for a value of a saved state, which may be of any type and size."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {value.dtype}"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)[:40]
    return f"a value of type {type(value).__name__}"


def refuse_bad_tensor(tensor: torch.Tensor, where: str, *, is_negative_allowed: bool = True) -> None:
    """Raise `PlanFileError` if a tensor of a saved state has no values, is not strided, or contains NaN.

    Args:
        is_negative_allowed: False to refuse negative and infinite values, too.
    """
    if tensor.is_meta:
        raise refuse(where, "is on the meta device and has no values")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise refuse(where, f"is not a plain tensor, but has the layout {tensor.layout}")
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if not (local.is_floating_point() or local.is_complex()):
        return
    for part in local.detach().reshape(-1).split(_AT_ONCE):
        numbers = part.float() if part.element_size() == 1 else part
        if numbers.numel() and bool(numbers.isnan().any()):
            raise refuse(where, "contains NaN")
        if numbers.numel() and not is_negative_allowed and not bool(((numbers >= 0) & numbers.isfinite()).all()):
            raise refuse(where, "contains negative or infinite values, which it never has")


def refuse_scaler_state(state: Any, scaler: torch.amp.GradScaler) -> None:
    """Raise `PlanFileError` if `state` is not what `scaler.state_dict()` returns, with values that it can have."""
    present = scaler.state_dict()
    if not isinstance(state, Mapping) or state.keys() != present.keys():
        raise refuse("the gradient scaler's state", f"needs the entries {', '.join(present)}")
    for name, value in state.items():
        if not is_number(value) or not math.isfinite(value) or value < 0 or (value == 0 and name != "_growth_tracker"):
            raise refuse(f"'{name}' of the gradient scaler", f"is {shown(value)}, not a positive number")
        if name in _NUMBERS_OF_STEPS and not isinstance(value, int):
            raise refuse(f"'{name}' of the gradient scaler", f"is {shown(value)}, not an integer")
        if name in _NUMBERS_OF_STEPS and value > _MOST_STEPS:
            raise refuse(f"'{name}' of the gradient scaler", "is larger than its tensor can hold")


def refuse_scheduler_state(state: Any, scheduler: LRScheduler) -> None:
    """Raise `PlanFileError` if `state` is not like the present state of the scheduler.

    Schedulers load a state by assigning its entries to their attributes. So an entry must not replace a method.
    """
    kind = type(scheduler)
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise refuse(f"the state of {kind.__name__}", f"is {shown(state)}, not a dict")
    present, is_torchs = scheduler.state_dict(), kind.__module__.startswith("torch.")
    for name in present:
        if name not in state:
            raise refuse(f"the state of {kind.__name__}", f"has no '{name}'")
    for name, value in state.items():
        if name == "optimizer" or (name not in present and hasattr(kind, name)):
            raise refuse(f"the state of {kind.__name__}", f"would replace its attribute '{name}'")
        is_unknown = name not in present and (is_torchs or not name.isidentifier())
        if is_unknown:
            raise refuse(f"the state of {kind.__name__}", f"has the entry {name[:40]!r}, which is unknown")
        if name in present:
            _refuse_unlike(value, present[name], f"'{name}' of {kind.__name__}", same_length=is_torchs)


def _refuse_unlike(value: Any, present: Any, where: str, *, same_length: bool) -> None:
    """Raise `PlanFileError` if a value is of another kind than the present one."""
    if isinstance(present, (bool, str)):
        if type(value) is not type(present):
            raise refuse(where, f"is {shown(value)}, not a {type(present).__name__}")
    elif isinstance(present, (int, float)):
        is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.isnan().any()
        if not is_scalar and not is_number(value):
            raise refuse(where, f"is {shown(value)}, not a number")
        if isinstance(value, int) and abs(value) > MOST_STEPS_OF_OPTIMIZER:
            raise refuse(where, "has too many digits")
    elif isinstance(present, (list, tuple)):
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise refuse(where, f"is {shown(value)}, not a list")
        if same_length and len(value) != len(present):
            raise refuse(where, f"has {len(value)} values, not {len(present)}")
        for index, (item, other) in enumerate(zip(value, present, strict=False)):
            _refuse_unlike(item, other, f"{where}[{index}]", same_length=same_length)
    elif isinstance(present, Mapping):
        if not isinstance(value, Mapping):
            raise refuse(where, f"is {shown(value)}, not a dict")
        for key in present.keys() & value.keys():
            _refuse_unlike(value[key], present[key], f"{where}[{key!r}]", same_length=same_length)
    elif isinstance(present, torch.Tensor):
        if not isinstance(value, (torch.Tensor, int, float)):
            raise refuse(where, f"is {shown(value)}, not a tensor")
        if isinstance(value, torch.Tensor):
            refuse_bad_tensor(value, where)
