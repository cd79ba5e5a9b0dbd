"""Check that transformers' `Trainer` follows a plan: its arguments, its batches, and the memory of its first steps."""

from __future__ import annotations

import logging
import math
from typing import Any, Literal, final

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from planner.errors import DecisionError, PlanFileError, PromiseError, WorkloadError
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import format_size
from planner.rewrite.first_step_check import FirstStepCheck
from planner.rewrite.memory_promise import LOOP_BYTES, Promise, measured_promise
from planner.rewrite.recompute_observer import refuse_difference
from planner.rewrite.trainer.apply import RewrittenForTrainer
from planner.rewrite.trainer.arguments import arguments_of, micro_batches, refuse_contradictions
from planner.rewrite.trainer.loss_weighting import COUNT, uneven_micro_batches
from planner.workload.optimizer_choice import OPTIMIZERS, optimizer_name
from planner.workload.workload import described

logger = logging.getLogger(__name__)


@final
class PlanCallback(TrainerCallback):
    """Refuses arguments, a model, an optimizer or batches that do not match the plan, and checks the plan's promise.

    See `trainer_callback`. Use one object per Trainer.

    Attributes:
        promise: the result of the memory check; None until `steps` steps are done.
    """

    def __init__(self, rewritten: RewrittenForTrainer, *, steps: int, on_broken: Literal["warn", "raise"]) -> None:
        self.rewritten = rewritten
        self.steps = steps
        self.on_broken = on_broken
        self.promise: Promise | None = None
        self._seen_steps = 0
        """Number of optimizer steps so far, up to `steps`."""
        self._warned_topics: set[str] = set()
        self._hooks: list[Any] = []
        self._first_step: FirstStepCheck | None = None
        self._latest_inputs: dict[str, Any] | None = None
        """Arguments of the latest forward; None after the first step was compared."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **objects: Any,
    ) -> None:
        """Refuse what does not match the plan, and start to watch batches and memory."""
        plan, model, optimizer = self.rewritten.plan, objects["model"], objects["optimizer"]
        self._refuse_another_model(model)
        refuse_contradictions(plan, arguments_of(args))
        devices = max(args.n_gpu, 1) * args.world_size
        if devices > 1:
            raise DecisionError(
                f"the Trainer would train on {devices} devices, and the plan is for one: set CUDA_VISIBLE_DEVICES=0"
            )
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        refuse_another_optimizer(plan, optimizer)
        self.rewritten.use_kernel(optimizer)
        self._seen_steps, self.promise = 0, None
        self._warned_topics.clear()
        self._remove_hooks()
        self._hooks = [model.register_forward_pre_hook(self._check_batch, with_kwargs=True)]
        self.rewritten.add_hook(self._hooks[0])
        if self.rewritten.share is not None:
            if not self.rewritten.share.labelled:
                refuse_uneven_micro_batches(args, state, objects.get("train_dataloader"))
            if self.rewritten.makes_checks:
                self.rewritten.share.start_checking()
        self._first_step = self.rewritten.first_step_check(optimizer)
        if args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(args.device)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start the check of recomputed modules in this step."""
        if self.rewritten.recompute_check is not None:
            self.rewritten.recompute_check.begin_step()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Check recomputed modules and the weights of the micro-batches before their gradients are used."""
        if self.rewritten.recompute_check is not None:
            refuse_difference(self.rewritten.recompute_check)
        inputs, self._latest_inputs = self._latest_inputs, None
        if self._first_step is not None and inputs is not None:
            self._first_step.before_step(inputs)
        if self.rewritten.share is not None:
            self.rewritten.share.refuse_another_loss()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """After step number `steps`: stop checking weights, and compare the peaks with the promise."""
        if self._seen_steps >= self.steps:
            return
        self._seen_steps += 1
        if self._seen_steps < self.steps:
            return
        if self.rewritten.share is not None:
            self.rewritten.share.stop_checking()
        self.promise = measured_promise(self.rewritten.plan, args.device, own_bytes=_own_bytes(self.rewritten.plan))
        if self.promise.kept:
            logger.info("%s", self.promise)
        elif self.promise.kept is None:
            logger.warning("%s", self.promise)
        else:
            self._report_broken(f"{self.promise}; plan with less than the budget of {_budget(self.rewritten.plan)}")

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Refuse an epoch that ends with part of a batch: the Trainer would add its gradients to the next epoch's."""
        share = self.rewritten.share
        if share is not None and share.pending_micro_batches and state.global_step < state.max_steps:
            raise DecisionError(
                f"an epoch ended after {share.pending_micro_batches} of the {args.gradient_accumulation_steps} "
                "micro-batches of a step, and the Trainer would add their gradients to those of the next step: give "
                "the stream a number of samples that makes up whole batches, or plan with accumulation forbidden"
            )

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Remove the hooks. Warn if training ended before memory was measured."""
        self._remove_hooks()
        if self.promise is None:
            logger.warning(
                "the plan's promise could not be measured: training ended after %d of the %d steps that are measured",
                self._seen_steps, self.steps,
            )  # fmt: skip

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _refuse_another_model(self, model: torch.nn.Module) -> None:
        if not self.rewritten.is_applied:
            raise DecisionError("the plan was undone on this model: apply it again before training")
        if model is not self.rewritten.module:
            raise PlanFileError(
                "the Trainer trains another model object than the one that the plan was applied to: pass the rewritten "
                "model as model=, and do not pass model_init"
            )

    def _check_batch(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Refuse a batch that is larger than planned, and warn if it has other tensors than planned."""
        if not (model.training and torch.is_grad_enabled()):
            return
        if self._first_step is not None and self._first_step.is_due:
            self._latest_inputs = {name: value for name, value in kwargs.items() if name != COUNT}
        plan = self.rewritten.plan
        tensors = {path: (shape, dtype) for path, shape, dtype in described(kwargs) if path != COUNT}
        larger = larger_than_planned(plan, tensors)
        if larger and self._seen_steps < self.steps:
            raise WorkloadError(f"{larger}: make the plan again for the largest batch")
        if larger:
            self._report_broken(f"{larger}: nothing was promised for it, so make the plan again for the largest batch")
        planned = {path for path, _, _ in plan.workload.batch}
        if tensors.keys() != planned and "names" not in self._warned_topics:
            self._warned_topics.add("names")
            logger.warning(
                "the batch has %s, and the plan was made for %s, so that memory may differ from the plan: make the "
                "plan again with such a batch (planner.plan(model, batch))",
                ", ".join(sorted(tensors)), ", ".join(sorted(planned)),
            )  # fmt: skip

    def _report_broken(self, message: str) -> None:
        """Raise a `PromiseError`, or log each message once as a warning, as `on_broken` says."""
        if self.on_broken == "raise":
            raise PromiseError(message)
        if message not in self._warned_topics:
            self._warned_topics.add(message)
            logger.warning("%s", message)


def refuse_uneven_micro_batches(args: TrainingArguments, state: TrainerState, loader: Any) -> None:
    """Raise `DecisionError` if the last batch of an epoch would be split into micro-batches of several sizes.

    If the length of the data is not known, `LossWeighting` refuses such a batch when it arrives.
    """
    try:
        samples, parts = len(loader.dataset), len(loader)
    except (AttributeError, TypeError):
        return
    size, parts_per_step = args.per_device_train_batch_size, args.gradient_accumulation_steps
    samples_in_last_part, parts_in_last_step = samples % size, parts % parts_per_step or parts_per_step
    keeps_last_part = parts == -(-samples // size)
    reaches_last_step = state.max_steps >= -(-parts // parts_per_step)
    if keeps_last_part and samples_in_last_part and parts_in_last_step > 1 and reaches_last_step:
        raise DecisionError(uneven_micro_batches([size] * (parts_in_last_step - 1) + [samples_in_last_part]))


def _own_bytes(plan: Plan) -> int:
    """Return the bytes that the Trainer may allocate in addition to the promise: 64 KiB, and one byte per label."""
    return LOOP_BYTES + sum(math.prod(shape) for path, shape, _ in plan.workload.batch if path == "labels")


def larger_than_planned(plan: Plan, tensors: dict[str, tuple[tuple[int, ...], str]]) -> str | None:
    """Describes the first tensor of a micro-batch that is larger than planned or of another dtype.

    Returns None if all tensors are as planned or smaller.

    Args:
        tensors: shape and dtype of each tensor, by its path in the batch.
    """
    samples, (size, _) = plan.workload.batch_size, micro_batches(plan)
    for path, planned, dtype in plan.workload.batch:
        if path not in tensors:
            continue
        limit = tuple(size if axis == 0 and length == samples else length for axis, length in enumerate(planned))
        shape, own_dtype = tensors[path]
        fits = len(shape) == len(limit) and all(length <= most for length, most in zip(shape, limit, strict=True))
        if not fits or own_dtype != dtype:
            return f"'{path}' is {list(shape)} of {own_dtype}, and the plan is for {list(limit)} of {dtype} at most"
    return None


def _keeps_state_like(optimizer: torch.optim.Optimizer, name: str) -> bool:
    """True if an optimizer of bitsandbytes has the algorithm, the paging and the bits of a name like 'paged_lion_8bit'.

    The Trainer takes one class for each algorithm, and sets the rest by arguments.
    """
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", None)
    algorithm = name.removeprefix("paged_").partition("_")[0]
    return (
        algorithm in type(optimizer).__name__.lower()
        and getattr(optimizer, "is_paged", None) == name.startswith("paged_")
        and f"_{bits}bit" in name
    )


def refuse_another_optimizer(plan: Plan, optimizer: torch.optim.Optimizer) -> None:
    """Raise `DecisionError` if the optimizer's class, the precision of its state or its momentum is not as planned."""
    planned = plan.workload.optimizer
    if any(decision.eight_bit_state for decision in plan.decisions):
        bits = getattr(getattr(optimizer, "args", None), "optim_bits", None)
        if bits != 8 or "adam" not in type(optimizer).__name__.lower():
            raise DecisionError(
                f"the Trainer's optimizer is {optimizer_name(optimizer)}, and the plan has 8-bit AdamW: give the "
                "Trainer optim='adamw_bnb_8bit', as rewrite.training_arguments does"
            )
        return
    known = OPTIMIZERS.get(planned)
    expected = known.path if known is not None else planned
    accepted = {expected.rpartition(".")[2], *(["AdamW"] if planned == "adam" else [])}
    if known is not None and known.library == "bitsandbytes":
        is_planned = _keeps_state_like(optimizer, planned)
    else:
        is_planned = type(optimizer).__name__ in accepted
    if not is_planned:
        raise DecisionError(
            f"the Trainer's optimizer is {optimizer_name(optimizer)}, and the plan was made with {planned}: give the "
            "Trainer the arguments of rewrite.training_arguments, or your own optimizer as optimizers=(optimizer, None)"
        )
    momentum = known is not None and bool(known.hyperparameters.get("momentum"))
    if known is not None and any(bool(group.get("momentum")) != momentum for group in optimizer.param_groups):
        raise DecisionError(
            f"the Trainer's {expected} has momentum {optimizer.param_groups[0]['momentum']}, and the plan was made "
            f"with {planned}: plan with optimizer {'sgd' if momentum else 'sgd-momentum'}, or leave optim_args out"
        )


def _budget(plan: Plan) -> str:
    """Return text for a message: the memory that the plan was made for."""
    return "the card" if plan.vram_bytes is None else format_size(plan.vram_bytes)
