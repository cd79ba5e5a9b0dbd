"""Verify: the planned step is run beside the plain one, and what comes out is compared.

Each comparison holds one kind of decision against the sharpest thing that it can be held against:

| comparison | planned side | plain side | bound |
|---|---|---|---|
| as planned | the whole plan, dropout and all | a plain loop with the plan's rounding and order of sums | every bit |
| kept | the model while rewritten, and after `undo` | the model as it was | every object, key, mode and hook |
| overflow | a step in fp16 whose gradients are not finite | the same of the plain loop | every bit |
| freeze | the plan's first step, in double | the same loop, training everything | order of sums |
| in double | the plan without what rounds | the untouched step on the full batch | order of sums |
| rounding | the plan's first update | the untouched step | twice what autocast alone is off by |
| 8-bit state | the first update alone | the untouched optimizer | one quantization |

What runs in the same order gives the same bits: recompute, replay, the step in backward, an optimizer's loop, a frozen
prefix. Accumulation, a loss in chunks and a fused kernel only change the order of sums, which `parity.TERMS` roundings
bound; in double that is below 1e-12, and mistakes cannot hide in it. So the plain side of 'as planned' has those three
and the lower precision as well, and 'in double' and 'rounding' hold these against the step without any of them.

In double, an optimizer that divides by the size of a gradient makes a rounding error of a gradient that vanishes larger
by up to 1/eps of the optimizer: parameters and state have the bound times that, for gradients of the size found.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from planner.errors import DecisionError, PlanFileError, WorkloadError
from planner.plan_types.plan import Plan
from planner.rewrite.application import matched
from planner.rewrite.optimizers import OptimizerChoice
from planner.rewrite.parity.comparisons import comparisons, first_line
from planner.rewrite.parity.reference_step import deterministic, random_state_kept
from planner.rewrite.parity.result import Parity, Row, failed
from planner.rewrite.parity.runs import VerifyInputs
from planner.rewrite.portable.batch_slicing import map_tensors
from planner.rewrite.rewriting import LossWeight
from planner.workload.call_convention import LossFn
from planner.workload.torch_optimizers import has_step_hooks
from planner.workload.workload import batch_size_of


def verify(
    plan: Plan,
    model: torch.nn.Module,
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    optimizer: OptimizerChoice | None = None,
    max_grad_norm: float | None = None,
    loss_weight: LossWeight | None = None,
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    device: torch.device | str | None = None,
    steps: int = 3,
) -> Parity:
    """Train copies of `model` by the plan and without it, and compare losses, gradients, weights, buffers and state.

    Needs memory for a second model and the step as it is, in double for plans that change the order of sums: where the
    card has not got it, give `device="cpu"`. Sides run one after the other, and what was seen lies in host memory. The
    model, its optimizer and the random state stay as they are. Where the batch is split, what depends on how it is
    split is compared with plain micro-batches (dropout, batch normalisation), and left out against the full batch;
    another buffer that a forward changes by what it sees of the batch is held against the full batch, and fails.

    Args:
        plan: made for a model with these parameters.
        batch: with as many samples as planned.
        loss_fn, optimizer, max_grad_norm, loss_weight: as `apply` takes them.
        scheduler: as `apply` takes it, as a function: each side has an optimizer of its own.
        device: where to run; None: where the model is.
        steps: updates to compare.

    Returns:
        A `Parity` with one row for each quantity. A side that raises, gives no gradient, or is not finite, fails.

    Raises:
        PlanFileError: for another model or another batch size.
        WorkloadError: for another loss function or optimizer, and for a model without weights.
        DecisionError: when the model is rewritten already, or `steps` is not positive.
    """
    optimizer = matched(plan, model, optimizer, loss_fn)
    if steps < 1:
        raise DecisionError(f"verify over {steps} steps compares nothing: give at least 1")
    if batch_size_of(batch) != plan.workload.batch_size:
        raise PlanFileError(
            f"the plan is for batches of {plan.workload.batch_size} samples, this one has {batch_size_of(batch)}"
        )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise WorkloadError(f"{type(model).__name__} has no weights (device meta): load them, then verify")
    _refuse_a_rewritten_model(model)
    if isinstance(scheduler, LRScheduler):
        raise WorkloadError(
            f"{type(scheduler).__name__} is over one optimizer: give a function from one to a scheduler"
        )
    target, device = device, next(model.parameters()).device if device is None else torch.device(device)
    given = VerifyInputs(
        plan=plan, model=model, batch=map_tensors(lambda t: t.to(device), batch), device=device, loss_fn=loss_fn,
        is_moved=target is not None, optimizer=optimizer, max_grad_norm=max_grad_norm, loss_weight=loss_weight,
        scheduler=scheduler, steps=steps,
    )  # fmt: skip
    rows, notes = [], []
    if isinstance(optimizer, torch.optim.Optimizer) and has_step_hooks(optimizer):
        notes.append(f"the step hooks of {type(optimizer).__name__} did not run")
    with random_state_kept(device), deterministic(device), _gradients_kept(model, rows):
        for name, comparison in comparisons(plan).items():
            try:
                rows += comparison(name, given, notes)
            except Exception as error:  # a comparison that cannot be made is one that failed, whatever the reason
                rows.append(failed(name, "run", "comparison", f"could not run: {first_line(error)}"))
    return Parity(rows=tuple(rows), notes=tuple(dict.fromkeys(notes)))


@contextlib.contextmanager
def _gradients_kept(model: torch.nn.Module, rows: list[Row]) -> Iterator[None]:
    """A loss function or hook that holds on to the model itself trains that, not the copies: told, and taken back."""
    before = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    try:
        yield
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                why = "the model itself got a gradient: its loss function or a hook reads it, not what it is given"
                rows.append(failed("as planned", "run", name, why))
    finally:
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            parameter.grad = gradient


def _refuse_a_rewritten_model(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        function = getattr(vars(module).get("forward"), "__func__", None)
        if isinstance(function, types.FunctionType) and function.__globals__["__name__"].startswith("planner.rewrite."):
            raise DecisionError(
                f"the forward of '{name}' is rewritten already: undo() first, verify applies the plan to copies"
            )
