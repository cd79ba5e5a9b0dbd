"""Save and load the state of a training step: optimizer, gradient scaler and scheduler, but not the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from planner.errors import DecisionError, PlanFileError
from planner.plan_types.decisions import Decision
from planner.plan_types.fingerprint import plan_fingerprint
from planner.plan_types.techniques import decision_from_json

_KEYS = {"plan", "decisions", "optimizer_class", "optimizer", "scaler"}


def saved(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    scheduler: LRScheduler | None,
    decisions: Sequence[Decision],
) -> dict[str, Any]:
    """Return the state as plain values and tensors. The tensors of the optimizer are not copied."""
    return {
        "plan": plan_fingerprint(decisions, module),
        "decisions": [decision.to_json() for decision in decisions],
        "optimizer_class": _class_of(optimizer),
        "optimizer": optimizer.state_dict(),
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
    refuse_mismatch(state, module, optimizer, scheduler, decisions)
    optimizer_state, schedule = state["optimizer"], state.get("scheduler")
    # Free the present state first, or the card would hold the optimizer state twice.
    optimizer.state.clear()
    optimizer.load_state_dict(optimizer_state)
    _copy_shared_tensors(optimizer_state, optimizer)
    if scaler is not None:
        scaler.load_state_dict(state["scaler"])
    if scheduler is not None and schedule is not None:
        scheduler.load_state_dict(schedule)


def refuse_mismatch(
    state: Mapping[str, Any],
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None,
    decisions: Sequence[Decision],
) -> None:
    """Raise `PlanFileError` if what `saved` returned does not fit this step."""
    if not isinstance(state, Mapping) or not state.keys() >= _KEYS:
        raise PlanFileError("this is not the state of a training step: give what its state_dict() returned")
    if state["plan"] != plan_fingerprint(decisions, module):
        raise PlanFileError(
            f"the state was saved under another plan ({_difference(state['decisions'], decisions)}): apply that plan, "
            "or start with new optimizer state"
        )
    kind, optimizer_state = _class_of(optimizer), state["optimizer"]
    if state["optimizer_class"] != kind:
        raise PlanFileError(
            f"the state was saved from {state['optimizer_class']}, but this step's optimizer is {kind}: apply the plan "
            "with the optimizer of the saved state"
        )
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in optimizer_state["param_groups"]]
    if sizes != saved_sizes:
        raise PlanFileError(
            f"the state is of an optimizer over groups of {saved_sizes} parameters, "
            f"but this optimizer has groups of {sizes}: create it with the same groups as the saved one"
        )
    schedule = state.get("scheduler")
    if (schedule is None) is not (scheduler is None):
        has, wants = ("no", "one") if schedule is None else ("a", "none")
        raise PlanFileError(
            f"the state is of a step with {has} scheduler, but this step has {wants}: pass the same to apply as when "
            "the state was saved"
        )


def _copy_shared_tensors(optimizer_state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Copy the tensors in host memory that the optimizer shares with `optimizer_state`.

    `load_state_dict` does not copy them, so that training would change the saved state.
    """
    shared = {id(value) for state in optimizer_state["state"].values() for value in state.values()}
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and id(value) in shared and value.device.type == "cpu":
                state[name] = value.clone()


def _difference(saved_decisions: Sequence[dict], decisions: Sequence[Decision]) -> str:
    """Return text for an error message: how the decisions of a saved state differ from those of this step."""
    try:
        before = [decision_from_json(decision).describe() for decision in saved_decisions]
    except (DecisionError, TypeError, AttributeError) as error:
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
