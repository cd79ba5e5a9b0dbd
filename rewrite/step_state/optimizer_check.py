"""Check the saved state of an optimizer before it is loaded: groups, hyperparameters, and each tensor.

For an optimizer of torch, the state is compared with the one that its `step()` creates, which runs on copies of the
parameters without data (on the meta device). bitsandbytes' names and shapes are known. For other optimizers, entries
are compared with the present ones if there are any.
"""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch

from planner.rewrite.step_state.values import MOST_STEPS_OF_OPTIMIZER, is_number, refuse, refuse_bad_tensor, shown

_WITHOUT_DATA = ("ASGD", "Adafactor", "LBFGS", "SparseAdam")
"""Optimizers of torch whose step reads values or needs special gradients, so that it does not run without data."""
_KERNEL = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}
_NEVER_NEGATIVE = ("step", "exp_avg_sq", "max_exp_avg_sq", "square_avg")
"""Entries of the state of optimizers that are counts, or averages of squares."""
_NESTED = "__bnb_optimizer_quant_state__"
"""bitsandbytes puts the tensors of quantized state into one more dict of this name."""
_BLOCK = 256
"""Elements of bitsandbytes' state that share a scale."""


def refuse_optimizer_state(
    state: Any, without_state: Any, module: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Raise `PlanFileError` if `state` is not a `state_dict` that this optimizer can load and continue from.

    Args:
        without_state: indexes of parameters that had no state when `state` was saved.
    """
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        raise refuse("the optimizer's state", "is not a dict with the entries 'state' and 'param_groups'")
    indexes = _refuse_groups(state.get("param_groups"), optimizer)
    if optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks:
        return  # the user's own hooks change what is saved or loaded
    entries = state["state"]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if unknown := [index for index in entries if type(index) is not int or index not in indexes]:
        raise refuse("the optimizer's state", f"has an entry for parameter {str(unknown[0])[:40]}, which is unknown")
    if not isinstance(without_state, (list, tuple)) or not all(type(index) is int for index in without_state):
        raise refuse("'without_state'", f"is {shown(without_state)}, not a list of integers")
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    expected = _state_without_data(optimizer)
    for position, (index, parameter) in enumerate(zip(indexes, parameters, strict=True)):
        where = f"the optimizer's state of '{names.get(id(parameter), f'parameter {position}')}'"
        entry = entries.get(index, {})
        if not isinstance(entry, Mapping):
            raise refuse(where, f"is {shown(entry)}, not a dict")
        wanted = expected[position] if expected is not None else None
        if not entry:
            if index not in without_state and parameter.requires_grad and wanted != {}:
                raise refuse(where, "is missing")
            continue
        _refuse_entry(entry, parameter, wanted or dict(optimizer.state.get(parameter, {})), where)


def _refuse_groups(groups: Any, optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the indexes of all parameters in saved groups, or raise `PlanFileError` if the groups are not ours."""
    if not isinstance(groups, (list, tuple)) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups
    ):
        raise refuse("'param_groups' of the optimizer's state", "is not a list of groups with 'params'")
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in groups]
    if sizes != saved_sizes:
        raise refuse(
            "the state",
            f"is of an optimizer over groups of {saved_sizes} parameters, but this optimizer has groups of {sizes}: "
            "create it with the same groups as the saved one",
        )
    indexes = [index for group in groups for index in group["params"]]
    if not all(type(index) is int for index in indexes) or len(set(indexes)) < len(indexes):
        raise refuse("'params' of the optimizer's groups", "are not distinct integers")
    for number, (group, present) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        for name, value in present.items():
            if name != "params" and name in optimizer.defaults:
                _refuse_hyperparameter(group, name, value, f"group {number} of the optimizer's state")
        _refuse_range(group, optimizer, number)
    return indexes


def _refuse_hyperparameter(group: Mapping[str, Any], name: str, present: Any, where: str) -> None:
    """Raise `PlanFileError` if a hyperparameter of a saved group is missing or of another kind than the present one."""
    if name not in group:
        if isinstance(present, (bool, str, type(None))):
            return  # torch adds the flags that an older version did not have
        raise refuse(where, f"has no '{name}'")
    value, where = group[name], f"'{name}' of {where}"
    if isinstance(present, (bool, type(None))):
        is_number_allowed = present is None and name not in _KERNEL
        is_alike = value is None or isinstance(value, bool) or (is_number_allowed and is_number(value))
    elif isinstance(present, (int, float, torch.Tensor)):
        is_alike = (isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta) or is_number(value)
        is_alike = is_alike and math.isfinite(float(value))
    elif isinstance(present, (list, tuple)):
        is_alike = isinstance(value, (list, tuple)) and len(value) == len(present)
        is_alike = is_alike and all(
            (is_number(item) and math.isfinite(item)) or (isinstance(item, torch.Tensor) and item.numel() == 1)
            for item, other in zip(value, present, strict=True)
            if other is not None
        )
    else:
        is_alike = isinstance(value, type(present))
    if not is_alike:
        raise refuse(where, f"is {shown(value)}, where this optimizer has {present!r}")


def _refuse_range(group: Mapping[str, Any], optimizer: torch.optim.Optimizer, number: int) -> None:
    """Let the constructor of an optimizer of torch check the ranges of the hyperparameters of a saved group."""
    kind = type(optimizer)
    if not _is_torchs(optimizer):
        return
    accepted = inspect.signature(kind).parameters.keys() - {"params", *_KERNEL}
    chosen = {name: value for name, value in group.items() if name in accepted}
    shape = (1, 1) if kind.__name__ == "Muon" else (1,)
    try:
        kind([torch.nn.Parameter(torch.empty(shape))], **chosen)
    except (TypeError, ValueError, RuntimeError) as error:
        raise refuse(
            f"group {number} of the optimizer's state", f"has hyperparameters that {kind.__name__} refuses ({error})"
        ) from error


def _refuse_entry(entry: Mapping[str, Any], parameter: torch.Tensor, wanted: Mapping[str, Any], where: str) -> None:
    """Raise `PlanFileError` if the state of one parameter is not as `wanted`; {} if only NaN and the like are known."""
    nested = entry.get(_NESTED, {})
    if not isinstance(nested, Mapping):
        raise refuse(where, f"has {shown(nested)} as '{_NESTED}'")
    flat = {**{name: value for name, value in entry.items() if name != _NESTED}, **nested}
    if not all(isinstance(name, str) for name in flat):
        raise refuse(where, "has an entry whose name is not text")
    if "state1" in flat and not wanted:
        wanted = _eight_bit_state(flat, parameter)
    if wanted and flat.keys() != wanted.keys():
        raise refuse(where, f"has the entries {', '.join(sorted(flat))[:80]}, not {', '.join(sorted(wanted))}")
    for name, value in flat.items():
        is_negative_allowed = name not in _NEVER_NEGATIVE
        if isinstance(value, torch.Tensor):
            refuse_bad_tensor(value, f"'{name}' in {where}", is_negative_allowed=is_negative_allowed)
            if name == "step" and bool((value > MOST_STEPS_OF_OPTIMIZER).any()):
                raise refuse(f"'step' in {where}", "is not a number of steps")
        _refuse_value(value, wanted.get(name), parameter, f"'{name}' in {where}")


def _refuse_value(value: Any, wanted: Any, parameter: torch.Tensor, where: str) -> None:
    if not isinstance(value, (torch.Tensor, bool, str, list, tuple, Mapping, type(None))) and not is_number(value):
        raise refuse(where, f"is {shown(value)}")
    if isinstance(wanted, torch.Tensor) and wanted.dim() == 0 and is_number(value):
        if not 0 <= value <= MOST_STEPS_OF_OPTIMIZER:
            raise refuse(where, f"is {shown(value)}, not a number of steps")
        return  # torch makes a tensor of a number of steps that an older version saved
    if isinstance(wanted, torch.Tensor):
        if not isinstance(value, torch.Tensor) or value.shape != wanted.shape or value.dtype != wanted.dtype:
            raise refuse(where, f"is {shown(value)}, not {shown(wanted)}")
        is_like_parameter = bool(wanted.dim()) and wanted.shape == parameter.shape
        if is_like_parameter and hasattr(value, "device_mesh") is not hasattr(parameter, "device_mesh"):
            raise refuse(where, "must be sharded if its parameter is sharded, and whole if it is not")
    elif is_number(wanted) and not (is_number(value) and 0 <= value <= MOST_STEPS_OF_OPTIMIZER):
        raise refuse(where, f"is {shown(value)}, not a number of steps")


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return getattr(torch.optim, type(optimizer).__name__, None) is type(optimizer)


def _state_without_data(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]] | None:
    """Return the state that a step gives each parameter, as tensors on the meta device; None if it is not known."""
    kind = type(optimizer)
    if not _is_torchs(optimizer) or kind.__name__ in _WITHOUT_DATA:
        return None
    twin = object.__new__(kind)
    twin.__dict__.update(optimizer.__dict__)
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, **_KERNEL, "params": [_without_data(parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    parameters = [parameter for group in twin.param_groups for parameter in group["params"]]
    if kind is torch.optim.Adagrad:  # its constructor creates the state, and its step only reads it
        return [{"step": torch.zeros(()), "sum": parameter.detach()} for parameter in parameters]
    with torch.no_grad():
        inspect.unwrap(kind.step)(twin)  # without the decorators, which would call global hooks
    return [dict(twin.state.get(parameter, {})) for parameter in parameters]


def _without_data(parameter: torch.Tensor) -> torch.nn.Parameter:
    """Return a parameter of the same shape and dtype on the meta device, with a gradient."""
    twin = torch.nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
    twin.grad = torch.empty_like(twin)
    return twin


def _eight_bit_state(entry: Collection[str], parameter: torch.Tensor) -> dict[str, Any]:
    """Return the state that bitsandbytes' optimizers have for a parameter, as tensors on the meta device."""
    blocks = math.ceil(parameter.numel() / _BLOCK)
    has_8_bits = "qmap1" in entry
    wanted: dict[str, Any] = {"step": 0}
    for number in ("1", "2") if "state2" in entry else ("1",):
        dtype = torch.uint8 if has_8_bits else torch.float32
        wanted[f"state{number}"] = torch.empty(parameter.shape, dtype=dtype, device="meta")
        if has_8_bits:
            wanted[f"qmap{number}"] = torch.empty(_BLOCK, device="meta")
            wanted[f"absmax{number}"] = torch.empty(blocks, device="meta")
    if "unorm_vec" in entry:
        wanted["unorm_vec"] = torch.empty(1, device="meta")
    return wanted
