"""The two sides of a comparison: the planned step and the plain one, each on a copy of the model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from planner.plan_types.decision_base import Decision, frozen_modules_of
from planner.plan_types.plan import Plan
from planner.rewrite.application import Rewritten, apply_decisions
from planner.rewrite.optimizers import OptimizerChoice
from planner.rewrite.parity.reference_step import ReferenceStep, StepTrace, trace_steps
from planner.rewrite.portable.batch_slicing import map_tensors
from planner.rewrite.rewriting import LossWeight
from planner.workload.call_convention import Calling, LossFn
from planner.workload.workload import OptimizerBlueprint

OVERFLOWS = 24
"""Steps that a gradient scaler may skip: it begins at 2^16 and halves, and fp16 ends at 2^-24."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyInputs:
    """What `verify` was given, with the batch on the device."""

    plan: Plan
    model: torch.nn.Module
    batch: Any
    device: torch.device
    is_moved: bool
    """Whether copies go to the device as a whole; else they stay where the model lies, on one device or several."""
    loss_fn: LossFn | None
    optimizer: OptimizerChoice
    max_grad_norm: float | None
    loss_weight: LossWeight | None
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None
    steps: int

    def copied(self, *, double: bool = False, trained: bool = True) -> torch.nn.Module:
        """A copy of the model on the device. `trained=False`: frozen as planned, but by hand."""
        model = copy.deepcopy(self.model, _made_by_forwards(self.model))
        model = model.to(self.device) if self.is_moved else model
        model.zero_grad()
        model = model.double() if double else model
        for module in model.modules():
            if getattr(getattr(module, "config", None), "use_cache", False):
                module.config.use_cache = False
        if not trained:
            for name in frozen_modules_of(self.plan.decisions):
                model.get_submodule(name).requires_grad_(False)
        return model

    def rewritten(self, model: torch.nn.Module, decisions: tuple[Decision, ...]) -> Rewritten:
        """A copy rewritten by decisions, with a copy of the optimizer."""
        optimizer = self.optimizer
        if isinstance(optimizer, torch.optim.Optimizer):
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = OptimizerBlueprint.of(optimizer, self.model).over(model)
            if state["state"]:
                optimizer.load_state_dict(state)
        return apply_decisions(
            decisions, model, optimizer=optimizer, calling=Calling[self.plan.workload.calling],
            batch_size=self.plan.workload.batch_size, loss_fn=self.loss_fn, max_grad_norm=self.max_grad_norm,
            loss_weight=self.loss_weight, scheduler=self.scheduler,
        )  # fmt: skip

    def fresh(self, *, double: bool = False) -> Any:
        """A copy of the batch: a model may write to its inputs, and the other side must not see it."""

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            copy = tensor.detach().clone()
            copy = copy.double() if double and copy.is_floating_point() else copy
            return copy.requires_grad_(tensor.requires_grad)

        return map_tensors(copied, self.batch)

    def planned(
        self,
        decisions: tuple[Decision, ...],
        *,
        double: bool = False,
        split: bool = False,
        scale: float | None = None,
        updates: int,
    ) -> StepTrace:
        """The rewritten step. `split`: the batch is, so that no sample may depend on others."""
        model = self.copied(double=double)
        rewritten = self.rewritten(model, decisions)
        _decouple_samples(model, split)
        scaler = rewritten.step.scaler
        return self._watched(rewritten.step, model, rewritten.optimizer, scaler, scale, double=double, updates=updates)

    def plain(
        self,
        decisions: tuple[Decision, ...] = (),
        *,
        precision: str | None = None,
        trained: bool = False,
        double: bool = False,
        split: bool = False,
        scale: float | None = None,
        updates: int,
    ) -> StepTrace:
        """The plain loop over the model with decisions that change the order of sums, and under a precision."""
        model = self.copied(double=double, trained=trained)
        rewritten = self.rewritten(model, decisions)
        _decouple_samples(model, split)
        scaler = torch.amp.GradScaler(self.device.type) if precision == "fp16" else None
        step = ReferenceStep(
            model=model, optimizer=rewritten.optimizer, calling=Calling[self.plan.workload.calling],
            loss_fn=self.loss_fn, max_grad_norm=self.max_grad_norm, scaler=scaler, parts=rewritten.step._split,
            autocast_dtype=lower_dtype(precision) if precision else None, scheduler=rewritten.step.scheduler,
        )  # fmt: skip
        return self._watched(step, model, rewritten.optimizer, scaler, scale, double=double, updates=updates)

    def _watched(self, step, model, optimizer, scaler, scale, *, double: bool, updates: int) -> StepTrace:
        """`scale`: take one step at this scale of the loss, instead of as many as make the updates."""
        calls = updates + (OVERFLOWS if scaler else 0)
        if scale is not None:
            scaler.load_state_dict({**scaler.state_dict(), "scale": scale})
            calls = 1
        batch = self.fresh(double=double)
        return trace_steps(step, model, optimizer, batch, updates=updates, calls=calls, scaler=scaler)


def lower_dtype(precision: str) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def _made_by_forwards(model: torch.nn.Module) -> dict[int, torch.Tensor]:
    """For `copy.deepcopy`, which refuses tensors with a graph: what `torch.nn.utils.weight_norm` leaves on modules."""
    values = (value for module in model.modules() for value in vars(module).values())
    made = (value for value in values if isinstance(value, torch.Tensor) and not value.is_leaf)
    return {id(value): value.detach().clone() for value in made}


def _decouple_samples(model: torch.nn.Module, split: bool) -> None:
    """Where a batch is split: nothing of a sample may depend on the others, as far as modules say so."""
    for module in model.modules() if split else ():
        if isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.track_running_stats:
            module.eval()
        elif isinstance(module, torch.nn.RNNBase):
            module.dropout = 0.0
