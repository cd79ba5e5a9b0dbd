"""Check that training with micro-batches gives the same gradients as the whole batch, before parameters are updated.

A training step uses `AccumulationCheck`, which makes two checks:

1. `ReductionWatcher` checks the weights of the micro-batches. If the loss is a mean over labels, for example, the
   weight of a micro-batch has to be its share of the labels of the batch. The check watches the calls of loss functions
   of `torch.nn.functional` (reductions) in forward and loss.
2. `CouplingCheck` runs the model on a few samples of the batch, and checks that their gradient is the weighted sum of
   the gradients of two halves of these samples. This also finds coupled samples: a loss that compares samples with each
   other, such as a contrastive loss.

Neither check is a proof: the first knows only some loss functions, the second tries only some samples.
`rewrite.verify` compares whole steps.

The second check compares gradients, because values of the loss find fewer errors. `benchmarks.guard` has 370 trainings
whose gradient is wrong by 1 % or more: comparing values finds 240 of them, and comparing gradients 331. The table shows
how many trainings each form of the checks refuses, and after the plus sign how many get a warning. No form refuses one
of the 220 right trainings or warns about it. (`python -m benchmarks.guard losses gradients --seeds 1 --form FORM`, two
CPU cores, Python 3.11.7, torch 2.13.0+cpu, 23 November 2026.)

| form | common losses (220 wrong) | samples coupled in the backward only (150 wrong) |
|---|---|---|
| `whole` | 212 + 8 | 109 + 2 |
| `values` (values of the loss instead of gradients) | 212 + 8 | 20 |
| `first` (first batch only) | 206 + 8 | 104 + 6 |
| `weights` (check 1 only) | 10 | 0 |
| `coupling` (check 2 only) | 212 + 8 | 109 + 2 |

The 39 wrong trainings that pass have micro-batches of one sample, or of two in bf16. There, the gradient of two samples
would take more memory than the training step. In 16 batches check 1 finds no more than check 2. It is still needed: it
checks the weights in every later step, and in models with tensors that check 2 cannot restore.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from planner.errors import DecisionError
from planner.rewrite.accumulation_check.coupling_check import CouplingCheck
from planner.rewrite.accumulation_check.reduction_check import ReductionWatcher
from planner.rewrite.step_observer import StepObserver

__all__ = ["AccumulationCheck", "CouplingCheck"]


_SMALL_ERROR = 0.05
"""Minimum error of a weight that a comparison of gradients can detect.

Below it, gradients agree within the bound of the comparison, both with the right weight and with the wrong one.
"""


@final
class AccumulationCheck(StepObserver):
    """Raises `DecisionError` before the update if the gradients of micro-batches do not add up to that of their batch.

    The weights are checked in the first step that splits its batch. Later steps are checked only if the loss is a mean
    over labels and the weights do not count labels, because the number of labels may change from batch to batch.

    Give it to a `TrainingStep` as an observer. Code with a loop of its own (the Trainer's hooks) calls `watch_part` and
    `after_loss` for each micro-batch, and then `refuse_other_weights` and `refuse_coupled_samples`; before the first
    micro-batch it calls `refuse_dependence_on_calls`.

    Args:
        model: the model itself, without wrappers such as DistributedDataParallel.
        loss_of: computes the loss of a batch with that model, without autocast.
        coupling: compares gradients of a few samples; None to skip this comparison.
        checks_weights: True to check the weights from the first step on, False to wait for `start_watching`.
        has_loss_weight_option: True if the user could state other weights (`loss_weight`). Error messages then say how.
        every_step: check the weights in every step until `stop_watching`, instead of in the first step only.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_of: Callable[[Any], torch.Tensor],
        coupling: CouplingCheck | None = None,
        *,
        checks_weights: bool = True,
        has_loss_weight_option: bool = True,
        every_step: bool = False,
    ) -> None:
        self.coupling = coupling
        self._model = model
        self._loss_of = loss_of
        self._has_loss_weight_option = has_loss_weight_option
        self._every_step = every_step
        self._watches_next_step = checks_weights
        """True if the next step has to be checked: no step was checked yet, or every step is checked."""
        self._later_watcher: Callable[[], ReductionWatcher] | None = None
        """Creates the watcher of each later step; None if later steps are not checked."""
        self._watcher: ReductionWatcher | None = None
        """The watcher of the current step; None before the first micro-batch, and in steps that are not checked."""

    @property
    def watches_weights(self) -> bool:
        """True if the weights of the next step that splits its batch will be checked."""
        return self._watches_next_step or self._later_watcher is not None

    def start_watching(self) -> None:
        """Check the weights from the next step on, also if earlier steps showed that no further check is needed."""
        self._watches_next_step, self._later_watcher, self._watcher = True, None, None

    def stop_watching(self) -> None:
        """Stop checking weights. The gradients of a few samples are still compared."""
        self._watches_next_step, self._later_watcher, self._watcher = False, None, None

    # ---- as an observer of a `TrainingStep` --------------------------------------------------------------------------

    def before_step(self, batch: Any) -> None:
        self.refuse_dependence_on_calls(batch)

    def before_forward(self, weight: torch.Tensor | float | None) -> None:
        if weight is not None:  # the batch is split
            self.watch_part(weight)

    def after_forward(self) -> None:
        if self._watcher is not None:
            self._watcher.end_forward()

    def after_loss(self, loss: torch.Tensor | None) -> None:
        """Stop watching this micro-batch.

        Args:
            loss: the loss of the micro-batch; None if the forward failed or returned no loss.
        """
        if self._watcher is not None:
            self._watcher.end_part(loss)

    def before_update(self, batch: Any) -> None:
        if self._watcher is not None:
            self._check_weights(self._watcher, batch)
        self.refuse_coupled_samples(batch)
        self._watcher = None

    def after_error(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.end_part(None)
            self._watches_next_step |= watcher.is_first  # the first step was not checked to its end: check the next

    # ---- the stages of the check -------------------------------------------------------------------------------------

    def watch_part(self, weight: torch.Tensor | float | None) -> None:
        """Watch the reductions of a micro-batch until `after_loss`.

        Args:
            weight: the weight of its loss; None if the weights are passed to `refuse_other_weights` instead.
        """
        if self._watcher is None:
            if self._watches_next_step:
                self._watcher = ReductionWatcher(has_loss_weight_option=self._has_loss_weight_option)
            elif self._later_watcher is not None:
                self._watcher = self._later_watcher()
        if self._watcher is not None:
            self._watcher.start_part(weight)

    def refuse_other_weights(self, batch: Any, weights: Sequence[float]) -> None:
        """Raise `DecisionError` if the weighted losses of the watched micro-batches do not add up to the loss of the
        batch.

        Args:
            batch: the batch that was split; None if the caller has only micro-batches and cannot join them.
            weights: the weight of each micro-batch; if this is empty, nothing is checked.
        """
        watcher, self._watcher = self._watcher, None
        if watcher is not None and weights:
            self._check_weights(watcher, batch, weights)

    def refuse_dependence_on_calls(self, batch: Any, *, is_part: bool = False) -> None:
        """Compute the gradient or loss of a few samples twice, before the first forward of a step.

        Raises `DecisionError` if the results differ, because the forward or the loss function changes a state that it
        uses.

        Args:
            batch: the batch that will be split, or its first micro-batch.
            is_part: True if `batch` is only a micro-batch.
        """
        if self.coupling is not None:
            self.coupling.refuse_dependence_on_calls(self._model, batch, self._loss_of, is_part=is_part)

    def refuse_coupled_samples(self, batch: Any, *, is_part: bool = False) -> None:
        """Compare the gradient of a few samples with the weighted sum of the gradients of two halves of them.

        Raises `DecisionError` if they differ.

        Args:
            batch: the batch that was split, or one of its micro-batches.
            is_part: True if `batch` is only one of the micro-batches.
        """
        if self.coupling is not None:
            self.coupling.refuse_coupled_samples(self._model, batch, self._loss_of, is_part=is_part)

    def _check_weights(self, watcher: ReductionWatcher, batch: Any, weights: Sequence[float] | None = None) -> None:
        try:
            watcher.refuse_other_weights(weights)
        except DecisionError:
            # The reductions that were seen contradict the weights. But they may not be part of the loss, or each may be
            # over one sample only. So compare gradients for the two micro-batches whose weights are farthest off. If
            # these agree, no weights are checked any more.
            if not self._two_parts_agree(watcher, batch):
                raise
            self._watches_next_step, self._later_watcher = False, None
            return
        if not self._every_step:
            self._watches_next_step = False
            self._later_watcher = watcher.later() or self._later_watcher

    def _two_parts_agree(self, watcher: ReductionWatcher, batch: Any) -> bool:
        if self.coupling is None or batch is None or watcher.error < _SMALL_ERROR:
            return False
        return self.coupling.agrees(self._model, batch, self._loss_of, parts=watcher.farthest_off, count=watcher.parts)
