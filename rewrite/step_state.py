"""What a training step needs to go on where it stopped, besides weights and random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from planner.errors import DecisionError, PlanFileError
from planner.plan_types.decisions import Decision, decision_from_json
from planner.plan_types.fingerprint import plan_fingerprint

_KEYS = {"plan", "decisions", "optimizer_class", "optimizer", "scaler"}


def saved(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    scheduler: LRScheduler | None,
    decisions: Sequence[Decision],
) -> dict[str, Any]:
    """Plain values and the live tensors of the optimizer's state."""
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
    """Take over what `saved` gave. Raises `PlanFileError` for anything else, and nothing is changed then."""
    if not isinstance(state, Mapping) or not state.keys() >= _KEYS:
        raise PlanFileError("this is not the state of a training step: give what its state_dict() returned")
    if state["plan"] != plan_fingerprint(decisions, module):
        raise PlanFileError(
            f"the state was saved under another plan ({_difference(state['decisions'], decisions)}): apply that plan, "
            "or begin with new optimizer state"
        )
    kind, given = _class_of(optimizer), state["optimizer"]
    if state["optimizer_class"] != kind:
        raise PlanFileError(
            f"the state is of {state['optimizer_class']}, this step's optimizer is {kind}: give that one"
        )
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    found = [len(group["params"]) for group in given["param_groups"]]
    if sizes != found:
        raise PlanFileError(
            f"the state is of an optimizer over groups of {found} parameters, this one has {sizes}: give the same"
        )
    schedule = state.get("scheduler")
    if (schedule is None) is not (scheduler is None):
        has, wants = ("no", "one") if schedule is None else ("a", "none")
        raise PlanFileError(f"the state is of a step with {has} scheduler, this one has {wants}: give apply the same")
    optimizer.state.clear()  # or the old state would be there beside the new one
    optimizer.load_state_dict(given)
    _apart_from(given, optimizer)
    if scaler is not None:
        scaler.load_state_dict(state["scaler"])
    if scheduler is not None:
        scheduler.load_state_dict(schedule)


def _apart_from(given: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Tensors that torch took as they are, since they lay in host memory as they should, are copied one by one."""
    known = {id(value) for each in given["state"].values() for value in each.values()}
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and id(value) in known and value.device.type == "cpu":
                state[name] = value.clone()


def _difference(saved_decisions: Sequence[dict], decisions: Sequence[Decision]) -> str:
    try:
        before = [decision_from_json(each).describe() for each in saved_decisions]
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
