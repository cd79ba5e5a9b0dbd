"""The two sides of a comparison: the planned step and the plain one, each on a copy of the model."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

from planner.calling import Calling, LossFn
from planner.decisions import Decision, Freeze, Precision
from planner.plan_file import Plan
from planner.workload import OptimizerBlueprint
from rewrite.apply import Rewritten, apply_decisions
from rewrite.optimizers import OptimizerChoice
from rewrite.plain_step import PlainStep, Run, watch
from rewrite.rewriting import LossWeight
from rewrite.rules.accumulation import map_tensors

OVERFLOWS = 24
"""Steps that a gradient scaler may skip: it begins at 2^16 and halves, and fp16 ends at 2^-24."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
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
    steps: int

    def side(
        self, decisions: tuple[Decision, ...], *, double: bool = False, trained: bool = True
    ) -> tuple[torch.nn.Module, Rewritten]:
        """A copy of the model, and it rewritten by decisions. `trained=False`: frozen as planned, but by hand."""
        model = copy.deepcopy(self.model)
        model = model.to(self.device) if self.is_moved else model
        model.zero_grad()
        model = model.double() if double else model
        for module in model.modules():
            if getattr(getattr(module, "config", None), "use_cache", False):
                module.config.use_cache = False
        freeze = self.plan.decision(Freeze)
        if freeze is not None and not trained:
            for name in freeze.modules:
                model.get_submodule(name).requires_grad_(False)
        optimizer = self.optimizer
        if isinstance(optimizer, torch.optim.Optimizer):
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = OptimizerBlueprint.of(optimizer, self.model).over(model)
            if state["state"]:
                optimizer.load_state_dict(state)
        rewritten = apply_decisions(
            decisions, model, optimizer=optimizer, calling=Calling[self.plan.workload.calling],
            batch_size=self.plan.workload.batch_size, loss_fn=self.loss_fn, max_grad_norm=self.max_grad_norm,
            loss_weight=self.loss_weight,
        )  # fmt: skip
        return model, rewritten

    def planned(
        self, decisions: tuple[Decision, ...], *, double: bool = False, split: bool = False, updates: int
    ) -> Run:
        """The rewritten step. `split`: the batch is, so that no sample may depend on others."""
        model, rewritten = self.side(decisions, double=double)
        _take_apart(model, split)
        batch = _in_double(self.batch) if double else self.batch
        scaler = rewritten.step.scaler
        return watch(
            rewritten.step, model, rewritten.optimizer, batch, updates=updates,
            calls=updates + (OVERFLOWS if scaler else 0), scaler=scaler,
        )  # fmt: skip

    def plain(
        self,
        decisions: tuple[Decision, ...] = (),
        *,
        precision: Precision | None = None,
        trained: bool = False,
        double: bool = False,
        split: bool = False,
        updates: int,
    ) -> Run:
        """The plain loop over the model with decisions that change the order of sums, and under a precision."""
        model, rewritten = self.side(decisions, double=double, trained=trained)
        _take_apart(model, split)
        fp16 = precision is not None and precision.dtype == "fp16"
        scaler = torch.amp.GradScaler(self.device.type) if fp16 else None
        step = PlainStep(
            model=model, optimizer=rewritten.optimizer, calling=Calling[self.plan.workload.calling],
            loss_fn=self.loss_fn, max_grad_norm=self.max_grad_norm, scaler=scaler, parts=rewritten.step._split,
            autocast_dtype=lower_dtype(precision) if precision else None,
        )  # fmt: skip
        batch = _in_double(self.batch) if double else self.batch
        calls = updates + (OVERFLOWS if scaler else 0)
        return watch(step, model, rewritten.optimizer, batch, updates=updates, calls=calls, scaler=scaler)


def lower_dtype(precision: Precision) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[precision.dtype]


def _in_double(batch: Any) -> Any:
    return map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, batch)


def _take_apart(model: torch.nn.Module, split: bool) -> None:
    """Where a batch is split: nothing of a sample may depend on the others, as far as modules say so."""
    for module in model.modules() if split else ():
        if isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.track_running_stats:
            module.eval()
        elif isinstance(module, torch.nn.RNNBase):
            module.dropout = 0.0
