"""The search space: which precision, loss, optimizer and time of the update a plan may choose from.

There are few combinations of these (configurations), so all are listed. The functions `_precisions`, `_losses`,
`_optimizers` and `_updates` return the alternatives for one part of the step. If a technique cannot be used, they add a
note with the reason.
"""

from __future__ import annotations

import dataclasses
import itertools
import platform
from collections.abc import Iterable, Sequence

import torch

from planner.allocator.options import settings_of
from planner.errors import DecisionError, WorkloadError
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import Decision, Role, allocator_conf, changed_options, conflict, options_in
from planner.plan_types.decisions import (
    Accumulation,
    Allocator,
    ChunkedLoss,
    Optimizer,
    OptimizerKernel,
    Precision,
    ShardedPrecision,
    StepInBackward,
)
from planner.plan_types.techniques import KINDS
from planner.profiles.device import DeviceProfile
from planner.space.lm_head import WHY_NO_CHUNKS, ChunkedLossOption
from planner.space.micro_batches import MicroBatching, batch_splits
from planner.workload.eight_bit import why_not_eight_bit
from planner.workload.optimizer_choice import by_name, optimizer_name
from planner.workload.torch_optimizers import (
    by_parameter,
    has_step_hooks,
    kernel_instead_of_foreach,
    several_processes,
    why_no_kernel,
)
from planner.workload.workload import Workload

Alternatives = tuple[tuple[Decision, ...], ...]
"""Alternatives for one part of the step. Each is a tuple of decisions; () leaves that part as in the baseline."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The alternatives for a plan of this workload on this card, and notes on techniques that cannot be used.

    A configuration takes one alternative from each of the first four fields. With one of the splits it is a candidate.
    """

    precisions: Alternatives
    optimizers: Alternatives
    losses: Alternatives
    updates: Alternatives
    """When the optimizer steps: after the backward, or inside it."""
    splits: tuple[MicroBatching, ...]
    allocators: Alternatives
    """Options of the caching allocator, in order of preference. The certificate of a plan decides between them."""
    recompute: tuple[type[Decision], ...]
    """Kinds of decisions that free saved tensors (checkpoint, offload ...). The search chooses their modules."""
    chunks: ChunkedLossOption | None
    """The numbers of loss chunks for micro-batches; None if the loss cannot be computed in chunks. `losses` has the
    number for the whole batch."""
    notes: tuple[str, ...]

    def with_frozen(self, frozen: Decision) -> SearchSpace:
        """Returns this search space with a frozen prefix of the model in every configuration."""
        return dataclasses.replace(self, precisions=tuple((frozen, *choice) for choice in self.precisions))

    def with_most_chunks(self) -> SearchSpace | None:
        """Returns this search space with the loss in the maximum number of chunks; None if that changes nothing.

        The number of chunks normally follows from the budget: a smaller budget gives more chunks, which take less
        memory. With the maximum number, the search also finds plans that it would try for a smaller budget only,
        although they fit this one as well.
        """
        if self.chunks is None or not any(self.losses):
            return None
        present, most, numbers = self.chunks, self.chunks.most_chunks(), {split.micro_batches for split in self.splits}
        if all(present.for_micro_batches(n) == most.for_micro_batches(n) for n in numbers):
            return None  # every split already has the maximum number of chunks
        losses = tuple(most.for_whole_batch() if loss else () for loss in self.losses)
        return dataclasses.replace(self, chunks=most, losses=losses)

    def restricted_to(self, config: Sequence[Decision]) -> SearchSpace:
        """Returns this search space with `config` as its only configuration. Splits and `recompute` stay the same."""

        def chosen(alternatives: Alternatives) -> Alternatives:
            return (max((choice for choice in alternatives if set(choice) <= set(config)), key=len),)

        return dataclasses.replace(
            self,
            precisions=chosen(self.precisions),
            optimizers=chosen(self.optimizers),
            losses=chosen(self.losses),
            updates=chosen(self.updates),
        )

    def using(self, technique: type[Decision]) -> SearchSpace | None:
        """Returns this search space with only the alternatives that use a technique; None if there are none.

        For techniques that recompute, offload or freeze modules it is returned unchanged, since modules are chosen
        later.
        """
        if technique.role in (Role.RECOMPUTE, Role.FREEZING):
            return self
        if technique.role is Role.MICRO_BATCHING:
            splits = tuple(split for split in self.splits if split.micro_batches > 1)
            return dataclasses.replace(self, splits=splits) if splits else None

        def using(alternatives: Alternatives) -> Alternatives:
            return tuple(choice for choice in alternatives if any(isinstance(d, technique) for d in choice))

        if precisions := using(self.precisions):
            return dataclasses.replace(self, precisions=precisions)
        if optimizers := using(self.optimizers):
            return dataclasses.replace(self, optimizers=optimizers)
        if losses := using(self.losses):
            return dataclasses.replace(self, losses=losses)
        if updates := using(self.updates):
            return dataclasses.replace(self, updates=updates)
        if allocators := using(self.allocators):
            return dataclasses.replace(self, allocators=allocators)
        return None


def search_space(
    workload: Workload,
    card: DeviceProfile,
    constraints: Constraints,
    *,
    batch_statistics: tuple[str, ...],
    chunks: ChunkedLossOption | None,
    carried: str | None = None,
    why_no_samples: str | None = None,
    values_needed: str | None = None,
) -> SearchSpace:
    """Returns the alternatives that the user allows and that the workload and the card permit.

    Args:
        batch_statistics: names of modules that normalize over the batch, from the recording of the baseline.
        carried: what a forward changes and the next one uses (`carried_state`), from the same recording.
        why_no_samples: the reason why it is not known which tensors of the batch have a row for each sample; None if it
            is known.
        values_needed: says where the step needs values of the batch, as an assumption of the recording; None if it does
            not.
        chunks: how the loss can be computed in chunks, from the same recording; None if it cannot.

    Raises:
        DecisionError: a technique is forced that this workload or card cannot use.
    """
    notes: list[str] = []
    _refuse_forced_conflict(card, constraints)
    if workload.step is not None:
        refuse = {kind: _alternatives(constraints, kind, None, why) for kind, why in _OF_THE_STEP.items()}
        notes += [f"no {kind.kind}: {why}" for kind, why in _OF_THE_STEP.items() if constraints.allow(kind)]
        return SearchSpace(
            precisions=refuse[Precision],
            optimizers=_optimizers(workload, constraints, notes),
            losses=refuse[ChunkedLoss],
            updates=refuse[StepInBackward],
            splits=(MicroBatching(micro_batches=1, size=workload.batch_size),),
            allocators=allocator_alternatives(card, constraints),
            recompute=_recompute(workload, constraints, notes),
            chunks=None,
            notes=tuple(notes),
        )
    return SearchSpace(
        precisions=_precisions(workload, card, constraints, notes),
        optimizers=_optimizers(workload, constraints, notes),
        losses=_losses(workload, constraints, chunks),
        updates=_updates(workload, constraints, notes),
        splits=batch_splits(workload, constraints, batch_statistics, carried, why_no_samples, values_needed, notes),
        allocators=allocator_alternatives(card, constraints),
        recompute=_recompute(workload, constraints, notes),
        chunks=None
        if chunks is None or workload.parallelize is not None
        else dataclasses.replace(chunks, always=constraints.force(Role.LOSS)),
        notes=tuple(notes),
    )


_OF_THE_STEP: dict[type[Decision], str] = {
    Accumulation: "your step function runs forward and backward itself, so split the batch there",
    Precision: "your step function runs the forwards itself, so write torch.autocast there",
    ChunkedLoss: "your step function computes the loss itself",
    StepInBackward: "your step function says itself when an optimizer steps",
}
"""Techniques that change the planner's own step, and why a step of the user's own cannot use them."""


def _precisions(workload: Workload, card: DeviceProfile, constraints: Constraints, notes: list[str]) -> Alternatives:
    why_not = None
    if not card.native_dtypes:
        why_not = f"{card.title} computes neither bf16 nor fp16 faster than fp32"
    elif odd := sorted(
        {str(p.dtype).removeprefix("torch.") for p in workload.model.parameters() if p.requires_grad} - {"float32"}
    ):
        why_not = f"trained parameters are {odd[0]}, and autocast needs fp32 master weights"
    is_sharded = any(decision.gathers_parameters for decision in workload.sharding)
    library = next((decision.preparing_library for decision in workload.sharding if is_sharded), "")
    norm = next((name for name, module in workload.model.named_modules() if _keeps_statistics(module)), None)
    gathers_in_bf16 = norm is None or constraints.force(ShardedPrecision)
    if is_sharded and "bf16" in card.native_dtypes and not constraints.force(Precision) and gathers_in_bf16:
        if not constraints.allow(Precision) and not constraints.force(ShardedPrecision):
            return ((),)  # who forbids autocast does not expect it under another name
        policy = ShardedPrecision(reduce_dtype="bf16" if library else "fp32", without_autocast=bool(library))
        return _alternatives(constraints, ShardedPrecision, None if why_not else (policy,), why_not)
    if constraints.force(ShardedPrecision):
        if is_sharded and constraints.force(Precision):
            raise DecisionError("sharded-precision and mixed-precision are both forced: force only one of them")
        why = f"{card.title} has no bf16" if is_sharded else "parameters are not sharded"
        raise DecisionError(f"sharded-precision is forced, but {why}: do not force sharded-precision")
    if is_sharded and norm is not None and not why_not and "bf16" in card.native_dtypes:
        notes.append(
            f"FSDP2 gathers all parameters in fp32, not in bf16, because the parameters of '{norm}' need the dtype of "
            "its running statistics"
        )
    if library and not why_not:
        why_not = f"{library} uses no autocast with FSDP2, and its fp16 there cannot be planned"
    if workload.parallelize is not None and card.native_dtypes[:1] == ("fp16",) and not why_not:
        why_not = "the gradient scaler that fp16 needs differs between cards if a function of yours divides the model"
    decisions = None if why_not else (Precision(dtype=card.native_dtypes[0]),)
    if why_not and constraints.allow(Precision):
        notes.append(f"no autocast: {why_not}")
    return _alternatives(constraints, Precision, decisions, why_not)


def _keeps_statistics(module: torch.nn.Module) -> bool:
    """True for a BatchNorm with parameters and running statistics. Kernels need one dtype for both."""
    has_statistics = isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.running_mean is not None
    return has_statistics and module.weight is not None


def _losses(workload: Workload, constraints: Constraints, chunks: ChunkedLossOption | None) -> Alternatives:
    if workload.parallelize is not None:
        return _alternatives(constraints, ChunkedLoss, None, f"{ChunkedLoss.kind} {_NEEDS_PLAIN}")
    return _alternatives(constraints, ChunkedLoss, None if chunks is None else chunks.for_whole_batch(), WHY_NO_CHUNKS)


def _optimizers(workload: Workload, constraints: Constraints, notes: list[str]) -> Alternatives:
    """Returns the alternatives for the optimizer: the user's optimizer, with another kernel, or with 8-bit state.

    If the step has several optimizers, a decision names those for which it is possible.
    """
    named = by_name(workload.optimizer)
    is_own = workload.step is not None
    divides = next((why for sharding in workload.sharding if (why := sharding.excludes(Optimizer()))), None)
    reasons = {
        name: divides or why_not_eight_bit(spec, workload.model, of_own_step=is_own) for name, spec in named.items()
    }
    able, why_not = tuple(name for name in named if reasons[name] is None), next(iter(reasons.values()))
    for name, reason in reasons.items():
        if reason and constraints.allow(Optimizer):
            notes.append(f"no 8-bit optimizer state{f' for {name!r}' if name else ''}: {reason}")
    decisions = (Optimizer(optimizers=tuple(filter(None, able))),) if able else None
    eight_bit = _alternatives(constraints, Optimizer, decisions, why_not)
    kernel_of = {name: kernel_instead_of_foreach(spec) or "fused" for name, spec in named.items()}
    reasons = {name: why_no_kernel(kernel_of[name], spec, workload.model) for name, spec in named.items()}
    able, why_not = tuple(name for name in named if reasons[name] is None), next(iter(reasons.values()))
    kernel = "fused" if any(kernel_of[name] == "fused" for name in able) else "for-loop"
    able = tuple(name for name in able if kernel_of[name] == kernel)
    chosen = (OptimizerKernel(kernel=kernel, optimizers=tuple(filter(None, able))),) if able else None
    kernels = _alternatives(constraints, OptimizerKernel, chosen, why_not)
    if constraints.force(Optimizer) or constraints.force(OptimizerKernel):
        return eight_bit if constraints.force(Optimizer) else kernels
    return tuple(dict.fromkeys((*kernels, *eight_bit)))


def _updates(workload: Workload, constraints: Constraints, notes: list[str]) -> Alternatives:
    """Returns the times of the update: after the backward; also inside it, if each parameter is updated separately."""
    optimizer = workload.optimizer
    if workload.gradients_alive:
        why_not = "the gradients of several batches are added up before the optimizer may use them"
        if constraints.allow(StepInBackward):
            notes.append(f"no step in backward: {why_not}")
    elif several_processes() or workload.sharding:
        why_not = "gradients of several processes are added up before the optimizer may use them"
    elif isinstance(optimizer, str):
        why_not = None
    elif not isinstance(optimizer, torch.optim.Optimizer):
        why_not = (
            "an optimizer made by a function is not known to treat each parameter independently: give the optimizer "
            "itself"
        )
    elif by_parameter(optimizer):
        why_not = None
    else:
        hooks = " with step hooks" if has_step_hooks(optimizer) else ""
        why_not = f"{optimizer_name(optimizer)}{hooks} may look at the gradients of all parameters together"
    decisions = (StepInBackward(),) if why_not is None else None
    return _alternatives(constraints, StepInBackward, decisions, why_not)


_SPLIT_MB = (512, 128)
"""Values of max_split_size_mb that are tried."""


def allocator_alternatives(card: DeviceProfile, constraints: Constraints) -> Alternatives:
    """Returns the alternatives for the options of the allocator: those that the user has set first.

    Options that the user has set to the same value are left out. Those that the user has set to another value come
    last (`changed_options`), and those that PyTorch would refuse together with the user's are left out.

    Expandable segments need a driver interface that PyTorch does not use on Windows, and that WSL lacks.
    """
    kinds = [Allocator(max_split_size_mb=size) for size in _SPLIT_MB]
    if platform.system() != "Windows" and "microsoft" not in platform.release().lower():
        kinds.insert(0, Allocator(expandable_segments=True))
    kinds = [option for option in kinds if _adds_to(option, card.alloc_conf)]
    kinds.sort(key=lambda option: bool(changed_options([option], card.alloc_conf)))
    why_not = None if card.allocator else f"{card.title} has no caching allocator"
    if not kinds:
        why_not = "you have set its options, or PyTorch refuses them together with yours"
        return _alternatives(constraints, Allocator, None, why_not)
    alternatives = [_alternatives(constraints, Allocator, None if why_not else (option,), why_not) for option in kinds]
    return tuple(dict.fromkeys(itertools.chain.from_iterable(alternatives)))


def _adds_to(option: Allocator, given: str) -> bool:
    """True if an option is not among those that the user has set, and PyTorch accepts it together with them."""
    if options_in(allocator_conf([option], given)) == options_in(given):
        return False
    try:
        settings_of(allocator_conf([option], given))
    except WorkloadError:
        return False
    return True


_NEEDS_PLAIN = "cannot be used with parallelize, because your function may turn parameters into DTensors"
"""Why some techniques cannot be used on a model that a function of the user's own divides."""


def _recompute(workload: Workload, constraints: Constraints, notes: list[str]) -> tuple[type[Decision], ...]:
    """Returns the allowed kinds of decisions that free saved tensors; only the forced one if one is forced.

    Raises:
        DecisionError: more than one of them is forced, or one that the workload cannot use.
    """
    kinds = tuple(kind for kind in KINDS.values() if kind.role is Role.RECOMPUTE)
    if workload.parallelize is not None:
        refused = [kind for kind in KINDS.values() if kind.needs_plain_tensors]
        for kind in refused:
            _alternatives(constraints, kind, None, f"{kind.kind} {_NEEDS_PLAIN}")  # an error if it is forced
        if names := [kind.kind for kind in refused if constraints.allow(kind)]:
            notes.append(f"not used: {', '.join(names)}, which {_NEEDS_PLAIN}")
        kinds = tuple(kind for kind in kinds if kind not in refused)
    allowed = tuple(kind for kind in kinds if constraints.allow(kind))
    forced = tuple(kind for kind in allowed if constraints.force(kind))
    if len(forced) > 1:
        both = " and ".join(kind.kind for kind in forced)
        raise DecisionError(
            f"{both} are forced, but only one technique that frees saved tensors can be forced: force one of them"
        )
    return forced or allowed


def _refuse_forced_conflict(card: DeviceProfile, constraints: Constraints) -> None:
    """Raises `DecisionError` if two forced techniques exclude each other.

    This is checked first, so that the user does not get a reason that concerns only one of the two techniques.
    """
    examples: Iterable[Decision] = (
        Optimizer(),
        OptimizerKernel(kernel="fused"),
        StepInBackward(),
        *MicroBatching(micro_batches=2, size=1).decisions(),
        *(Precision(dtype=dtype) for dtype in card.native_dtypes[:1]),
    )
    if (why := conflict(decision for decision in examples if constraints.force(type(decision)))) is not None:
        raise DecisionError(f"two forced techniques cannot be combined, because {why}: force only one of them")


def _alternatives(
    constraints: Constraints, kind: type[Decision], decisions: tuple[Decision, ...] | None, why_not: str | None
) -> Alternatives:
    """Returns the alternatives that a technique gives: the step without it, with it, or both.

    Args:
        decisions: the technique's decisions; None if it cannot be used.
        why_not: the reason why it cannot be used; None if it can.

    Raises:
        DecisionError: the technique is forced and cannot be used.
    """
    if constraints.force(kind):
        if decisions is None:
            # Some reasons end with an advice of their own after a colon.
            why_forced, way_out = constraints.why_forced(kind)
            advice = "" if why_not and ":" in why_not else f": {way_out}"
            raise DecisionError(f"{why_forced}, but {why_not}{advice}")
        return (decisions,)
    return ((), decisions) if decisions is not None and constraints.allow(kind) else ((),)
