"""Verify: train copies of a model with the plan and without it, and compare the results.

Each comparison checks one kind of decision against the strictest reference that it can match:

| comparison | planned run | reference run | bound |
|---|---|---|---|
| as planned | the whole plan, with dropout | a plain loop with the plan's precision and order of sums | equal bits |
| kept | the model while rewritten, and after `undo` | the model before `apply` | every object, key, mode and hook |
| overflow | an fp16 step whose gradients overflow | the same step in the plain loop | equal bits |
| freeze | the plan's first step, in double | the plain loop, without frozen modules | order of sums |
| in double | the plan without lower precision and 8-bit state | the baseline on the full batch | order of sums |
| rounding | the plan's first update | the baseline | twice the error of autocast alone |
| 8-bit state | the first update | the baseline with the original optimizer | one quantization |

Decisions that keep the order of all sums give equal bits: recomputing modules or segments, a step in backward, the
for-loop kernel of an optimizer, a frozen prefix. Accumulation, a chunked loss and a fused kernel change the order of
sums. The difference is at most `result.TERMS` rounding errors; in double that is below 1e-12, so a mistake would exceed
it. The reference step of 'as planned' therefore has these three decisions and the lower precision as well. 'in double'
and 'rounding' compare the plan with a step that has none of them.

An optimizer that divides by the size of a gradient amplifies the rounding error of a vanishing gradient by up to 1/eps.
In double, the bound on parameters and state is multiplied by that factor, for gradients of the size that occurred
(`StepTrace.growth`).
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.optim.lr_scheduler import LRScheduler

from planner.errors import DecisionError, PlanFileError, WorkloadError
from planner.plan_types.plan import Plan
from planner.plan_types.words import counted
from planner.rewrite.application import matched
from planner.rewrite.optimizers import OptimizerChoice
from planner.rewrite.parity.comparisons import comparisons, first_line
from planner.rewrite.parity.own_step import own_step_rows
from planner.rewrite.parity.reference_step import deterministic, random_state_kept
from planner.rewrite.parity.result import Parity, Row, failed
from planner.rewrite.parity.runs import VerifyInputs
from planner.rewrite.portable.batch_slicing import map_tensors
from planner.rewrite.rewriting import LossWeight
from planner.workload.call_convention import LossFn, StepFn
from planner.workload.optimizer_choice import Optimizers
from planner.workload.own_step import as_module
from planner.workload.torch_optimizers import has_step_hooks
from planner.workload.workload import batch_size_of, tensors_of


def verify(
    plan: Plan,
    model: torch.nn.Module | Mapping[str, torch.nn.Module],
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    step: StepFn | None = None,
    optimizer: Optimizers | None = None,
    max_grad_norm: float | None = None,
    loss_weight: LossWeight | None = None,
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    device: torch.device | str | None = None,
    steps: int = 3,
) -> Parity:
    """Train copies of `model` with the plan and without it, and compare losses, gradients, weights, buffers and state.

    This needs memory for a second model and for the baseline step, in double for plans that change the order of sums:
    if the card has too little, pass `device="cpu"`. The two runs of a comparison run one after the other, and their
    results are kept in host memory. The model, its optimizer and the state of random number generators do not change.

    If the plan splits the batch, layers that depend on the split (dropout, batch normalization) are compared with the
    same micro-batches in a plain loop, and switched off in the comparison with the full batch. Any other buffer that a
    forward computes from the batch is compared with the full batch, and fails.

    Args:
        plan: a plan that was made for a model with the same names, shapes and dtypes of parameters.
        batch: a batch with the planned number of samples.
        loss_fn, step, optimizer, max_grad_norm, loss_weight: as for `apply`. A step of your own is compared with the
            same step on the original modules, with the plan's optimizers and frozen modules.
        scheduler: a function that takes an optimizer and returns a scheduler, since each run has its own optimizer.
        device: the device to run on; None: the model's device.
        steps: number of updates to compare.

    Returns:
        A `Parity` with one row per quantity. A row fails also if its run raises an error, produces no gradient or is
        not finite.

    Raises:
        PlanFileError: if the plan is for another model or another batch size.
        WorkloadError: if step, loss function or optimizer are not those of the plan, or the model has no weights.
        DecisionError: if the model is rewritten already, or `steps` is not positive.
    """
    model = as_module(model)
    choice = matched(plan, model, optimizer, loss_fn, step)
    if steps < 1:
        raise DecisionError(f"steps={steps}: there is nothing to compare without a step; give at least 1")
    if (step is None or any(tensors_of(batch))) and batch_size_of(batch) != plan.workload.batch_size:
        raise PlanFileError(
            f"the plan is for batches of {counted(plan.workload.batch_size, 'sample')}, this one has "
            f"{batch_size_of(batch)}: give a batch of the planned size, or make the plan again"
        )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise WorkloadError(f"{type(model).__name__} has no weights (device meta): load its weights first")
    _refuse_a_rewritten_model(model)
    if isinstance(scheduler, LRScheduler):
        raise WorkloadError(
            f"{type(scheduler).__name__} belongs to one optimizer, and each run has its own: pass a function that "
            "takes an optimizer and returns a scheduler, such as scheduler=lambda optimizer: ..."
        )
    target, device = device, next(model.parameters()).device if device is None else torch.device(device)
    if step is not None:
        if (max_grad_norm, loss_weight, scheduler) != (None, None, None):
            raise WorkloadError("your step does that itself: leave max_grad_norm, loss_weight and scheduler out")
        own_rows: list[Row] = []
        batch = map_tensors(lambda t: t.to(device), batch)
        with random_state_kept(device), deterministic(device), _gradients_kept(model, own_rows):
            own_rows += own_step_rows(plan, model, batch, step=step, optimizer=choice, device=device, steps=steps)
        return Parity(rows=tuple(own_rows), notes=(NOT_COMPARED,))
    inputs = VerifyInputs(
        plan=plan, model=model, batch=map_tensors(lambda t: t.to(device), batch), device=device, loss_fn=loss_fn,
        is_moved=target is not None, optimizer=cast(OptimizerChoice, choice), max_grad_norm=max_grad_norm,
        loss_weight=loss_weight, scheduler=scheduler, steps=steps,
    )  # fmt: skip
    rows: list[Row] = []
    notes: list[str] = []
    if isinstance(optimizer, torch.optim.Optimizer) and has_step_hooks(optimizer):
        notes.append(f"the step hooks of {type(optimizer).__name__} did not run")
    with random_state_kept(device), deterministic(device), _gradients_kept(model, rows):
        for name, comparison in comparisons(plan).items():
            try:
                rows += comparison(name, inputs, notes)
            except Exception as error:  # whatever the reason, what was not compared has not passed
                rows.append(failed(name, "run", "comparison", f"could not run: {first_line(error)}"))
    return Parity(rows=tuple(rows), notes=tuple(dict.fromkeys(notes)))


NOT_COMPARED = "the step is your own: both trainings had the plan's optimizers, and losses were not compared"
"""Note for a step of the user's own."""


@contextlib.contextmanager
def _gradients_kept(model: torch.nn.Module, rows: list[Row]) -> Iterator[None]:
    """Restore the gradients of the user's model at the end, and add a failed row for each gradient that the runs set.

    The runs train copies. But a loss function or hook that refers to the model, instead of to its arguments, sets
    gradients of the model itself.
    """
    before = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    try:
        yield
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                why = "the model itself got a gradient: a loss function or hook refers to it, not to its arguments"
                rows.append(failed("as planned", "run", name, why))
    finally:
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            parameter.grad = gradient


def _refuse_a_rewritten_model(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        function = getattr(vars(module).get("forward"), "__func__", None)
        if isinstance(function, types.FunctionType) and function.__globals__["__name__"].startswith("planner.rewrite."):
            raise DecisionError(
                f"the forward of '{name}' is rewritten already: undo() first, because verify applies the plan to "
                "copies of the model"
            )
