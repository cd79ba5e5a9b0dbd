"""Plans the training of one model on several cards: the same search as for one card, for each way to divide it.

A rehearsal of one rank shows the memory of all of them. The one that holds the most is rehearsed: the first one, or
with ZeRO-1 the one with the most optimizer state. So the number of cards does not change the time that planning takes.
"""

from __future__ import annotations

import dataclasses
import time

import torch

from planner import pipeline
from planner.choose.chooser import TIE
from planner.errors import PlannerError, WorkloadError
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import Decision
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import format_size
from planner.profiles.device import DeviceProfile
from planner.profiles.links import known, with_links
from planner.progress import Watch
from planner.space.sharding import Cards, shardings
from planner.workload.workload import Workload, resized


def plan_sharded(
    workload: Workload,
    card: DeviceProfile,
    cards: Cards,
    *,
    vram_bytes: int | None,
    constraints: Constraints,
    watch: Watch | None = None,
) -> Plan:
    """Return the fastest certified plan of one optimizer step on several cards, each within `vram_bytes`.

    The plan is for one card: `plan.workload.batch_size` is its part of the batch. Its baseline is the step that is
    divided in the same way, without further techniques. If no plan fits, the smallest one is returned.

    Args:
        workload: the step with the batch of all cards.
        vram_bytes: budget of each card. If None, only the baseline is rehearsed.

    Raises:
        WorkloadError: the batch cannot be divided evenly, or the step is the user's own.
    """
    began = time.perf_counter()
    try:
        card = with_links(card, within=cards.link, cards_per_node=cards.per_node)
    except KeyError:
        raise WorkloadError(f"link '{cards.link}' is unknown: choose from {', '.join(known())}") from None
    ways = shardings(workload.model, cards)
    divided = _divided(workload, cards.count)
    if vram_bytes is None:
        ways = ways[-1:]
    found: list[tuple[Decision, Plan]] = []
    failed: list[tuple[Decision, PlannerError]] = []
    for way in ways:
        on_way = dataclasses.replace(divided, sharding=(way,))
        try:
            plan = pipeline.plan_workload(on_way, card, vram_bytes=vram_bytes, constraints=constraints, watch=watch)
        except PlannerError as error:
            failed.append((way, error))
            continue
        found.append((way, plan))
    if not found:
        raise failed[-1][1]
    chosen = _best([plan for _, plan in found])
    notes = [
        f"not chosen: {way.describe()}: {_comparison(plan, chosen)}" for way, plan in found if plan is not chosen
    ] + [f"left out: {way.describe()}: {error}" for way, error in failed]
    seconds = time.perf_counter() - began
    return dataclasses.replace(chosen, notes=(*chosen.notes, *notes), seconds=seconds)


def _divided(workload: Workload, cards: int) -> Workload:
    """Return the workload of one card."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise WorkloadError(
            "this process belongs to a process group, and a plan for several cards is rehearsed in a group of its own: "
            "plan before torch.distributed.init_process_group(), or in another process, and load the saved plan here"
        )
    if workload.step is not None:
        raise WorkloadError(
            "a training step of your own cannot be planned for several cards, because only your code says where "
            "gradients are added up: give the model and the batch without a step"
        )
    if workload.batch_size % cards:
        raise WorkloadError(
            f"a batch of {workload.batch_size} samples cannot be divided evenly among {cards} cards: give a batch size "
            f"that is a multiple of {cards}, such as {-(-workload.batch_size // cards) * cards}"
        )
    samples = workload.batch_size // cards
    batch = resized(
        workload.batch, samples, device=None, present=workload.batch_size, not_by_sample=workload.not_by_sample
    )
    notes = (*workload.notes, *_batch_norm_notes(workload.model), *_loss_notes(workload))
    return dataclasses.replace(workload, batch=batch, batch_size=samples, notes=notes)


def _batch_norm_notes(model: torch.nn.Module) -> tuple[str, ...]:
    """Return a note if the model normalizes over the samples of one card."""
    norms = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and not isinstance(module, torch.nn.SyncBatchNorm)
    ]
    if not norms:
        return ()
    return (
        f"'{norms[0]}' and other BatchNorm layers compute their statistics from the samples of one card, so that "
        "training differs from that on one card: torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) uses all samples",
    )


def _loss_notes(workload: Workload) -> tuple[str, ...]:
    """Return a note on what the ranks assume of a loss function."""
    if workload.loss_fn is None:
        return ()
    return (
        "the loss function is taken for a mean over samples: if it is a mean over something else, or a sum, give "
        "loss_weight to rewrite.apply, so that the cards are weighed accordingly",
    )


def _best(plans: list[Plan]) -> Plan:
    """Return the fastest plan that fits; among equally fast ones, the one that divides least. Else the smallest."""
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        return min(plans, key=lambda plan: plan.peak.total_bytes)
    fastest_ns = min(plan.peak.step_ns for plan in fitting)
    return next(plan for plan in fitting if plan.peak.step_ns <= TIE * fastest_ns)


def _comparison(plan: Plan, chosen: Plan) -> str:
    needs = format_size(plan.peak.total_bytes)
    if not plan.fits:
        return f"its smallest plan needs {needs} on each card"
    return f"{needs} on each card, {plan.peak.step_ns / max(chosen.peak.step_ns, 1):.2f} x the step time"
