"""Plans the training of one model on several cards: the same search as for one card, for each way to divide it.

A rehearsal of one rank shows the memory of all of them. The one that holds the most is rehearsed: the first one, or
with ZeRO-1 the one with the most optimizer state. So the number of cards does not change the time that planning takes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import torch

from planner import pipeline
from planner.checkpointed_ways import with_checkpointed
from planner.choose.chooser import TIE
from planner.errors import PlannerError, WorkloadError
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import Decision, communicators_of, micro_batches_of
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import format_size
from planner.profiles.device import DeviceProfile
from planner.profiles.links import known, with_links
from planner.progress import Watch
from planner.questions import plan_that_fits
from planner.space.sharding import Cards, shardings
from planner.workload.budget import Budget
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
    divided in the same way, without further techniques. If no plan fits, the smallest plan of the way that divides most
    is returned.

    Args:
        workload: the step with the batch of all cards.
        vram_bytes: budget of each card. If None, only the baseline is rehearsed.

    Raises:
        WorkloadError: the batch cannot be divided evenly, or the step is the user's own.
        BudgetError: parameters and gradients alone exceed the budget.
    """
    began = time.perf_counter()
    plan = None
    if vram_bytes is not None:
        plan = sharded_plan_that_fits(
            workload, card, cards, vram_bytes=vram_bytes, constraints=constraints, watch=watch
        )
    if plan is None:
        *others, last = _divided(workload, card, cards, watch=watch, is_budgeted=vram_bytes is not None)
        linked = _with_links(card, cards, last)
        if vram_bytes is not None:
            budget = Budget.on(linked, vram_bytes, margin=constraints.margin)
            budget.refuse_if_hopeless(last.model, linked, sharding=last.sharding)
        plan = pipeline.plan_workload(last, linked, vram_bytes=vram_bytes, constraints=constraints, watch=watch)
        if vram_bytes is not None:
            notes = [f"not chosen: {describe_sharding(other.sharding)}: does not fit" for other in others]
            plan = dataclasses.replace(plan, notes=(*plan.notes, *notes))
    return dataclasses.replace(plan, seconds=time.perf_counter() - began)


def sharded_plan_that_fits(
    workload: Workload,
    card: DeviceProfile,
    cards: Cards,
    *,
    vram_bytes: int,
    constraints: Constraints,
    watch: Watch | None = None,
) -> Plan | None:
    """Return the plan of `plan_sharded` if it fits, else None. This saves the search for the smallest plan.

    Raises:
        PlannerError: the step cannot be rehearsed in any way to divide it.
    """
    found: list[tuple[Workload, Plan | None]] = []
    failed: list[tuple[Workload, PlannerError]] = []
    for work in _divided(workload, card, cards, watch=watch):
        if any(_takes_all_without_more(plan, other, work) for other, plan in found):
            continue
        try:
            linked = _with_links(card, cards, work)
            plan = plan_that_fits(work, linked, vram_bytes=vram_bytes, constraints=constraints, watch=watch)
        except PlannerError as error:
            failed.append((work, error))
            continue
        found.append((work, plan))
    if not found:
        raise failed[-1][1]
    chosen = _fastest([plan for _, plan in found if plan is not None])
    if chosen is None:
        return None
    notes = [
        f"not chosen: {describe_sharding(work.sharding)}: {comparison(plan, chosen)}"
        for work, plan in found
        if plan is not chosen
    ] + [f"left out: {describe_sharding(work.sharding)}: {error}" for work, error in failed]
    return dataclasses.replace(chosen, notes=(*chosen.notes, *notes))


def describe_sharding(sharding: Sequence[Decision]) -> str:
    """Return a description of how several cards train together."""
    return "; ".join(decision.describe() for decision in sharding)


def _with_links(card: DeviceProfile, cards: Cards, divided: Workload) -> DeviceProfile:
    """Return the card with the links between the cards, over which `divided` is trained."""
    try:
        return with_links(
            card,
            cards=cards.count,
            communicators=communicators_of(divided.sharding),
            within=cards.link,
            cards_per_node=cards.per_node,
        )
    except KeyError:
        raise WorkloadError(f"link '{cards.link}' is unknown: choose from {', '.join(known())}") from None


def _takes_all_without_more(plan: Plan | None, other: Workload, work: Workload) -> bool:
    """True if a plan takes the whole batch at once, and `work` has more decisions, which could only be slower."""
    is_more = len(work.sharding) > len(other.sharding) and work.sharding[: len(other.sharding)] == other.sharding
    return plan is not None and is_more and micro_batches_of(plan.decisions) == 1


def _divided(
    workload: Workload, card: DeviceProfile, cards: Cards, *, watch: Watch | None, is_budgeted: bool = True
) -> tuple[Workload, ...]:
    """Return the workload of one card for each way to divide it, from that which divides least.

    Args:
        is_budgeted: False if only the baseline is asked for, which checkpoints nothing.
    """
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
    if workload.batch_size % cards.parts:
        raise WorkloadError(
            f"a batch of {workload.batch_size} samples cannot be divided evenly among {cards.parts} cards: give a "
            f"batch size that is a multiple of {cards.parts}, such as "
            f"{-(-workload.batch_size // cards.parts) * cards.parts}"
        )
    samples = workload.batch_size // cards.parts
    batch = resized(
        workload.batch, samples, device=None, present=workload.batch_size, not_by_sample=workload.not_by_sample
    )
    notes = (*workload.notes, *_batch_norm_notes(workload.model), *_loss_notes(workload))
    divided = tuple(
        dataclasses.replace(workload, batch=batch, batch_size=samples, notes=notes, sharding=(way,))
        for way in shardings(workload.model, cards)
    )
    if not cards.prepared_by or cards.checkpoints is False or not (is_budgeted or cards.checkpoints):
        return divided
    return with_checkpointed(divided, card, watch, is_forced=bool(cards.checkpoints))


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


def _fastest(plans: list[Plan]) -> Plan | None:
    """Return the fastest of the plans, which fit; among equally fast ones, that which divides least. None if empty."""
    fastest_ns = min((plan.peak.step_ns for plan in plans), default=0)
    return next((plan for plan in plans if plan.peak.step_ns <= TIE * fastest_ns), None)


def comparison(plan: Plan | None, chosen: Plan) -> str:
    """Return a text that compares a plan, None if it does not fit, with the chosen one."""
    if plan is None:
        return "does not fit"
    needs = format_size(plan.peak.total_bytes)
    return f"{needs} on each card, {plan.peak.step_ns / max(chosen.peak.step_ns, 1):.2f} x the step time"
