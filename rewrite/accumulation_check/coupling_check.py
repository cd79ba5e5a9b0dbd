"""Check on a few samples that the gradient of a batch is the weighted sum of the gradients of its micro-batches.

What it checks: micro-batches train like the whole batch only if the loss of the batch is the weighted sum of the losses
of the micro-batches. That is not so for a loss that compares samples with each other (contrastive losses such as
CLIP's), for a sum, or for a mean over anything but samples or labels. Such a loss can be computed for each micro-batch,
so that training would be wrong without any error.

How: take up to 8 samples of the batch, and compare their gradient with the weighted sum of the gradients of two halves
of these samples (`gradient_probe`). Do so for several choices of samples (`sample_choice`). If a comparison differs,
compare pairs of whole micro-batches: a loss may compare samples only within groups, and is split correctly if no group
is cut by the split. The step is refused only if micro-batches differ too.

Before the first micro-batch of a batch, the gradient or loss of the same samples is computed twice. If the two results
differ, the forward or the loss function changes a state that it uses, and every micro-batch would change it.

Of the batches that are split, numbers 1, 2, 4, 8 and 16 are checked. No more samples are taken than a micro-batch has,
so that the check takes no more memory than the training step. If that leaves fewer than four samples, values of the
loss on more samples are compared too, which take less memory than gradients. Pairs of whole micro-batches take more
memory; they are compared only if the step would be refused otherwise.

What it cannot see: coupling that does not show in the chosen samples or batches, losses that fail on so few samples,
and losses with random numbers that depend on the samples. For the last two a warning is logged.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any, final

import torch

from planner.errors import DecisionError
from planner.rewrite.accumulation_check.gradient_probe import (
    SLIGHT,
    GradientProbe,
    Halves,
    NotReproducibleError,
    ProbeResult,
    why_not_probed,
)
from planner.rewrite.accumulation_check.sample_choice import pairs_of_micro_batches, probe_pairs
from planner.rewrite.accumulation_check.side_effects import SideEffectGuard
from planner.rewrite.portable.batch_slicing import count_samples

logger = logging.getLogger(__name__)

_CHECKED_BATCHES = (1, 2, 4, 8, 16)
"""Which of the batches that are split are checked, counted from 1. Padding may first appear in a later batch."""

_MAX_SAMPLES = 8
"""Maximum number of samples in a comparison of gradients. Differences by rounding and by chance grow with it."""


@final
@dataclasses.dataclass(kw_only=True)
class CouplingCheck:
    """Compares gradients of a few samples, in some of the batches that a step splits. Use one object per training."""

    batch_size: int
    """Number of samples in a planned batch."""
    micro_batch_size: int
    terms_of: Callable[[Any, int], torch.Tensor | float]
    """`terms_of(batch, samples)` returns the number of terms over which the loss of a batch is assumed to be a mean."""
    loss_fn: Callable | None = None
    """The loss function, if it is not part of the model. Its state is restored after each evaluation."""
    uses_autocast: bool = False
    """True if training uses autocast. The check does not, so that a sample takes twice the bytes."""
    has_stated_weights: bool = False
    """True if the user stated the weights (`loss_weight`). A difference is then logged instead of refused."""
    not_by_sample: tuple[str, ...] = ()
    """Paths of the tensors of a batch that are the same for all samples."""
    chunked_head: torch.nn.Module | None = None
    """The module that computes its logits in chunks; None if there is none."""
    way_out: str = "forbid accumulation, or pass loss_weight=... to apply if the loss is a sum or another mean"
    """End of the error message, which says what the user can do."""
    unchecked_way_out: str = (
        'forbid accumulation, state the number of loss terms by loss_weight=... to apply, or pass check="off" to apply'
    )
    """End of the error message if nothing could be compared. It says what the user can do."""
    _batches: int = 0
    """Number of batches so far that were split."""
    _warned_topics: set[str] = dataclasses.field(default_factory=set)

    def refuse_coupled_samples(
        self, model: torch.nn.Module, batch: Any, loss_of: Callable[[Any], torch.Tensor], *, is_part: bool = False
    ) -> None:
        """Compare the gradient of a few samples with the weighted sum of the gradients of two halves of them.

        Raises `DecisionError` if they differ. Logs a warning if the loss cannot be computed on parts of the batch.

        Args:
            batch: the batch that was split, or one of its micro-batches.
            loss_of: computes the loss of a batch with the model.
            is_part: True if `batch` is only one of the micro-batches.
        """
        if not self._can_probe(model, batch):
            return
        samples = count_samples(batch, self.batch_size, self.not_by_sample)
        if not self._is_split(samples, is_part):
            return
        guard = self._guard(model) if self._batches + 1 in _CHECKED_BATCHES else None
        if guard is not None and self._lost_iterator(guard) is None:
            new_probe = self._probe_factory(model, batch, samples, loss_of, guard)
            difference, why_not = self._difference_in_samples(new_probe, batch, samples)
            agrees = (difference is None and why_not is None) or self._micro_batches_agree(new_probe, batch, samples)
            if why_not is not None and not agrees:
                self._refuse_unchecked(why_not)
            if difference is not None and not agrees:
                if not self.has_stated_weights and not difference.is_slight:
                    raise DecisionError(f"{difference}; {self.way_out}")
                remark = (
                    "Micro-batches are weighted by the loss_weight that was given"
                    if self.has_stated_weights
                    else self.way_out
                )
                self._warn_once("difference", f"{difference}. {remark}")
        self._batches += 1

    def refuse_dependence_on_calls(
        self, model: torch.nn.Module, batch: Any, loss_of: Callable[[Any], torch.Tensor], *, is_part: bool = False
    ) -> None:
        """Compute the gradient or loss of a few samples twice. Call this before the first forward of a step.

        Raises `DecisionError` if the two results differ, because the forward or the loss function changes a state that
        it uses, or if one of them advances an iterator, whose position cannot be restored. A change of less than 1 % is
        only logged.

        Args:
            batch: the batch that will be split, or its first micro-batch.
            loss_of: computes the loss of a batch with the model.
            is_part: True if `batch` is only a micro-batch.
        """
        if self._batches + 1 not in _CHECKED_BATCHES or not self._can_probe(model, batch):
            return
        samples = count_samples(batch, self.batch_size, self.not_by_sample)
        if not self._is_split(samples, is_part):
            return
        guard = self._guard(model)
        if self._lost_iterator(guard) is not None:
            self._refuse_iterator(guard)
            return
        new_probe = self._probe_factory(model, batch, samples, loss_of, guard)
        try:
            halves, with_gradients = next(self._choices(batch, samples), (None, False))
        except Exception as error:  # the comparison of samples reports it
            logger.info("samples could not be chosen (%s: %s)", type(error).__name__, error)
            return
        if halves is None:
            return
        for in_training_mode in (True, False):
            probe = new_probe(in_training_mode=in_training_mode)
            try:
                change = probe.change_by_calls(torch.cat(halves), with_gradients=with_gradients)
            except Exception as error:  # raised by the model or its loss; the comparison of samples reports it
                logger.info("two calls could not be compared (%s: %s)", type(error).__name__, error)
                continue
            if change is not None:
                self._refuse_change(change, with_gradients)
            break
        self._refuse_iterator(guard)

    def agrees(
        self,
        model: torch.nn.Module,
        batch: Any,
        loss_of: Callable[[Any], torch.Tensor],
        *,
        parts: tuple[int, int],
        count: int,
    ) -> bool:
        """True if the gradient of two micro-batches joined is the weighted sum of the gradients of each.

        False if they cannot be compared. The comparison may take more memory than the plan promised, so call this only
        if the step would be refused otherwise.

        Args:
            loss_of: computes the loss of a batch with the model.
            parts: indices of the two micro-batches.
            count: number of micro-batches in the batch.
        """
        if not self._can_probe(model, batch):
            return False
        samples = count_samples(batch, self.batch_size, self.not_by_sample)
        blocks = torch.arange(samples).split(self.micro_batch_size)
        if count != len(blocks):
            return False
        guard = self._guard(model)
        probe = self._probe_factory(model, batch, samples, loss_of, guard)()
        return self._lost_iterator(guard) is None and _all_agree(probe, [(blocks[parts[0]], blocks[parts[1]])])

    def _guard(self, model: torch.nn.Module) -> SideEffectGuard:
        """Return an object that restores the state that the model and the loss function have now."""
        guard = SideEffectGuard(model, self.loss_fn)
        if not guard.is_complete:
            self._warn_once(
                "objects",
                "model and loss function hold more objects than a snapshot takes: changes that the check of "
                "micro-batches makes to some of them may stay",
            )
        return guard

    def _probe_factory(
        self,
        model: torch.nn.Module,
        batch: Any,
        samples: int,
        loss_of: Callable[[Any], torch.Tensor],
        guard: SideEffectGuard,
    ) -> Callable[..., GradientProbe]:
        """Return a function that creates probes."""
        return functools.partial(
            GradientProbe, model, batch, samples, loss_of, self.terms_of, guard,
            not_by_sample=self.not_by_sample, chunked_head=self.chunked_head,
        )  # fmt: skip

    def _warn_once(self, topic: str, message: str) -> None:
        if topic not in self._warned_topics:
            logger.warning("%s", message)
        self._warned_topics.add(topic)

    def _can_probe(self, model: torch.nn.Module, batch: Any) -> bool:
        """True if the model can be run on samples of the batch and restored afterwards; else the reason is logged."""
        why_not = why_not_probed(model, batch)
        if why_not is not None:
            self._warn_once("wrappers", f"the loss could not be tried on parts of a batch: {why_not}")
        return why_not is None

    def _choices(self, batch: Any, samples: int) -> Iterator[tuple[Halves, bool]]:
        """Yields pairs of halves, each with True to compare their gradients, or False to compare values of the loss.

        For the first batch every pair that `probe_pairs` chooses is yielded, for a later batch the first two. Values of
        the loss are compared in the first batch only, and only if no more than three samples fit into the planned
        memory together with their gradients.
        """
        most = self.micro_batch_size // (2 if self.uses_autocast else 1)
        with_gradients = min(samples, _MAX_SAMPLES, most)
        with_gradients -= with_gradients % 4 if with_gradients > 4 else 0  # pairs of samples stay together
        pairs_of = functools.partial(probe_pairs, batch, samples)
        if with_gradients >= 2:
            pairs = pairs_of(with_gradients, self.micro_batch_size, self._batches)
            for halves in itertools.islice(pairs, 2 if self._batches else None):
                yield halves, True
        if with_gradients < 4 and not self._batches:
            more = min(samples, max(2, most + most // 2))
            for halves in pairs_of(more, self.micro_batch_size, 0):
                yield halves, False

    def _difference_in_samples(
        self, new_probe: Callable[..., GradientProbe], batch: Any, samples: int
    ) -> tuple[ProbeResult | None, str | None]:
        """Compare samples that are computed together with the same samples in two halves.

        Returns the first comparison in which they differ, or None if they agree in all; and the reason if nothing could
        be compared, else None. A loss or gradient that is zero or not finite does not count as a reason.
        """
        try:
            choices = list(self._choices(batch, samples))
        except Exception as error:  # an unusual kind of tensor in the batch; training may work all the same
            return None, f"samples could not be chosen ({error})"
        reason, compared, differs_by_draws = None, 0, None
        for number, (halves, with_gradients) in enumerate(choices):
            # In training mode; in evaluation mode if that fails or there is nothing to compare.
            for in_training_mode in (True, False):
                probe = new_probe(in_training_mode=in_training_mode)
                try:
                    result = _compare(probe, halves, with_gradients)
                    # All samples had the same random numbers so far, which may hide a loss that depends on them. Repeat
                    # the first choice with separate random numbers for each sample. A difference is then only logged,
                    # because it is guessed from the shape of a draw whether it has one row per sample.
                    if probe.drew and number == 0 and with_gradients and not (result is not None and result.is_off):
                        drawn = probe.compare_gradients(halves, own_draws=True)
                        differs_by_draws = drawn if drawn is not None and drawn.is_off else None
                except Exception as error:  # raised by the model or its loss; training may work all the same
                    is_ours = isinstance(error, NotReproducibleError)
                    reason = str(error) if is_ours else f"{type(error).__name__}: {error}"
                    continue
                if result is not None and result.is_off:
                    return result, None
                compared += result is not None
                break
        if differs_by_draws is not None:
            self._warn_once("random numbers", f"with random numbers of its own for each sample, {differs_by_draws}")
        if choices and not compared and reason is None:
            self._warn_once("nothing", "the loss could not be compared on parts of a batch: it is zero, or not finite")
        return None, None if compared else reason

    def _refuse_change(self, change: float, with_gradients: bool) -> None:
        """Raise `DecisionError`, or log a warning, for a relative change of a result from one call to the next."""
        message = (
            f"the {'gradient' if with_gradients else 'loss'} of the same samples changes by {change:.2%} from one call "
            "to the next, because the forward or the loss function changes a state that it uses (a counter of calls, a "
            "queue): with accumulation, every micro-batch changes this state"
        )
        if change > SLIGHT and not self.has_stated_weights:
            raise DecisionError(
                f"{message}; forbid accumulation, or change the state once per batch in your training loop"
            )
        self._warn_once("calls", message)

    def _lost_iterator(self, guard: SideEffectGuard) -> str | None:
        """Name of the type of an iterator whose position the check would lose or has lost; None if there is none.

        If the user stated the weights, training goes on after the check. The check is then not made if there is any
        iterator, because its position would be lost.
        """
        return guard.iterator if self.has_stated_weights else guard.lost_iterator

    def _refuse_iterator(self, guard: SideEffectGuard) -> None:
        if (name := self._lost_iterator(guard)) is not None:
            self._refuse_unchecked(
                f"the model or the loss function holds an iterator ({name}), whose position cannot be restored"
            )

    def _refuse_unchecked(self, why_not: str) -> None:
        """Raise `DecisionError`, or log a warning if the user stated the weights, because nothing can be compared."""
        message = f"it could not be checked that micro-batches train like the whole batch: {why_not}"
        if not self.has_stated_weights:
            raise DecisionError(f"{message}; {self.unchecked_way_out}")
        self._warn_once("not checked", message)

    def _is_split(self, samples: int, is_part: bool) -> bool:
        return is_part or not samples <= self.micro_batch_size < self.batch_size

    def _micro_batches_agree(self, new_probe: Callable[..., GradientProbe], batch: Any, samples: int) -> bool:
        """True if, for several pairs of whole micro-batches, the weighted gradients add up to that of both joined.

        This accepts a loss that compares samples only within groups, if no group is cut by the split.
        """
        if samples <= self.micro_batch_size:
            return False
        try:
            pairs = pairs_of_micro_batches(batch, samples, self.micro_batch_size)
        except Exception as error:  # an unusual kind of tensor in the batch
            logger.info("micro-batches could not be chosen (%s: %s)", type(error).__name__, error)
            return False
        return _all_agree(new_probe(), pairs)


def _compare(probe: GradientProbe, halves: Halves, with_gradients: bool) -> ProbeResult | None:
    """Compare gradients; or, if that is not wanted or not possible, values of the loss.

    The loss is compared with the parameters that the model has, and then with perturbed ones. Returns None if nothing
    could be compared.
    """
    result = probe.compare_gradients(halves) if with_gradients else None
    if result is not None:
        return result
    result = probe.compare_losses(halves)
    if result is not None and result.is_off:
        return result
    perturbed = probe.compare_losses(halves, perturbed=True)
    return result if perturbed is None else perturbed


def _all_agree(probe: GradientProbe, pairs: list[Halves]) -> bool:
    """True if the gradients of at least one pair could be compared, and agree for all these pairs.

    False if a comparison raises an error.
    """
    results = []
    for pair in pairs:
        try:
            results.append(probe.compare_gradients(pair))
        except Exception as error:  # for example out of memory
            logger.info("gradients of two micro-batches could not be compared (%s: %s)", type(error).__name__, error)
            return False
        if results[-1] is not None and results[-1].is_off:
            return False
    return any(result is not None for result in results)
