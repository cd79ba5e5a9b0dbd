"""Whether the loss of a batch is made of the losses of its parts, tried out on a few samples.

A loss that compares samples with each other (contrastive ones, such as CLIP's), or a mean over what no label tells,
looks like any other: its parts have losses too. So the gradient of a few samples taken together is held against that
of two parts, each with its weight. There are no more samples than a micro-batch has, so that it takes no more memory
than to train by one. Where even two samples would take more, the values of the loss are compared instead.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from planner.errors import DecisionError
from planner.rewrite.accumulation_check.gradient_probe import GradientProbe, Halves, ProbeResult
from planner.rewrite.accumulation_check.sample_choice import pairs_of_blocks, probe_pairs
from planner.rewrite.accumulation_check.side_effects import SideEffectGuard
from planner.rewrite.portable.batch_slicing import count_samples, map_tensors

logger = logging.getLogger(__name__)

_TRIED = (1, 2, 4, 8, 16)
"""Batches that are tried, of those that are split: padding may come later than in the first one."""

_SAMPLES = 8
"""At most. More of them differ in more."""


@final
@dataclasses.dataclass(kw_only=True)
class CouplingCheck:
    """Looks at some of the batches that a step splits."""

    batch_size: int
    """Samples that a batch was planned to have."""
    micro_batch_size: int
    terms_of: Callable[[Any, int], torch.Tensor | float]
    """From a batch and its samples: over how many terms its loss is taken to be a mean."""
    loss_fn: Callable | None = None
    """What takes the loss, beside the model: nothing that it keeps is changed."""
    doubled: bool = False
    """Whether a loss in full precision takes twice the bytes that it takes in training."""
    is_stated: bool = False
    """Whether the weights are the user's own: then what is off is told in the log, and not refused."""
    way_out: str = "forbid accumulation, or give apply loss_weight=... where it is a sum or another mean"
    """What to do instead of splitting."""
    _batches: int = 0
    _told: set[str] = dataclasses.field(default_factory=set)

    def refuse_coupled_samples(
        self, model: torch.nn.Module, batch: Any, loss_of: Callable[[Any], torch.Tensor], *, is_part: bool = False
    ) -> None:
        """Raise `DecisionError` if samples have another gradient than they have in two parts, each with its weight.

        What cannot be tried is told in the log: losses that take no single sample, or that draw numbers which depend on
        the samples.

        Args:
            loss_of: the loss of a batch, from the model.
            is_part: the batch is no more than a micro-batch.
        """
        if not self._can_be_tried(model, batch):
            return
        samples = count_samples(batch, self.batch_size)
        if samples <= self.micro_batch_size < self.batch_size and not is_part:  # it was not split
            return
        if self._batches + 1 in _TRIED:
            trial_of = self._trial_of(model, batch, samples, loss_of)
            tried = self._tried(trial_of, batch, samples)
            if tried is not None and not self._is_right_in_blocks(trial_of, batch, samples):
                if not self.is_stated and not tried.is_slight:
                    raise DecisionError(f"{tried}; {self.way_out}")
                by = "Micro-batches are weighted by the loss_weight that was given" if self.is_stated else self.way_out
                self._tell("what is off", f"{tried}. {by}")
        self._batches += 1

    def agrees(
        self,
        model: torch.nn.Module,
        batch: Any,
        loss_of: Callable[[Any], torch.Tensor],
        parts: tuple[int, int],
        *,
        among: int,
    ) -> bool:
        """Whether two of so many micro-batches have the gradient together that they have by their weights.

        This takes more memory than was promised, and is asked only where the answer would be a refusal.
        """
        if not self._can_be_tried(model, batch):
            return False
        samples = count_samples(batch, self.batch_size)
        blocks = torch.arange(samples).split(self.micro_batch_size)
        if among != len(blocks):
            return False
        trial = self._trial_of(model, batch, samples, loss_of)()
        return _all_are_right(trial, [(blocks[parts[0]], blocks[parts[1]])])

    def _trial_of(
        self, model: torch.nn.Module, batch: Any, samples: int, loss_of: Callable[[Any], torch.Tensor]
    ) -> Callable[..., GradientProbe]:
        """All of them begin with the model as it is now."""
        untouched = SideEffectGuard(model, self.loss_fn)
        if not untouched.is_whole:
            self._tell(
                "objects", "model and loss function hold so many objects that some may keep what a trial left there"
            )
        return functools.partial(GradientProbe, model, batch, samples, loss_of, self.terms_of, untouched)

    def _tell(self, about: str, line: str) -> None:
        """Once, as many batches as it is about."""
        if about not in self._told:
            logger.warning("%s", line)
        self._told.add(about)

    def _can_be_tried(self, model: torch.nn.Module, batch: Any) -> bool:
        """Not tensors without values, nor those that are made of others, of which writes are not seen."""
        tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]

        def note(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor)
            return tensor

        map_tensors(note, batch)
        if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
            return False
        made = {type(tensor).__name__ for tensor in tensors if is_traceable_wrapper_subclass(tensor)}
        if made:
            self._tell(
                "wrappers", f"the loss could not be tried on parts of a batch: {min(made)} is made of other tensors"
            )
            return False
        return True

    def _looks(self, batch: Any, samples: int) -> Iterator[tuple[Halves, bool]]:
        """Samples of two parts, and whether there is room for gradients of them."""
        trainable = self.micro_batch_size // (2 if self.doubled else 1)
        of_gradients = min(samples, _SAMPLES, trainable)
        of_gradients -= of_gradients % 4 if of_gradients > 4 else 0  # pairs stay together
        choices = functools.partial(probe_pairs, batch, samples)
        if of_gradients >= 2:
            sides = choices(of_gradients, self.micro_batch_size, self._batches)
            for halves in itertools.islice(sides, 2 if self._batches else None):
                yield halves, True
        if of_gradients < 4 and not self._batches:  # without gradients there is room for more samples, once
            more = min(samples, max(2, trainable + trainable // 2))
            for halves in choices(more, self.micro_batch_size, 0):
                yield halves, False

    def _tried(self, trial_of: Callable[..., GradientProbe], batch: Any, samples: int) -> ProbeResult | None:
        """What is off. None where nothing is, which is told in the log where there was nothing to compare."""
        try:
            looks = list(self._looks(batch, samples))
        except Exception as why:  # tensors of a kind that is not looked into; training may go well all the same
            self._tell("what was not tried", f"the loss could not be tried on parts of a batch ({why})")
            return None
        why_not, compared, differs_by_numbers = "it is zero, or no number", 0, None
        for number, (halves, with_gradients) in enumerate(looks):
            for trains in (True, False):  # in evaluation, where it cannot be in training
                trial = trial_of(trains=trains)
                try:
                    tried = _of_few(trial, halves, with_gradients)
                    if trial.drew and number == 0 and with_gradients and not (tried is not None and tried.is_off):
                        own = trial.of_gradient(halves, own_numbers=True)
                        differs_by_numbers = own if own is not None and own.is_off else None
                except Exception as why:  # of the model or its loss: training may go well all the same
                    why_not = f"{type(why).__name__}: {why}"
                    continue
                if tried is not None and tried.is_off:
                    return tried
                compared += tried is not None
                break
        if differs_by_numbers is not None:
            self._tell("random numbers", f"with random numbers of its own for each sample, {differs_by_numbers}")
        elif looks and not compared:
            self._tell("what was not tried", f"the loss could not be tried on parts of a batch ({why_not})")
        return None

    def _is_right_in_blocks(self, trial_of: Callable[..., GradientProbe], batch: Any, samples: int) -> bool:
        """Whether several pairs of whole micro-batches have the gradient together that they have one by one.

        A loss may compare samples within groups of which each micro-batch has whole ones.
        """
        if samples <= self.micro_batch_size:
            return False
        return _all_are_right(trial_of(), pairs_of_blocks(batch, samples, self.micro_batch_size))


def _of_few(trial: GradientProbe, halves: Halves, with_gradients: bool) -> ProbeResult | None:
    tried = trial.of_gradient(halves) if with_gradients else None
    if tried is not None:
        return tried
    tried = trial.of_loss(halves)
    if tried is not None and tried.is_off:
        return tried
    shaken = trial.of_loss(halves, shaken=True)
    return tried if shaken is None else shaken


def _all_are_right(trial: GradientProbe, pairs: list[Halves]) -> bool:
    found = []
    for pair in pairs:
        try:
            found.append(trial.of_gradient(pair))
        except Exception as why:  # no memory, for instance
            logger.info("two micro-batches could not be taken together (%s: %s)", type(why).__name__, why)
            return False
        if found[-1] is not None and found[-1].is_off:
            return False
    return any(tried is not None for tried in found)
