"""Whether the loss of a batch is made of the losses of its parts, tried out on a few samples.

A loss that compares samples with each other (contrastive ones, such as CLIP's), or a mean over what no label tells,
looks like any other: its parts have losses too. So the gradient of a few samples taken together is held against that
of their halves, each with its weight. The samples are those that differ most in how much padding they have, and no more
than a micro-batch has, so that it takes no more memory than to train by one.
Where even two samples would take more, the values of the loss are compared instead. That sees less: near its
initialisation a model's loss is about the same for all samples, however they are weighted.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from planner.errors import DecisionError
from rewrite.samples import count_samples, map_tensors
from rewrite.trial import Trial, Tried, precision_of

logger = logging.getLogger(__name__)

_TRIED = (1, 2, 4, 8, 16)
"""Batches that are tried, of those that are split: padding may come later than in the first one."""

_SAMPLES = 8
"""At most. More of them differ in more."""


@final
@dataclasses.dataclass(kw_only=True)
class TriedApart:
    """Looks at some of the batches that a step splits."""

    batch_size: int
    """Samples that a batch was planned to have."""
    micro_batch_size: int
    terms_of: Callable[[Any, int], torch.Tensor | float]
    """From a batch and its samples: over how many terms its loss is taken to be a mean."""
    doubled: bool = False
    """Whether a loss in full precision takes twice the bytes that it takes in training."""
    way_out: str = "forbid accumulation, or give apply loss_weight=... where it is a sum or another mean"
    """What to do instead of splitting."""
    _batches: int = 0

    def refuse_coupled_samples(
        self, model: torch.nn.Module, batch: Any, loss_of: Callable[[Any], torch.Tensor]
    ) -> None:
        """Raise `DecisionError` if samples have another gradient than they have in two parts, each with its weight.

        What cannot be tried is told in the log: losses of models that have none in evaluation, that take no single
        sample, or that draw numbers which depend on the samples.

        Args:
            loss_of: the loss of a batch, from the model.
        """
        tensors: list[torch.Tensor] = list(model.parameters())
        map_tensors(tensors.append, batch)
        if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
            return
        samples = count_samples(batch, self.batch_size)
        if samples <= self.micro_batch_size < self.batch_size:  # it was not split
            return
        if self._batches + 1 in _TRIED:
            trial = Trial(model, batch, samples, loss_of, self.terms_of, precision_of(model, tensors))
            try:
                tried = self._tried(trial)
            except Exception as why:  # of the model or its loss, in evaluation: training may go well all the same
                logger.warning("the loss could not be tried on parts of a batch (%s: %s)", type(why).__name__, why)
            else:
                if tried is not None and tried.is_off and not self._is_right_by_groups(trial):
                    raise DecisionError(f"{tried}; {self.way_out}")
        self._batches += 1

    def _tried(self, trial: Trial) -> Tried | None:
        """None where there is nothing to compare: a single sample, or a loss of nothing."""
        trainable = self.micro_batch_size // (2 if self.doubled else 1)
        few = min(trial.samples, _SAMPLES, max(2, trainable))
        few -= few % 4 if few > 4 else 0  # pairs stay together
        if few < 2:
            return None
        rows = trial.rows_that_differ(few)
        halves = rows[: few // 2], rows[few // 2 :]
        tried = trial.of_gradient(*halves) if few <= trainable else None
        return trial.of_loss(*halves) if tried is None else tried

    def _is_right_by_groups(self, trial: Trial) -> bool:
        """Whether two whole micro-batches have the gradient that they have one by one.

        A loss may compare samples within groups of which each micro-batch has whole ones. This takes more memory than
        was promised, and is asked only where the answer would be a refusal.
        """
        size = self.micro_batch_size
        if trial.samples <= size:
            return False
        try:
            tried = trial.of_gradient(*trial.blocks_that_differ(size))
        except Exception as why:  # no memory, for instance
            logger.info("two micro-batches could not be taken together (%s: %s)", type(why).__name__, why)
            return False
        return tried is not None and not tried.is_off
