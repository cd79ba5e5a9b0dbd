"""Hold transformers' `Trainer` to a plan: what it was told to do, and what it takes in its first steps."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any, Literal, final

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from planner.errors import DecisionError, PlanFileError, PromiseError, WorkloadError
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import format_size
from planner.rewrite.optimizers import OPTIMIZERS
from planner.rewrite.trainer.apply import RewrittenForTrainer
from planner.rewrite.trainer.arguments import arguments_of, micro_batches, refuse_contradictions
from planner.rewrite.trainer.loss_weighting import COUNT, told_uneven
from planner.workload.workload import described, optimizer_name

logger = logging.getLogger(__name__)

_OWN_BYTES = 2**16
_SEGMENT_BYTES = 2**21
"""Of the caching allocator, for blocks of up to 1 MiB (`kSmallBuffer`, c10/cuda/CUDACachingAllocator.cpp)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Promise:
    """What the plan promised, beside what the first steps took on the card. In bytes; None where nothing was measured.

    `allocated` is what tensors held at most (`torch.cuda.max_memory_allocated`), `reserved` what the caching allocator
    took (`torch.cuda.max_memory_reserved`).
    """

    allocated_bytes: int | None
    reserved_bytes: int | None
    promised_allocated_bytes: int
    promised_reserved_bytes: int
    own_bytes: int = 0
    """What the Trainer allocates of its own: 64 KiB, and a byte a label."""
    why_not_measured: str = ""

    @property
    def kept(self) -> bool | None:
        """Whether neither was more than promised and the Trainer's own, for which the allocator may take a segment.

        None where that could not be measured.
        """
        if self.allocated_bytes is None or self.reserved_bytes is None:
            return None
        return (
            self.allocated_bytes <= self.promised_allocated_bytes + self.own_bytes
            and self.reserved_bytes <= self.promised_reserved_bytes + _SEGMENT_BYTES
        )

    def __str__(self) -> str:
        if self.kept is None:
            return f"the plan's promise could not be measured: {self.why_not_measured}"
        allocated, reserved = format_size(self.allocated_bytes), format_size(self.reserved_bytes)
        return (
            f"the plan's promise was {'kept' if self.kept else 'broken'}: "
            f"{allocated} allocated of {format_size(self.promised_allocated_bytes)}, "
            f"{reserved} reserved of {format_size(self.promised_reserved_bytes)}"
        )


@final
class PlanCallback(TrainerCallback):
    """Refuses arguments, a model, an optimizer or batches that were not planned; says whether the promise was kept.

    `promise` is what came out, from the last of the first `steps` steps on. One object for one Trainer.
    """

    def __init__(self, rewritten: RewrittenForTrainer, *, steps: int, on_broken: Literal["warn", "raise"]) -> None:
        self.rewritten = rewritten
        self.steps = steps
        self.on_broken = on_broken
        self.promise: Promise | None = None
        self._seen_steps = 0
        self._told: set[str] = set()
        self._hooks: list[Any] = []

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: torch.nn.Module,
        optimizer: Any,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        plan = self.rewritten.plan
        self._refuse_another_model(model)
        refuse_contradictions(plan, arguments_of(args))
        devices = max(args.n_gpu, 1) * args.world_size
        if devices > 1:
            raise DecisionError(
                f"the Trainer would train on {devices} devices, and the plan is for one: set CUDA_VISIBLE_DEVICES=0"
            )
        optimizer = getattr(optimizer, "optimizer", optimizer)  # inside of accelerate's
        refuse_another_optimizer(plan, optimizer)
        self.rewritten.use_kernel(optimizer)
        self._seen_steps, self.promise = 0, None
        self._told.clear()
        self._remove_hooks()
        self._hooks = [model.register_forward_pre_hook(self._look_at_batch, with_kwargs=True)]
        self.rewritten.add_hook(self._hooks[0])
        if self.rewritten.share is not None:
            if not self.rewritten.share.labelled:
                refuse_uneven_parts(args, state, train_dataloader)
            self.rewritten.share.watch(True)
        if args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(args.device)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.rewritten.share is not None:
            self.rewritten.share.refuse_another_loss()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._seen_steps >= self.steps:
            return
        self._seen_steps += 1
        share = self.rewritten.share
        if self._seen_steps < self.steps:
            return
        if share is not None:
            share.watch(False)
        self.promise = measured(self.rewritten.plan, args.device)
        if self.promise.kept:
            logger.info("%s", self.promise)
        elif self.promise.kept is None:
            logger.warning("%s", self.promise)
        else:
            self._broken(f"{self.promise}; plan with less than the budget of {_budget(self.rewritten.plan)}")

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Streams may end within a batch: the Trainer keeps the gradients of what it has of it for the next epoch."""
        share = self.rewritten.share
        if share is not None and share.pending_micro_batches and state.global_step < state.max_steps:
            raise DecisionError(
                f"an epoch ended after {share.pending_micro_batches} of the {args.gradient_accumulation_steps} "
                "micro-batches of a step, and the Trainer would add their gradients to those of the next one: let the "
                "stream have as many samples as make up whole batches, or plan with accumulation forbidden"
            )

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._remove_hooks()
        if self.promise is None:
            logger.warning(
                "the plan's promise could not be measured: training ended after %d of the %d steps",
                self._seen_steps, self.steps,
            )  # fmt: skip

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _refuse_another_model(self, model: torch.nn.Module) -> None:
        if not self.rewritten.is_applied:
            raise DecisionError("the plan was taken back from the model (undo): apply it again before training")
        if model is not self.rewritten.module:
            raise PlanFileError(
                "the Trainer trains another model object than the plan was applied to: give it that one as model=, "
                "and no model_init"
            )

    def _look_at_batch(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        plan = self.rewritten.plan
        given = {path: (shape, dtype) for path, shape, dtype in described(kwargs) if path != COUNT}
        larger = larger_than_planned(plan, given)
        if larger and self._seen_steps < self.steps:
            raise WorkloadError(f"{larger}: make the plan again for the largest batch")
        if larger:
            self._broken(f"{larger}: nothing was promised for it")
        planned = {path for path, _, _ in plan.workload.batch}
        if given.keys() != planned and "names" not in self._told:
            self._told.add("names")
            logger.warning(
                "the batch has %s, and the plan was made for %s: what that takes was not planned; make the plan again "
                "with a batch of these (planner.plan(model, batch))",
                ", ".join(sorted(given)), ", ".join(sorted(planned)),
            )  # fmt: skip

    def _broken(self, text: str) -> None:
        if self.on_broken == "raise":
            raise PromiseError(text)
        if text not in self._told:
            self._told.add(text)
            logger.warning("%s", text)


def refuse_uneven_parts(args: TrainingArguments, state: TrainerState, loader: Any) -> None:
    """Raises `DecisionError` where the last batch of an epoch would be cut into parts of several sizes.

    Of data whose length is not known that is seen when it comes.
    """
    try:
        samples, parts = len(loader.dataset), len(loader)
    except (AttributeError, TypeError):
        return
    size, several = args.per_device_train_batch_size, args.gradient_accumulation_steps
    left, in_last = samples % size, parts % several or several
    if parts == -(-samples // size) and left and in_last > 1 and state.max_steps >= -(-parts // several):
        raise DecisionError(told_uneven([size] * (in_last - 1) + [left]))


def measured(plan: Plan, device: torch.device) -> Promise:
    """The peaks since the counters were last set back, where there is such a counter."""
    peaks = peaks_on(device)
    why_not = f"there is no CUDA device here, the Trainer trains on {device.type}" if peaks is None else ""
    if plan.card == "bare":
        peaks, why_not = None, "the plan is for a bare card, which counts the bytes of tensors and no blocks"
    allocated_bytes, reserved_bytes = peaks or (None, None)
    return Promise(
        allocated_bytes=allocated_bytes, reserved_bytes=reserved_bytes, why_not_measured=why_not,
        promised_allocated_bytes=plan.peak.allocated_bytes, promised_reserved_bytes=plan.peak.reserved_bytes,
        own_bytes=_OWN_BYTES + sum(math.prod(shape) for path, shape, _ in plan.workload.batch if path == "labels"),
    )  # fmt: skip


def peaks_on(device: torch.device) -> tuple[int, int] | None:
    """Allocated and reserved bytes at their peaks; None for devices other than CUDA's."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def larger_than_planned(plan: Plan, given: dict[str, tuple[tuple[int, ...], str]]) -> str | None:
    """The first tensor of a micro-batch, by path, that is larger than planned or of another dtype."""
    samples, (size, _) = plan.workload.batch_size, micro_batches(plan)
    for path, planned, dtype in plan.workload.batch:
        if path not in given:
            continue
        most = tuple(size if axis == 0 and length == samples else length for axis, length in enumerate(planned))
        shape, found = given[path]
        fits = len(shape) == len(most) and all(one <= other for one, other in zip(shape, most, strict=True))
        if not fits or found != dtype:
            return f"'{path}' is {list(shape)} of {found}, and the plan is for {list(most)} of {dtype} at most"
    return None


def refuse_another_optimizer(plan: Plan, optimizer: torch.optim.Optimizer) -> None:
    """Raises `DecisionError` where its kind, the size of its state or its momentum is not what was planned."""
    planned = plan.workload.optimizer
    if any(decision.eight_bit_state for decision in plan.decisions):
        bits = getattr(getattr(optimizer, "args", None), "optim_bits", None)
        if bits != 8 or "adam" not in type(optimizer).__name__.lower():
            raise DecisionError(
                f"the Trainer's optimizer is {optimizer_name(optimizer)}, and the plan has 8-bit AdamW: give it "
                "optim='adamw_bnb_8bit', as rewrite.training_arguments does"
            )
        return
    known = OPTIMIZERS.get(planned)
    expected = f"torch.optim.{known.class_name}" if known is not None else planned
    as_good = {expected.rpartition(".")[2], *(["AdamW"] if planned == "adam" else [])}
    if type(optimizer).__name__ not in as_good:
        raise DecisionError(
            f"the Trainer's optimizer is {optimizer_name(optimizer)}, and the plan was made with {planned}: give it "
            "what rewrite.training_arguments says, or your own as optimizers=(optimizer, None)"
        )
    momentum = known is not None and bool(known.hyperparameters.get("momentum"))
    if known is not None and any(bool(group.get("momentum")) != momentum for group in optimizer.param_groups):
        raise DecisionError(
            f"the Trainer's {expected} has momentum {optimizer.param_groups[0]['momentum']}, and the plan was made "
            f"with {planned}: plan with {'sgd' if momentum else 'sgd-momentum'}, or leave optim_args out"
        )


def _budget(plan: Plan) -> str:
    return "the card" if plan.vram_bytes is None else format_size(plan.vram_bytes)
