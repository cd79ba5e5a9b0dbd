"""Compare, in the first training step, the rewritten model with the original one on the user's own weights and batch.

What it checks: activation checkpointing, segment checkpointing, offload and a chunked loss replace forwards of modules,
and must not change what the model computes. For a few samples of the first batch, the gradient of the rewritten model
is compared with that of the same model with its original forwards. Both are computed in full precision and with the
same random numbers (`accumulation_check.gradient_probe`). What the model and the loss function change is restored
afterwards.

Memory: the original forwards save more bytes for a sample than the rewritten ones. Only as many samples are compared as
fit into the memory that the plan promised; if no sample fits, a warning says so.

What it cannot see: the update of the optimizer, lower precision, differences below the bound of the comparison, and
differences that show in other samples only. `planner.rewrite.verify` compares all of these.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, final

import torch

from planner.errors import DecisionError
from planner.plan_types.decision_base import Role
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import format_size
from planner.plan_types.words import counted
from planner.rewrite.accumulation_check.gradient_probe import GradientProbe, ProbeResult, why_not_probed
from planner.rewrite.accumulation_check.side_effects import SideEffectGuard
from planner.rewrite.portable.batch_slicing import count_samples
from planner.rewrite.rewriting import Rewriting
from planner.rewrite.step_observer import StepObserver

logger = logging.getLogger(__name__)

_MAX_SAMPLES = 4
"""Maximum number of samples that are compared."""
REPLACE_FORWARDS = (Role.RECOMPUTE, Role.LOSS)
"""Roles of the decisions that replace forwards."""


@final
class FirstStepCheck(StepObserver):
    """Raises `DecisionError` before the first update if the rewritten model has another gradient than the original one.

    Args:
        plan: the plan that was applied.
        rewriting: the model and what was changed on it.
        optimizer: the optimizer that trains the model.
        loss_of: computes the loss of a batch with the model, without autocast.
    """

    def __init__(
        self,
        plan: Plan,
        rewriting: Rewriting,
        optimizer: torch.optim.Optimizer,
        loss_of: Callable[[Any], torch.Tensor],
    ) -> None:
        self._plan, self._rewriting, self._optimizer, self._loss_of = plan, rewriting, optimizer, loss_of
        self._kinds = [decision.kind for decision in plan.decisions if decision.role in REPLACE_FORWARDS]
        self.is_due = bool(self._kinds)
        """True until the first step was compared, or the comparison was found to be impossible."""

    def before_step(self, batch: Any) -> None:
        if not self.is_due:
            return
        self.is_due = False
        why_not = self._compare(batch)
        if why_not is not None:
            logger.warning(
                "the first step was not compared with the original model: %s. Compare copies by planner.rewrite.verify",
                why_not,
            )

    def after_error(self) -> None:
        self.is_due = bool(self._kinds)  # the next step is the first that trains

    def _compare(self, batch: Any) -> str | None:
        """Raises `DecisionError` if gradients differ. Returns the reason if none could be compared, else None."""
        rewriting = self._rewriting
        if (why_not := why_not_probed(rewriting.model, batch)) is not None:
            return why_not
        total = count_samples(batch, rewriting.batch_size, rewriting.not_by_sample)
        sample_bytes, free_bytes = self._sample_bytes(), self._free_bytes()
        samples = min(total, _MAX_SAMPLES, int(free_bytes // sample_bytes))
        if samples < 1:
            return (
                f"without the plan's decisions one sample takes up to {format_size(round(sample_bytes))}, and the plan "
                f"leaves {format_size(max(free_bytes, 0))}"
            )
        why_not = "the gradient is zero, or not finite"
        guard = SideEffectGuard(rewriting.model, rewriting.loss_fn)
        if guard.iterator is not None:
            held = guard.iterator
            return f"the model or the loss function holds an iterator ({held}), whose position cannot be restored"
        for in_training_mode in (True, False):  # BatchNorm refuses a single sample in training mode
            probe = GradientProbe(
                rewriting.model, batch, total, self._loss_of, lambda part, count: count, guard,
                in_training_mode=in_training_mode, not_by_sample=rewriting.not_by_sample,
                chunked_head=rewriting.chunked_head,
            )  # fmt: skip
            try:
                result = probe.compare_with(rewriting.original_forwards, torch.arange(samples))
            except Exception as error:  # raised by the model or its loss on few samples; training may work all the same
                why_not = f"{type(error).__name__}: {error}"
                continue
            if result is not None:
                self._refuse_difference(result)
                return None
        return why_not

    def _refuse_difference(self, result: ProbeResult) -> None:
        if result.is_off:
            raise DecisionError(
                f"the gradient of {counted(result.samples, 'sample')} differs by {result.error:.2%} between the "
                f"rewritten model and the original one: {' or '.join(self._kinds)} changes what the model computes. "
                'Forbid it in the plan, or turn this check off by apply(..., check="off")'
            )

    def _sample_bytes(self) -> float:
        """Upper bound on the bytes that a sample takes with the original forwards, from the baseline's peak."""
        baseline = self._plan.baseline.allocated_bytes - _bytes_of(self._rewriting.model.parameters())
        return max(1.0, baseline / self._plan.workload.batch_size)

    def _free_bytes(self) -> int:
        """Bytes that the plan promised and that parameters, gradients and optimizer state do not take now."""
        parameters = list(self._rewriting.model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        state = [
            value
            for values in self._optimizer.state.values()
            for value in values.values()
            if isinstance(value, torch.Tensor) and value.device.type != "cpu"
        ]
        return self._plan.peak.allocated_bytes - sum(map(_bytes_of, (parameters, gradients, state)))


def _bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors if tensor.layout is torch.strided)
