"""Save and load the state of a training step: optimizer, gradient scaler and scheduler, but not the weights.

A state is data that may come from anywhere. Loading checks all of it before it changes anything, and puts the former
state back if a library raises an error later.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from planner.errors import DecisionError, PlanFileError, first_line, plain_line
from planner.plan_types.decisions import Decision
from planner.plan_types.fingerprint import plan_fingerprint
from planner.plan_types.techniques import decision_from_json
from planner.rewrite.step_state.optimizer_check import refuse_optimizer_state
from planner.rewrite.step_state.values import refuse, refuse_scaler_state, refuse_scheduler_state

_KEYS = {"plan", "decisions", "optimizer_class", "optimizer", "scaler"}


def saved(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    scheduler: LRScheduler | None,
    decisions: Sequence[Decision],
) -> dict[str, Any]:
    """Return the state as plain values and tensors. The tensors of the optimizer are not copied."""
    state = optimizer.state_dict()
    indexes = [index for group in state["param_groups"] for index in group["params"]]
    return {
        "plan": plan_fingerprint(decisions, module),
        "decisions": [decision.to_json() for decision in decisions],
        "optimizer_class": _class_of(optimizer),
        "optimizer": state,
        # Parameters that have had no gradient. Loading refuses a state that lacks entries of other parameters.
        "without_state": [index for index in indexes if not state["state"].get(index)],
        "scaler": None if scaler is None else scaler.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
    }


def load(
    state: Mapping[str, Any],
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    scheduler: LRScheduler | None,
    decisions: Sequence[Decision],
) -> None:
    """Load what `saved` returned. Raises `PlanFileError`, and changes nothing, if the state does not fit this step."""
    refuse_mismatch(state, module, optimizer, scaler, scheduler, decisions)
    with restored_on_error(optimizer, scaler, scheduler):
        load_checked(state, optimizer, scaler, scheduler)


def load_checked(
    state: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    scheduler: LRScheduler | None,
) -> None:
    """Load a state that `refuse_mismatch` has accepted."""
    optimizer_state, schedule = state["optimizer"], state.get("scheduler")
    # Free the present state first, or the card would hold the optimizer state twice.
    optimizer.state.clear()
    optimizer.load_state_dict(optimizer_state)
    _copy_shared_tensors(optimizer_state, optimizer)
    if scaler is not None:
        scaler.load_state_dict(state["scaler"])
    if scheduler is not None and schedule is not None:
        scheduler.load_state_dict(schedule)


@contextlib.contextmanager
def restored_on_error(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None, scheduler: LRScheduler | None
) -> Iterator[None]:
    """Put the state of these objects back if an error is raised inside the context. It waits in host memory.

    Raises:
        PlanFileError: a library refused the state inside the context.
    """
    groups = [dict(group) for group in optimizer.param_groups]
    state = {
        parameter: {name: _moved(value, torch.device("cpu")) for name, value in values.items()}
        for parameter, values in optimizer.state.items()
    }
    devices = {
        (parameter, name): value.device
        for parameter, values in optimizer.state.items()
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    scale = None if scaler is None else scaler.state_dict()
    schedule = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
    try:
        yield
    except BaseException as error:
        optimizer.param_groups[:] = groups
        optimizer.state.clear()
        for parameter, values in state.items():
            optimizer.state[parameter] = {
                name: _moved(value, devices.get((parameter, name))) for name, value in values.items()
            }
        if scaler is not None and scale is not None:
            scaler.load_state_dict(scale)
        if scheduler is not None and schedule is not None:
            scheduler.load_state_dict(schedule)
        if isinstance(
            error, (ArithmeticError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError)
        ):
            raise PlanFileError(
                f"the saved state cannot be loaded: {type(optimizer).__name__} or its scheduler raised "
                f"{first_line(error)}. Nothing was changed; start with new optimizer state"
            ) from error
        raise


def _moved(value: Any, device: torch.device | None) -> Any:
    """Return a tensor on another device, and other values unchanged."""
    return value.to(device) if isinstance(value, torch.Tensor) and device is not None else value


def refuse_mismatch(
    state: Mapping[str, Any],
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    scheduler: LRScheduler | None,
    decisions: Sequence[Decision],
) -> None:
    """Raise `PlanFileError` if what `saved` returned does not fit this step. Everything in it is checked."""
    try:
        _refuse_mismatch(state, module, optimizer, scaler, scheduler, decisions)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise refuse("the state", f"cannot be read ({first_line(error)})") from error


def _refuse_mismatch(
    state: Mapping[str, Any],
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    scheduler: LRScheduler | None,
    decisions: Sequence[Decision],
) -> None:
    if not isinstance(state, Mapping) or not state.keys() >= _KEYS:
        raise PlanFileError("this is not the state of a training step: give what its state_dict() returned")
    if not isinstance(state["plan"], str) or state["plan"] != plan_fingerprint(decisions, module):
        raise PlanFileError(
            f"the state was saved under another plan ({plain_line(_difference(state['decisions'], decisions))}): apply "
            "that plan, or start with new optimizer state"
        )
    kind, saved_kind = _class_of(optimizer), state["optimizer_class"]
    if not isinstance(saved_kind, str) or saved_kind != kind:
        raise PlanFileError(
            f"the state was saved from {plain_line(str(saved_kind), 200)}, but this step's optimizer is {kind}: apply "
            "the plan with the optimizer of the saved state"
        )
    refuse_optimizer_state(state["optimizer"], state.get("without_state", ()), module, optimizer)
    schedule = state.get("scheduler")
    if (schedule is None) is not (scheduler is None):
        has, wants = ("no", "one") if schedule is None else ("a", "none")
        raise PlanFileError(
            f"the state is of a step with {has} scheduler, but this step has {wants}: pass the same to apply as when "
            "the state was saved"
        )
    if scheduler is not None:
        refuse_scheduler_state(schedule, scheduler)
    if scaler is not None:
        refuse_scaler_state(state["scaler"], scaler)


def _copy_shared_tensors(optimizer_state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Copy the optimizer's tensors that share memory with `optimizer_state`, with a parameter or with one another.

    `load_state_dict` does not copy tensors in host memory, so that training would change the saved state. On any
    device, tensors that share memory would be updated together, and so would the elements of an expanded tensor.
    """
    shared = {id(value) for state in optimizer_state["state"].values() for value in state.values()}
    used = {_memory_of(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for state in optimizer.state.values():
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                continue
            memory = _memory_of(value)
            is_of_all = name.startswith("qmap")  # bitsandbytes has one such table for all parameters, and only reads it
            overlaps = memory is not None and not is_of_all and (memory in used or _has_too_little_memory(value))
            used.add(memory)
            if overlaps or (id(value) in shared and value.device.type == "cpu"):
                state[name] = value.clone(memory_format=torch.contiguous_format) if overlaps else value.clone()


def _memory_of(tensor: torch.Tensor) -> int | None:
    """Return the address of the storage of a tensor; None if it has no elements, or may hold other tensors."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.numel():
        return None
    return tensor.untyped_storage().data_ptr()


def _has_too_little_memory(tensor: torch.Tensor) -> bool:
    """True if elements of a tensor share memory, as those of an expanded tensor do."""
    return tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size()


def _difference(saved_decisions: Any, decisions: Sequence[Decision]) -> str:
    """Return text for an error message: how the decisions of a saved state differ from those of this step."""
    if not isinstance(saved_decisions, (list, tuple)) or not all(isinstance(saved, dict) for saved in saved_decisions):
        return "whose decisions cannot be read"
    try:
        before = [decision_from_json(decision).describe() for decision in saved_decisions]
    except (DecisionError, TypeError, AttributeError, ValueError, LookupError) as error:
        return f"which cannot be read: {error}"
    now = [decision.describe() for decision in decisions]
    only_before = [text for text in before if text not in now]
    only_now = [text for text in now if text not in before]
    if not only_before and not only_now:
        return "the same decisions for another model"
    return (
        f"it had '{'; '.join(only_before) or 'nothing more'}', this one has '{'; '.join(only_now) or 'nothing more'}'"
    )


def _class_of(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
