"""The certificate: the memory and time of the rewritten step, from a rehearsal of that step on the virtual GPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch

from planner.errors import PlanFileError
from planner.estimate.footprint import measure
from planner.plan_types.plan import Footprint, Plan
from planner.plan_types.words import counted
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.rewrite.rehearse import certifying_graph, with_gradient_names
from planner.safe_process import in_safe_process
from planner.workload.call_convention import LossFn, StepFn
from planner.workload.cards import resolve_card
from planner.workload.optimizer_choice import Optimizers
from planner.workload.workload import workload as make_workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certificate:
    """Memory and time of the rewritten step, from a rehearsal."""

    footprint: Footprint
    fits: bool
    """True if the step fits in the plan's budget."""
    certified_bytes: int
    """Peak of the bytes that tensors hold at one time. Compare it with `SolverFacts.promised_bytes`."""


def certify(
    plan: Plan,
    model: torch.nn.Module | Mapping[str, torch.nn.Module],
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    step: StepFn | None = None,
    optimizer: Optimizers | None = None,
    card: DeviceProfile | None = None,
) -> Certificate:
    """Rehearse the training step that results from applying `plan` to `model`. Needs no GPU, and changes nothing.

    Args:
        plan: a plan that was made for a model with the same names, shapes and dtypes of parameters.
        model: the model. It is not changed.
        batch: a batch with the planned shapes.
        loss_fn: the loss function that the plan was made with; None if the model returns its loss.
        step: the step function that the plan was made with; None if it was made without one.
        optimizer: the optimizer that the plan was made with; None for the optimizer that the plan names.
        card: the card to rehearse on; None for the plan's card.

    Returns:
        The memory and time of the step, and whether it fits in the plan's budget.

    Raises:
        PlanFileError: if the plan was made for another model or another batch size.
    """
    return in_safe_process(
        functools.partial(_certified, plan, model, batch, loss_fn, step, optimizer or plan.workload.optimizer, card),
        Watch(),
    )


def _certified(
    plan: Plan,
    model: torch.nn.Module | Mapping[str, torch.nn.Module],
    batch: Any,
    loss_fn: LossFn | None,
    step: StepFn | None,
    optimizer: Optimizers,
    card: DeviceProfile | None,
    watch: Watch,
) -> Certificate:
    workload = make_workload(
        model,
        batch,
        loss_fn=loss_fn,
        step=step,
        optimizer=optimizer,
        gradients_alive=plan.workload.gradients_alive,
    )
    if workload.model_facts().fingerprint != plan.model.fingerprint:
        raise PlanFileError(
            f"the plan was made for another model: names, shapes or dtypes of parameters differ from the planned "
            f"{plan.model.name}; make the plan again for this model"
        )
    if workload.batch_size != plan.workload.batch_size:
        raise PlanFileError(
            f"the plan is for batches of {counted(plan.workload.batch_size, 'sample')}, this one has "
            f"{workload.batch_size}: give a batch of the planned size, or make the plan again"
        )
    workload = dataclasses.replace(workload, not_by_sample=plan.workload.not_by_sample)
    card = card or resolve_card(plan.card, plan.vram_bytes)
    card = dataclasses.replace(card, alloc_conf=plan.alloc_conf, cudnn_benchmark=plan.cudnn_benchmark)
    graph = certifying_graph(with_gradient_names(workload, card, watch), plan.decisions, card, watch)
    measured = measure(graph, card, vram_bytes=plan.usable_bytes, decisions=plan.decisions)
    return Certificate(footprint=measured.footprint, fits=measured.fits, certified_bytes=measured.curve_bytes)
