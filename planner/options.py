"""The outer choices: precision, optimizer state, frozen prefix and micro-batches. They are few, so they are listed."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Container, Iterator, Mapping, Sequence

import torch

from planner.decisions import (
    KINDS,
    Accumulation,
    Checkpoint,
    ChunkedLoss,
    Decision,
    Fidelity,
    Freeze,
    Offload,
    Optimizer,
    OptimizerKernel,
    Precision,
    Replay,
    StepInBackward,
    conflict,
)
from planner.errors import DecisionError
from planner.optimizers import (
    by_parameter,
    has_step_hooks,
    kernel_beside_foreach,
    kind_of,
    sparse_lookups,
    why_no_kernel,
)
from planner.processes import several_processes
from planner.workload import Workload, optimizer_name
from profiles.device import DeviceProfile

_ADAM_NAMES = ("adam", "adamw")
_MICRO_BATCH_STEPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14)
"""Numbers of micro-batches that are tried: these, and from 16 on four for each doubling."""

_SMALLEST_IN_8_BITS = 4096
"""Elements from which on bitsandbytes keeps state in 8 bits (`min_8bit_size`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """What the user allows."""

    fidelity: Fidelity
    forced: tuple[str, ...]
    forbidden: tuple[str, ...]
    max_slowdown: float | None = None
    """Step time over that of the step as it is; None: any."""

    def __post_init__(self) -> None:
        for name in (*self.forced, *self.forbidden):
            if name not in KINDS:
                raise DecisionError(f"technique '{name}' is unknown: choose from {', '.join(KINDS)}")
        if both := sorted(set(self.forced) & set(self.forbidden)):
            raise DecisionError(f"technique '{both[0]}' is forced and forbidden: name it once")
        for name in self.forced:
            if KINDS[name].fidelity > self.fidelity:
                needed = KINDS[name].fidelity.name.lower()
                raise DecisionError(
                    f"technique '{name}' is forced but not allowed at this fidelity: add --fidelity {needed}"
                )
        if self.max_slowdown is not None and not 0 < self.max_slowdown < math.inf:
            raise DecisionError(f"slowdown of at most {self.max_slowdown} is impossible: give a number such as 1.2")

    def allow(self, kind: type[Decision]) -> bool:
        return kind.fidelity <= self.fidelity and kind.kind not in self.forbidden

    def force(self, kind: type[Decision]) -> bool:
        return kind.kind in self.forced


def given_rules(
    *,
    fidelity: str,
    force: Sequence[str],
    forbid: Sequence[str],
    only: Sequence[str] | None = None,
    max_slowdown: float | None = None,
) -> Rules:
    """Rules as a user states them; `only` forbids every technique that it does not name.

    Raises:
        DecisionError: a name is unknown, or two of them contradict each other.
    """
    forced, forbidden = _names(force), _names(forbid)
    if only is not None:
        only = _names(only)
        for name in only:
            if name not in KINDS:
                raise DecisionError(f"technique '{name}' is unknown: choose from {', '.join(KINDS)}")
            if name in forbidden:
                raise DecisionError(f"technique '{name}' is forbidden, and among those that alone are allowed")
        forbidden = tuple(name for name in KINDS if name not in only or name in forbidden)
    return Rules(fidelity=Fidelity.parse(fidelity), forced=forced, forbidden=forbidden, max_slowdown=max_slowdown)


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """The batch in `micro_batches` parts of at most `size` samples."""

    micro_batches: int
    size: int
    last: int | None = None
    """Samples of the second of two parts, where it is smaller; of many parts the peak is in one of the larger ones."""

    def decisions(self) -> tuple[Decision, ...]:
        if self.micro_batches == 1:
            return ()
        return (Accumulation(micro_batch_size=self.size, micro_batches=self.micro_batches),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offer:
    """What can be chosen from for this workload on this card, and why some things cannot."""

    precisions: tuple[tuple[Decision, ...], ...]
    optimizers: tuple[tuple[Decision, ...], ...]
    losses: tuple[tuple[Decision, ...], ...]
    updates: tuple[tuple[Decision, ...], ...]
    """When the optimizer steps: after the backward, or inside of it."""
    splits: tuple[Split, ...]
    recompute: tuple[type[Decision], ...]
    """How what is needed in backward may be made again; the search chooses of what."""
    notes: tuple[str, ...]


def offer(
    work: Workload,
    card: DeviceProfile,
    rules: Rules,
    *,
    batch_statistics: tuple[str, ...],
    chunked_loss: ChunkedLoss | None,
) -> Offer:
    """List the outer choices that the user allows and the workload and card permit.

    Args:
        batch_statistics: modules that normalise over the batch, as recorded.
        chunked_loss: how the loss can be taken in chunks, as recorded; None if it cannot.

    Raises:
        DecisionError: something is forced that this workload or card cannot do.
    """
    notes: list[str] = []
    _refuse_forced_conflict(card, rules)
    return Offer(
        precisions=_precisions(work, card, rules, notes),
        optimizers=_optimizers(work, rules, notes),
        losses=_choices(
            rules,
            ChunkedLoss,
            None if chunked_loss is None else (chunked_loss,),
            "no linear layer's output of some size goes straight into a cross entropy",
        ),
        updates=_updates(work, rules, notes),
        splits=_splits(work, rules, batch_statistics, notes),
        recompute=_recompute(rules),
        notes=tuple(notes),
    )


def floor_bytes(
    work: Workload, trained: Trained, *, optimizer_peak_bytes: int, state_bytes: int, outer: Sequence[Decision]
) -> int:
    """Bytes that no plan with these outer choices goes below: what must be alive while the optimizer steps.

    Args:
        optimizer_peak_bytes: the same for the baseline. It stays so but for what another optimizer or frozen
            parameters spare: gradients, state and temporaries are taken to be proportional to trained parameters.
        state_bytes: of the baseline's optimizer. It is all that a step in backward needs beside the parameters, and
            with the gradients all that another kernel needs.
    """
    parameter_bytes = sum(p.numel() * p.itemsize for p in work.model.parameters())
    frozen = {name for decision in outer if isinstance(decision, Freeze) for name in decision.modules}
    held = {id(p) for name in frozen for p in work.model.get_submodule(name).parameters()}
    still = trained.without(held)
    eight_bit = any(isinstance(decision, Optimizer) for decision in outer)
    in_backward = any(isinstance(decision, StepInBackward) for decision in outer)
    without_temporaries = in_backward or any(isinstance(decision, OptimizerKernel) for decision in outer)
    if not held and not eight_bit and not without_temporaries:
        return optimizer_peak_bytes
    least_bytes = parameter_bytes
    if not in_backward:
        least_bytes += sum(p.numel() * p.itemsize for p in still.with_gradient)
    if eight_bit:
        return least_bytes + still.eight_bit_state_bytes(work.model)
    if len(trained.with_state) < len(trained.with_gradient):
        return least_bytes
    if held and isinstance(work.optimizer, torch.optim.Optimizer) and len(work.optimizer.param_groups) > 1:
        return least_bytes  # groups may differ in the state that they keep
    share = sum(p.numel() for p in still.with_state) / sum(p.numel() for p in trained.with_state)
    if without_temporaries:
        return least_bytes + int(0.99 * share * state_bytes)
    return parameter_bytes + int(0.99 * share * (optimizer_peak_bytes - parameter_bytes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """Parameters by what the step makes for them."""

    with_gradient: tuple[torch.nn.Parameter, ...]
    with_state: tuple[torch.nn.Parameter, ...]
    """Those of them that the optimizer holds."""

    @classmethod
    def of(cls, work: Workload, names: Sequence[str]) -> Trained:
        """From the names of all that get a gradient, as recorded."""
        reached = set(names)
        gradients = tuple(parameter for name, parameter in work.model.named_parameters() if name in reached)
        optimizer = work.optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            return cls(with_gradient=gradients, with_state=gradients)
        covered = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return cls(with_gradient=gradients, with_state=tuple(p for p in gradients if id(p) in covered))

    def without(self, held: Container[int]) -> Trained:
        """Less those whose identity is among `held`."""
        return Trained(
            with_gradient=tuple(p for p in self.with_gradient if id(p) not in held),
            with_state=tuple(p for p in self.with_state if id(p) not in held),
        )

    def eight_bit_state_bytes(self, model: torch.nn.Module) -> int:
        """At least: a byte for each of the two moments; four for embeddings and small tensors (`rewrite/rules/`)."""
        wide = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
        return sum(p.numel() * (8 if id(p) in wide or p.numel() < _SMALLEST_IN_8_BITS else 2) for p in self.with_state)


def frozen_offer(offered: Offer, frozen: Freeze) -> Offer:
    """The same choices with a frozen prefix."""
    return dataclasses.replace(offered, precisions=tuple((frozen, *choice) for choice in offered.precisions))


def only(offered: Offer, decisions: Sequence[Decision]) -> Offer:
    """The same splits and modules, with the precision, optimizer, loss and update of these decisions alone."""

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
    work: Workload, card: DeviceProfile, rules: Rules, notes: list[str]
) -> tuple[tuple[Decision, ...], ...]:
    why_not = None
    if not card.native_dtypes:
        why_not = f"{card.title} computes neither bf16 nor fp16 faster than fp32"
    elif odd := sorted(
        {str(p.dtype).removeprefix("torch.") for p in work.model.parameters() if p.requires_grad} - {"float32"}
    ):
        why_not = f"trained parameters are {odd[0]}, and autocast needs fp32 master weights"
    found = _choices(rules, Precision, None if why_not else (Precision(dtype=card.native_dtypes[0]),), why_not)
    if why_not and rules.allow(Precision):
        notes.append(f"no autocast: {why_not}")
    return found


def _optimizers(work: Workload, rules: Rules, notes: list[str]) -> tuple[tuple[Decision, ...], ...]:
    """As it is, by another kernel, with 8-bit state; never the last two together."""
    why_not = _why_no_eight_bit(work)
    if why_not and rules.allow(Optimizer):
        notes.append(f"no 8-bit optimizer state: {why_not}")
    eight_bit = _choices(rules, Optimizer, None if why_not else (Optimizer(),), why_not)
    kind = kind_of(work.optimizer)
    kernel = (kernel_beside_foreach(kind) if kind else None) or "fused"
    why_not = why_no_kernel(kernel, work.optimizer, work.model)
    kernels = _choices(rules, OptimizerKernel, None if why_not else (OptimizerKernel(kernel=kernel),), why_not)
    if rules.force(Optimizer) or rules.force(OptimizerKernel):
        return eight_bit if rules.force(Optimizer) else kernels
    return tuple(dict.fromkeys((*kernels, *eight_bit)))


def _updates(work: Workload, rules: Rules, notes: list[str]) -> tuple[tuple[Decision, ...], ...]:
    """After the backward; inside of it, where the optimizer treats each parameter by itself."""
    optimizer = work.optimizer
    if work.gradients_alive:
        why_not = "the gradients of several batches are added up before the optimizer may use them"
        if rules.allow(StepInBackward):
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
    return _choices(rules, StepInBackward, (StepInBackward(),) if why_not is None else None, why_not)


def _recompute(rules: Rules) -> tuple[type[Decision], ...]:
    """One that is forced stands alone: then what is recomputed is recomputed so."""
    allowed = tuple(kind for kind in (Checkpoint, Replay, Offload) if rules.allow(kind))
    forced = tuple(kind for kind in allowed if rules.force(kind))
    if len(forced) > 1:
        names = " and ".join(kind.kind for kind in forced)
        raise DecisionError(
            f"{names} are both forced, and each is a way to do without saved tensors: force one of them"
        )
    return forced or allowed


def _refuse_forced_conflict(card: DeviceProfile, rules: Rules) -> None:
    examples = (Optimizer(), OptimizerKernel(kernel="fused"))
    examples += (StepInBackward(), Accumulation(micro_batch_size=1, micro_batches=2))
    examples += tuple(Precision(dtype=dtype) for dtype in card.native_dtypes[:1])
    if (why := conflict(decision for decision in examples if rules.force(type(decision)))) is not None:
        raise DecisionError(f"both are forced, but {why}")


def _why_no_eight_bit(work: Workload) -> str | None:
    """What keeps bitsandbytes' AdamW from taking the optimizer's place; None if nothing does."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed (pip install bitsandbytes)"
    if any(p.dtype == torch.float64 for p in work.model.parameters() if p.requires_grad):
        return "trained parameters are float64"
    if sparse_lookups(work.model):
        return "an embedding makes sparse gradients"
    optimizer = work.optimizer
    if isinstance(optimizer, str):
        return None if optimizer in _ADAM_NAMES else f"{optimizer} has no 8-bit twin here"
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return f"{optimizer_name(optimizer)} has no 8-bit twin here"
    if optimizer.state:
        return "the optimizer holds state already"
    if has_step_hooks(optimizer):
        return "the optimizer has step hooks, which would be lost"
    for group in optimizer.param_groups:
        if group["amsgrad"] or group["maximize"]:
            return "it has neither amsgrad nor maximize"
        if type(optimizer) is torch.optim.Adam and group["weight_decay"]:
            return "Adam's weight decay is not AdamW's"
    return None


def _splits(work: Workload, rules: Rules, batch_statistics: tuple[str, ...], notes: list[str]) -> tuple[Split, ...]:
    why_not = None
    if batch_statistics:
        why_not = f"'{batch_statistics[0]}' normalises over the micro-batch, so that parts of a batch are not the batch"
    elif work.batch_size < 2:
        why_not = "the batch is a single sample"
    elif _balances_experts(work):
        why_not = (
            "the model balances its experts over all tokens of a batch (output_router_logits), which parts of it would "
            "each do by themselves"
        )
    single, several = Split(micro_batches=1, size=work.batch_size), tuple(splits_of(work.batch_size))
    if rules.force(Accumulation):
        if why_not and work.batch_size < 2:
            raise DecisionError(f"accumulation is forced, but {why_not}")
        if why_not:
            notes.append(f"accumulation is forced although {why_not}: results differ from the full batch")
        return several
    if why_not:
        if rules.allow(Accumulation):
            notes.append(f"no accumulation: {why_not}")
        return (single,)
    return (single, *several) if rules.allow(Accumulation) else (single,)


def _balances_experts(work: Workload) -> bool:
    """Whether a model of transformers adds a term to its loss that is no mean over tokens."""
    stated = work.batch.get("output_router_logits") if isinstance(work.batch, Mapping) else None
    config = getattr(work.model, "config", None)
    return bool(getattr(config, "output_router_logits", False) if stated is None else stated)


def _choices(
    rules: Rules, kind: type[Decision], decisions: tuple[Decision, ...] | None, why_not: str | None
) -> tuple[tuple[Decision, ...], ...]:
    """With the technique, without it, or both; with it first, since that is why it is offered."""
    if rules.force(kind):
        if decisions is None:
            raise DecisionError(f"{kind.kind} is forced, but {why_not}")
        return (decisions,)
    return ((), decisions) if decisions is not None and rules.allow(kind) else ((),)


def splits_of(batch_size: int) -> Iterator[Split]:
    """Ways to cut a batch, in rising number of micro-batches; each size once, down to single samples."""
    counts = [count for count in _MICRO_BATCH_STEPS if 1 < count <= batch_size]
    step = 16
    while step < 2 * batch_size:
        counts += [min(step * quarter // 4, batch_size) for quarter in (4, 5, 6, 7)]
        step *= 2
    sizes_seen = {batch_size}
    for count in counts:
        size = -(-batch_size // count)
        if size not in sizes_seen:
            sizes_seen.add(size)
            parts, last = -(-batch_size // size), batch_size - size
            yield Split(micro_batches=parts, size=size, last=last if parts == 2 and last < size else None)
