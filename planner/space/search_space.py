"""The outer choices: precision, optimizer, loss and the moment of the update. They are few, so they are listed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from planner.errors import DecisionError
from planner.plan_types.constraints import Constraints
from planner.plan_types.decisions import (
    Accumulation,
    Checkpoint,
    ChunkedLoss,
    Decision,
    Freeze,
    Offload,
    Optimizer,
    OptimizerKernel,
    Precision,
    Replay,
    StepInBackward,
    conflict,
)
from planner.profiles.device import DeviceProfile
from planner.space.lm_head import ChunkedLossOption
from planner.space.micro_batches import MicroBatching, offered_splits
from planner.workload.eight_bit import why_not_eight_bit
from planner.workload.torch_optimizers import (
    by_parameter,
    has_step_hooks,
    kernel_beside_foreach,
    kind_of,
    why_no_kernel,
)
from planner.workload.workload import Workload, optimizer_name, several_processes


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What can be chosen from for this workload on this card, and why some things cannot."""

    precisions: tuple[tuple[Decision, ...], ...]
    optimizers: tuple[tuple[Decision, ...], ...]
    losses: tuple[tuple[Decision, ...], ...]
    updates: tuple[tuple[Decision, ...], ...]
    """When the optimizer steps: after the backward, or inside of it."""
    splits: tuple[MicroBatching, ...]
    recompute: tuple[type[Decision], ...]
    """How what is needed in backward may be made again; the search chooses of what."""
    chunks: ChunkedLossOption | None
    """How many chunks the loss of a micro-batch has, where `losses` says how many that of the whole batch has."""
    notes: tuple[str, ...]


def offer(
    work: Workload,
    card: DeviceProfile,
    constraints: Constraints,
    *,
    batch_statistics: tuple[str, ...],
    chunks: ChunkedLossOption | None,
) -> SearchSpace:
    """List the outer choices that the user allows and the workload and card permit.

    Args:
        batch_statistics: modules that normalise over the batch, as recorded.
        chunks: how the loss can be taken in chunks, as recorded; None if it cannot.

    Raises:
        DecisionError: something is forced that this workload or card cannot do.
    """
    notes: list[str] = []
    _refuse_forced_conflict(card, constraints)
    return SearchSpace(
        precisions=_precisions(work, card, constraints, notes),
        optimizers=_optimizers(work, constraints, notes),
        losses=_choices(
            constraints,
            ChunkedLoss,
            None if chunks is None else (chunks.for_micro_batches(1),),
            "no linear layer's output of some size goes straight into a cross entropy",
        ),
        updates=_updates(work, constraints, notes),
        splits=offered_splits(work, constraints, batch_statistics, notes),
        recompute=_recompute(constraints),
        chunks=None if chunks is None else dataclasses.replace(chunks, always=constraints.force(ChunkedLoss)),
        notes=tuple(notes),
    )


def frozen_offer(offered: SearchSpace, frozen: Freeze) -> SearchSpace:
    """The same choices with a frozen prefix."""
    return dataclasses.replace(offered, precisions=tuple((frozen, *choice) for choice in offered.precisions))


def finest_offer(offered: SearchSpace) -> SearchSpace | None:
    """The same with the loss in as many chunks as it can be; None if that is nothing new.

    A budget has as many as it needs for a chunk to be a small part of it, so that a smaller budget has more: what
    fits that one must not be out of reach here.
    """
    if offered.chunks is None or not any(offered.losses) or offered.chunks == offered.chunks.most_chunks():
        return None
    most = offered.chunks.most_chunks()
    return dataclasses.replace(
        offered, chunks=most, losses=tuple((most.for_micro_batches(1),) if loss else () for loss in offered.losses)
    )


def only(offered: SearchSpace, decisions: Sequence[Decision]) -> SearchSpace:
    """The same splits and modules, with the precision, optimizer, loss and update of this outer choice alone."""

    def chosen(choices: tuple[tuple[Decision, ...], ...]) -> tuple[tuple[Decision, ...], ...]:
        return (max((choice for choice in choices if set(choice) <= set(decisions)), key=len),)

    return dataclasses.replace(
        offered,
        precisions=chosen(offered.precisions),
        optimizers=chosen(offered.optimizers),
        losses=chosen(offered.losses),
        updates=chosen(offered.updates),
    )


def _precisions(
    work: Workload, card: DeviceProfile, constraints: Constraints, notes: list[str]
) -> tuple[tuple[Decision, ...], ...]:
    why_not = None
    if not card.native_dtypes:
        why_not = f"{card.title} computes neither bf16 nor fp16 faster than fp32"
    elif odd := sorted(
        {str(p.dtype).removeprefix("torch.") for p in work.model.parameters() if p.requires_grad} - {"float32"}
    ):
        why_not = f"trained parameters are {odd[0]}, and autocast needs fp32 master weights"
    found = _choices(constraints, Precision, None if why_not else (Precision(dtype=card.native_dtypes[0]),), why_not)
    if why_not and constraints.allow(Precision):
        notes.append(f"no autocast: {why_not}")
    return found


def _optimizers(work: Workload, constraints: Constraints, notes: list[str]) -> tuple[tuple[Decision, ...], ...]:
    """As it is, by another kernel, with 8-bit state; never the last two together."""
    why_not = why_not_eight_bit(work)
    if why_not and constraints.allow(Optimizer):
        notes.append(f"no 8-bit optimizer state: {why_not}")
    eight_bit = _choices(constraints, Optimizer, None if why_not else (Optimizer(),), why_not)
    kind = kind_of(work.optimizer)
    kernel = (kernel_beside_foreach(kind) if kind else None) or "fused"
    why_not = why_no_kernel(kernel, work.optimizer, work.model)
    kernels = _choices(constraints, OptimizerKernel, None if why_not else (OptimizerKernel(kernel=kernel),), why_not)
    if constraints.force(Optimizer) or constraints.force(OptimizerKernel):
        return eight_bit if constraints.force(Optimizer) else kernels
    return tuple(dict.fromkeys((*kernels, *eight_bit)))


def _updates(work: Workload, constraints: Constraints, notes: list[str]) -> tuple[tuple[Decision, ...], ...]:
    """After the backward; inside of it, where the optimizer treats each parameter by itself."""
    optimizer = work.optimizer
    if work.gradients_alive:
        why_not = "the gradients of several batches are added up before the optimizer may use them"
        if constraints.allow(StepInBackward):
            notes.append(f"no step in backward: {why_not}")
    elif several_processes():
        why_not = "gradients of several processes are added up before the optimizer may use them"
    elif isinstance(optimizer, str):
        why_not = None
    elif not isinstance(optimizer, torch.optim.Optimizer):
        why_not = "what a function makes is not known to treat each parameter by itself: give the optimizer itself"
    elif by_parameter(optimizer):
        why_not = None
    else:
        hooks = " with step hooks" if has_step_hooks(optimizer) else ""
        why_not = f"{optimizer_name(optimizer)}{hooks} may look at the gradients of all parameters together"
    return _choices(constraints, StepInBackward, (StepInBackward(),) if why_not is None else None, why_not)


def _recompute(constraints: Constraints) -> tuple[type[Decision], ...]:
    """One that is forced stands alone: then what is recomputed is recomputed so."""
    allowed = tuple(kind for kind in (Checkpoint, Replay, Offload) if constraints.allow(kind))
    forced = tuple(kind for kind in allowed if constraints.force(kind))
    if len(forced) > 1:
        names = " and ".join(kind.kind for kind in forced)
        raise DecisionError(
            f"{names} are both forced, and each is a way to do without saved tensors: force one of them"
        )
    return forced or allowed


def _refuse_forced_conflict(card: DeviceProfile, constraints: Constraints) -> None:
    examples = (Optimizer(), OptimizerKernel(kernel="fused"))
    examples += (StepInBackward(), Accumulation(micro_batch_size=1, micro_batches=2))
    examples += tuple(Precision(dtype=dtype) for dtype in card.native_dtypes[:1])
    if (why := conflict(decision for decision in examples if constraints.force(type(decision)))) is not None:
        raise DecisionError(f"both are forced, but {why}")


def _choices(
    constraints: Constraints, kind: type[Decision], decisions: tuple[Decision, ...] | None, why_not: str | None
) -> tuple[tuple[Decision, ...], ...]:
    """With the technique, without it, or both; with it first, since that is why it is offered."""
    if constraints.force(kind):
        if decisions is None:
            raise DecisionError(f"{kind.kind} is forced, but {why_not}")
        return (decisions,)
    return ((), decisions) if decisions is not None and constraints.allow(kind) else ((),)
