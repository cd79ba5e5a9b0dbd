"""The two runs of a comparison: the planned step and the reference step, each on its own copy of the model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from planner.errors import DecisionError
from planner.plan_types.decision_base import Decision, frozen_modules_of
from planner.plan_types.plan import Plan
from planner.rewrite.application import Rewritten, apply_decisions
from planner.rewrite.optimizers import OptimizerChoice
from planner.rewrite.parity.function_copy import copy_of_function
from planner.rewrite.parity.reference_step import ReferenceStep, StepTrace, trace_steps
from planner.rewrite.portable.batch_slicing import map_tensors
from planner.rewrite.rewriting import LossWeight
from planner.rewrite.step import TrainingStep
from planner.workload.call_convention import Calling, LossFn
from planner.workload.optimizer_choice import OptimizerBlueprint

OVERFLOWS = 24
"""Maximum number of steps that a gradient scaler may skip. Each skip halves its scale, from 2^16 to 2^-8 after 24."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyInputs:
    """The arguments of `verify`, with the batch on the device."""

    plan: Plan
    model: torch.nn.Module
    batch: Any
    device: torch.device
    is_moved: bool
    """True to move copies of the model to `device`; False to leave them on the device or devices of the model."""
    loss_fn: LossFn | None
    optimizer: OptimizerChoice
    max_grad_norm: float | None
    loss_weight: LossWeight | None
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None
    steps: int

    def copied(self, *, double: bool = False, trained: bool = True) -> torch.nn.Module:
        """Return a copy of the model on the device.

        Args:
            double: convert the copy to double.
            trained: True to freeze no module; False to freeze the modules that the plan freezes, by `requires_grad_`
                and not by the plan's rule.
        """
        memo: dict[int, Any] = dict(_copies_of_non_leaves(self.model))
        model = copy.deepcopy(self.model, memo)
        _copy_hooks(model, memo)
        model = model.to(self.device) if self.is_moved else model
        model.zero_grad()
        model = model.double() if double else model
        for module in model.modules():
            config = getattr(module, "config", None)
            if config is not None and getattr(config, "use_cache", False):
                config.use_cache = False
        if not trained:
            for name in frozen_modules_of(self.plan.decisions):
                model.get_submodule(name).requires_grad_(False)
        return model

    def rewritten(self, model: torch.nn.Module, decisions: tuple[Decision, ...]) -> Rewritten:
        """Apply decisions to a copy of the model (`model`), with a copy of the optimizer."""
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
            not_by_sample=self.plan.workload.not_by_sample,
        )  # fmt: skip

    def fresh(self, *, double: bool = False) -> Any:
        """Return a copy of the batch: a model may write to its inputs, and the other run must not see that."""

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            clone = tensor.detach().clone()
            clone = clone.double() if double and clone.is_floating_point() else clone
            return clone.requires_grad_(tensor.requires_grad)

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
        """Run the rewritten step on a copy of the model, and return its results.

        Args:
            decisions: the decisions to apply.
            double: run in double.
            split: True to switch off layers that depend on how the batch is split (`_decouple_samples`).
            scale: run a single step at this scale of the gradient scaler; None to run steps until there are `updates`.
            updates: number of updates after which to stop.
        """
        model = self.copied(double=double)
        rewritten = self.rewritten(model, decisions)
        _decouple_samples(model, split)
        assert isinstance(rewritten.step, TrainingStep)  # `verify` refuses a step of the user's own
        scaler = rewritten.step.scaler
        return self._traced(rewritten.step, model, rewritten.optimizer, scaler, scale, double=double, updates=updates)

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
        """Run the reference step on a copy of the model, and return its results.

        Args:
            decisions: decisions that are applied to the model, so that the order of sums is the same as with the plan.
            precision: 'bf16' or 'fp16' for autocast, with a gradient scaler for fp16; None for no autocast.
            trained: True to train also the modules that the plan freezes.
            double, split, scale, updates: as for `planned`.
        """
        model = self.copied(double=double, trained=trained)
        rewritten = self.rewritten(model, decisions)
        _decouple_samples(model, split)
        scaler = torch.amp.GradScaler(self.device.type) if precision == "fp16" else None
        assert isinstance(rewritten.step, TrainingStep)
        step = ReferenceStep(
            model=model, optimizer=rewritten.optimizer, calling=Calling[self.plan.workload.calling],
            loss_fn=self.loss_fn, max_grad_norm=self.max_grad_norm, scaler=scaler, parts=rewritten.step._split,
            autocast_dtype=lower_dtype(precision) if precision else None, scheduler=rewritten.step.scheduler,
        )  # fmt: skip
        return self._traced(step, model, rewritten.optimizer, scaler, scale, double=double, updates=updates)

    def _traced(
        self,
        step: Callable[[Any], torch.Tensor],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        scale: float | None,
        *,
        double: bool,
        updates: int,
    ) -> StepTrace:
        calls = updates + (OVERFLOWS if scaler else 0)
        if scale is not None:
            if scaler is None:
                raise DecisionError("a step at a given loss scale needs a gradient scaler, but this step has none")
            scaler.load_state_dict({**scaler.state_dict(), "scale": scale})
            calls = 1
        batch = self.fresh(double=double)
        return trace_steps(step, model, optimizer, batch, updates=updates, calls=calls, scaler=scaler)


def lower_dtype(precision: str) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def _copies_of_non_leaves(model: torch.nn.Module) -> dict[int, torch.Tensor]:
    """Return a memo with copies of the model's non-leaf tensors, for `copy.deepcopy`, which refuses such tensors.

    They are attributes that a forward has set, for example by `torch.nn.utils.weight_norm`.
    """
    values = (value for module in model.modules() for value in vars(module).values())
    non_leaves = (value for value in values if isinstance(value, torch.Tensor) and not value.is_leaf)
    return {id(value): value.detach().clone() for value in non_leaves}


def _copy_hooks(model: torch.nn.Module, memo: dict[int, Any]) -> None:
    """Replace the hooks of a copied model with copies, so that they share no state with those of the model.

    Args:
        memo: the memo with which the model was copied.
    """
    for module in model.modules():
        for hooks in (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._backward_pre_hooks,
            module._backward_hooks,
        ):
            hooks.update([(key, copy_of_function(hook, memo)) for key, hook in hooks.items()])


def _decouple_samples(model: torch.nn.Module, split: bool) -> None:
    """If `split`, change layers whose results depend on the other samples or on how the batch is split.

    Batch normalization then uses its running statistics, and recurrent layers have no dropout. (`Comparable` switches
    all other dropout off.)
    """
    for module in model.modules() if split else ():
        if isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.track_running_stats:
            module.eval()
        elif isinstance(module, torch.nn.RNNBase):
            module.dropout = 0.0
