"""Plans the training of one model on several cards: the search is that for one card, for each way to divide the work.

Only one rank is rehearsed, since no other rank needs more memory: the first one, or with ZeRO-1 the one with the most
optimizer state. So the time of planning does not depend on the number of cards.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Sequence

import torch

from planner import pipeline
from planner.checkpointed_ways import with_checkpointed
from planner.choose.choice import TIE
from planner.errors import BudgetError, StepError, TimeLimitError, WorkloadError
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import Decision, communicators_of, micro_batches_of
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import format_size
from planner.plan_types.words import counted
from planner.profiles.device import DeviceProfile
from planner.profiles.links import known, with_links
from planner.progress import Watch
from planner.questions.known_plans import plan_that_fits
from planner.space.sharding import Cards, shardings
from planner.workload.budget import Budget
from planner.workload.model_loss import balances_experts
from planner.workload.optimizer_choice import by_name
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
    divided in the same way, without further techniques. If no plan fits, the smallest plan is returned of the way that
    divides the most among the cards.

    Args:
        workload: the step with the batch of all cards.
        vram_bytes: budget of each card. If None, only the baseline is rehearsed.

    Raises:
        WorkloadError: the batch cannot be divided evenly, or the user gave a training step of their own.
        BudgetError: parameters and gradients alone exceed the budget.
    """
    began = time.perf_counter()
    if vram_bytes is None:
        return smallest_sharded_plan(workload, card, cards, vram_bytes=None, constraints=constraints, watch=watch)
    fitting, nearest = _search_ways(workload, card, cards, vram_bytes, constraints, watch, or_smallest=True)
    plan = fitting or nearest
    assert plan is not None
    return dataclasses.replace(plan, seconds=time.perf_counter() - began)


def smallest_sharded_plan(
    workload: Workload,
    card: DeviceProfile,
    cards: Cards,
    *,
    vram_bytes: int | None,
    constraints: Constraints,
    watch: Watch | None = None,
) -> Plan:
    """Return the plan of `plan_sharded` for a budget in which no plan fits, without looking for one that does."""
    *others, last = _divided(workload, card, cards, watch=watch, is_budgeted=vram_bytes is not None)
    linked = _with_links(card, cards, last)
    if vram_bytes is None:
        return pipeline.plan_workload(last, linked, vram_bytes=None, constraints=constraints, watch=watch)
    plan = _smallest_if_none_fits(last, linked, vram_bytes, constraints, watch)
    return _with_notes(plan, [(other, None) for other in others], [])


def _smallest_if_none_fits(
    work: Workload, linked: DeviceProfile, vram_bytes: int, constraints: Constraints, watch: Watch | None
) -> Plan:
    """Return the plan that fits, or else the smallest one. Raises `BudgetError` if the budget is hopeless."""
    budget = Budget.on(linked, vram_bytes, margin=constraints.margin)
    budget.refuse_if_hopeless(work.model, linked, sharding=work.sharding)
    return pipeline.plan_workload(work, linked, vram_bytes=vram_bytes, constraints=constraints, watch=watch)


def sharded_plan_that_fits(
    workload: Workload,
    card: DeviceProfile,
    cards: Cards,
    *,
    vram_bytes: int,
    constraints: Constraints,
    watch: Watch | None = None,
) -> Plan | None:
    """Return the plan of `plan_sharded` if it fits, else None, without a search for the smallest plan.

    Raises:
        PlannerError: the step cannot be planned in any of the ways to divide it.
    """
    return _search_ways(workload, card, cards, vram_bytes, constraints, watch, or_smallest=False)[0]


def _search_ways(
    workload: Workload,
    card: DeviceProfile,
    cards: Cards,
    vram_bytes: int,
    constraints: Constraints,
    watch: Watch | None,
    *,
    or_smallest: bool,
) -> tuple[Plan | None, Plan | None]:
    """Return the fastest plan of all ways to divide the model, and the smallest plan of the way that divides the most.

    The first is None if no plan fits. The second is None if a plan fits, or if `or_smallest` is False.

    Raises:
        BudgetError: as for `plan_sharded`, with `or_smallest`.
        PlannerError: the step cannot be planned in any of the ways to divide it.
    """
    found: list[tuple[Workload, Plan | None]] = []
    failed: list[tuple[Workload, StepError | TimeLimitError]] = []
    ways, once, nearest = collections.deque(_divided(workload, card, cards, watch=watch)), None, None
    while ways:
        work = ways.popleft()
        if any(_takes_all_without_more(plan, other, work) for other, plan in found):
            continue
        try:
            linked = _with_links(card, cards, work)
            if or_smallest and not ways and not any(plan for _, plan in found):
                nearest = _smallest_if_none_fits(work, linked, vram_bytes, constraints, watch)
                plan = nearest if nearest.shortfall is None else None
            else:
                plan = plan_that_fits(work, linked, vram_bytes=vram_bytes, constraints=constraints, watch=watch)
        except (StepError, TimeLimitError) as error:
            failed.append((work, error))
            continue
        # The first of the plans that are about equally fast is chosen: put the one that sends less before the other.
        is_better = work is once and _is_as_fast(plan, found[-1][1])
        found.insert(len(found) - is_better, (work, plan))
        once = _reducing_once(work, plan)
        if once is not None:
            ways.appendleft(once)
    is_last_missing = or_smallest and nearest is None and not any(plan for _, plan in found)
    if not found or (is_last_missing and isinstance(failed[-1][1], (BudgetError, TimeLimitError))):
        raise _error_of(failed)  # the last way divides the most: if it is hopeless, so are the others
    if is_last_missing:  # it cannot be planned: report the smallest plan of the way before it
        work, _ = found.pop()
        nearest = _smallest_if_none_fits(work, _with_links(card, cards, work), vram_bytes, constraints, watch)
        found.append((work, None))
    chosen = _fastest([plan for _, plan in found if plan is not None])
    if chosen is not None:
        return _with_notes(chosen, [(work, plan) for work, plan in found if plan is not chosen], failed), None
    return None, nearest and _with_notes(nearest, found[:-1], failed)


def _with_notes(
    chosen: Plan,
    others: Sequence[tuple[Workload, Plan | None]],
    failed: Sequence[tuple[Workload, StepError | TimeLimitError]],
) -> Plan:
    """Return the plan with a note on each other way to divide the model."""
    notes = [f"not chosen: {describe_sharding(work.sharding)}; {comparison(plan, chosen)}" for work, plan in others]
    notes += [f"left out: {describe_sharding(work.sharding)}: {error}" for work, error in failed]
    return dataclasses.replace(chosen, notes=(*chosen.notes, *notes))


def smallest_way(
    workload: Workload, card: DeviceProfile, cards: Cards, *, watch: Watch | None = None
) -> tuple[Workload, DeviceProfile]:
    """Return the workload of one card in the way that divides most, and the card with the links to the others.

    Raises:
        WorkloadError: as for `plan_sharded`.
    """
    *_, work = _divided(workload, card, cards, watch=watch)
    return work, _with_links(card, cards, work)


def _error_of(failed: Sequence[tuple[Workload, StepError | TimeLimitError]]) -> StepError | TimeLimitError:
    """Return the error to raise if no way to divide the model can be planned: it has the reason of each way."""
    last = failed[-1][1]
    if isinstance(last, TimeLimitError) or len({str(error) for _, error in failed}) == 1:
        return last
    reasons = "; ".join(f"{describe_sharding(work.sharding)}: {error}" for work, error in failed)
    return WorkloadError(f"no way to divide the model can be planned. {reasons}")


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
    """True if `work` is `other` with further decisions, and could only be slower: the plan needs no micro-batches."""
    is_more = len(work.sharding) > len(other.sharding) and work.sharding[: len(other.sharding)] == other.sharding
    return plan is not None and is_more and micro_batches_of(plan.decisions) == 1


def _is_as_fast(plan: Plan | None, other: Plan | None) -> bool:
    """True if both plans fit, and the first one is at least as fast."""
    return plan is not None and other is not None and plan.peak.step_ns <= other.peak.step_ns


def _reducing_once(work: Workload, plan: Plan | None) -> Workload | None:
    """Return the workload with gradients reduced once in a step; None if its plan reduces them once already.

    It takes more memory than `work`, so that it is worth a plan only where that of `work` fits, and has micro-batches.
    """
    sharding = tuple(way.reducing_once() for way in work.sharding)
    if plan is None or sharding == work.sharding or micro_batches_of(plan.decisions) == 1:
        return None
    return dataclasses.replace(work, sharding=sharding)


def _divided(
    workload: Workload, card: DeviceProfile, cards: Cards, *, watch: Watch | None, is_budgeted: bool = True
) -> tuple[Workload, ...]:
    """Return the workload of one card for each way to divide the work, starting with the way that divides the least.

    Args:
        is_budgeted: False if only the baseline is rehearsed, which checkpoints nothing.
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
            f"a batch of {counted(workload.batch_size, 'sample')} cannot be divided evenly among {cards.parts} cards: "
            f"give a batch size that is a multiple of {cards.parts}, such as "
            f"{-(-workload.batch_size // cards.parts) * cards.parts}"
        )
    samples = workload.batch_size // cards.parts
    batch = resized(
        workload.batch, samples, device=None, present=workload.batch_size, not_by_sample=workload.not_by_sample
    )
    notes = (
        *workload.notes,
        *_batch_norm_notes(workload.model),
        *_experts_notes(workload.model, cards),
        *_loss_notes(workload),
        *_stated_values_notes(workload),
    )
    divided = tuple(
        dataclasses.replace(
            workload,
            batch=batch,
            batch_size=samples,
            notes=(*notes, *_muon_notes(workload, is_divided=way.divides_parameters_by > 1)),
            sharding=(way,),
        )
        for way in shardings(workload.model, cards)
    )
    if not cards.prepared_by or cards.checkpoints is False or not (is_budgeted or cards.checkpoints):
        return divided
    return with_checkpointed(divided, card, watch, is_forced=bool(cards.checkpoints))


def _batch_norm_notes(model: torch.nn.Module) -> tuple[str, ...]:
    """Return a note if the model has layers whose statistics are those of the samples of one card."""
    norms = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and not isinstance(module, torch.nn.SyncBatchNorm)
    ]
    if not norms:
        return ()
    return (
        f"'{norms[0]}' and other BatchNorm layers compute their statistics from the samples of one card, so that "
        "training differs from that on one card, and the running statistics differ from card to card: "
        "torch.nn.SyncBatchNorm would use the samples of all cards, but cannot be planned",
    )


def _experts_notes(model: torch.nn.Module, cards: Cards) -> tuple[str, ...]:
    """Return a note if the model's loss balances its experts over the tokens of one card.

    transformers' `Trainer` multiplies the loss by the number of cards, because the model has divided the loss of the
    labels by the number of labels of all cards. The model does not divide the other term.
    """
    if not balances_experts(model):
        return ()
    note = (
        "each card balances the experts over its own tokens (output_router_logits), so that training differs from that "
        "on one card: the loss of the labels is the same, the term that balances the experts is not"
    )
    if cards.prepared_by:
        note += (
            f". transformers' Trainer counts this term {cards.parts} times, once for each card: divide "
            "router_aux_loss_coef by that number to train with the same weight"
        )
    return (note,)


def _loss_notes(workload: Workload) -> tuple[str, ...]:
    """Return a note on what is assumed of a loss function."""
    if workload.loss_fn is None:
        return ()
    return (
        "the loss function is assumed to be a mean over samples: if it is a mean over something else, or a sum, the "
        "losses of the cards need other weights: pass loss_weight to rewrite.apply, or your own function as loss_terms "
        "to training_step of an emitted file",
    )


def _stated_values_notes(workload: Workload) -> tuple[str, ...]:
    """Return a note if the user stated values that may differ from card to card."""
    if not workload.answers.values:
        return ()
    lines = ", ".join(workload.answers.values)
    return (
        f"each card reads its own values at {lines}. If such a value decides which modules run, use the same value on "
        "all cards (torch.distributed.all_reduce): cards that run different modules wait for each other until NCCL "
        "ends them",
    )


def _muon_notes(workload: Workload, *, is_divided: bool) -> tuple[str, ...]:
    """Return a note if Muon updates parameters that are divided among cards."""
    optimizers = by_name(workload.optimizer).values()
    if not is_divided or not any(type(optimizer).__name__ == "Muon" for optimizer in optimizers):
        return ()
    return (
        "Muon computes its update in bf16, and amplifies rounding errors, by a factor of up to several hundred if a "
        "gradient has a low rank. FSDP2 rounds in another order, so trained weights differ from those of one card",
    )


def _fastest(plans: list[Plan]) -> Plan | None:
    """Return the fastest of plans that fit, and among equally fast ones the first; None if there is no plan."""
    fastest_ns = min((plan.peak.step_ns for plan in plans), default=0)
    return next((plan for plan in plans if plan.peak.step_ns <= TIE * fastest_ns), None)


def comparison(plan: Plan | None, chosen: Plan) -> str:
    """Return a text that compares a plan with the chosen one. `plan` is None if no plan fits."""
    if plan is None:
        return "no plan fits"
    needs = format_size(plan.peak.total_bytes)
    times = plan.peak.step_ns / max(chosen.peak.step_ns, 1)
    return (
        f"the plan needs {needs} on each card, and its step takes {times:.2f} times as long as that of the chosen plan"
    )
