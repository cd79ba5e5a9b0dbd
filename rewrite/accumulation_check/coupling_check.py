"""Check on a few samples that the gradient of a batch is the weighted sum of the gradients of its parts.

What it checks: micro-batches train as the batch would only if the loss of the batch is the weighted sum of the losses
of its parts. A loss that compares samples with each other (contrastive losses such as CLIP's), a sum, or a mean over
something that no label says also has a value for each part, so that wrong training would not raise any error.

How: take up to 8 samples of the batch, and compare their gradient with the weighted sum of the gradients of two halves
(`gradient_probe`), for several choices of samples (`sample_choice`). If they differ, compare pairs of whole
micro-batches, since a loss may compare samples within groups of which each micro-batch has whole ones. Only if these
differ too is the step refused. Batches 1, 2, 4, 8 and 16 of those that are split are checked. The samples are never
more than a micro-batch has, so that the probe takes no more memory than the training step. If there is not even room
for the gradients of two samples, the values of the loss are compared. Pairs of whole micro-batches take more memory;
they are compared only if the step would be refused otherwise.

What it cannot see: coupling that does not show in the chosen samples or batches, losses that accept no single sample,
and losses that draw random numbers which depend on the samples. The last two are logged.
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
from planner.rewrite.accumulation_check.sample_choice import pairs_of_micro_batches, probe_pairs
from planner.rewrite.accumulation_check.side_effects import SideEffectGuard
from planner.rewrite.portable.batch_slicing import count_samples, map_tensors

logger = logging.getLogger(__name__)

_CHECKED_BATCHES = (1, 2, 4, 8, 16)
"""Numbers of the split batches that are checked. Several are checked because padding may first appear in a later
batch."""

_MAX_SAMPLES = 8
"""Maximum number of samples per probe. With more of them, rounding and chance differences grow."""


@final
@dataclasses.dataclass(kw_only=True)
class CouplingCheck:
    """Probes some of the batches that a step splits. One object belongs to one training run."""

    batch_size: int
    """Number of samples in a batch, as planned."""
    micro_batch_size: int
    terms_of: Callable[[Any, int], torch.Tensor | float]
    """Returns the number of terms that a loss is taken to be a mean over, from a batch and its number of samples."""
    loss_fn: Callable | None = None
    """The loss function, if it is not part of the model. Its state is restored after each probe."""
    uses_autocast: bool = False
    """True if training computes the loss in lower precision: a probe then takes twice the bytes per sample."""
    has_stated_weights: bool = False
    """True if the user stated the weights (`loss_weight`): differences are then logged and not refused."""
    way_out: str = "forbid accumulation, or pass loss_weight=... to apply if the loss is a sum or another mean"
    """End of the error message, which says what the user can do."""
    _batches: int = 0
    """Number of split batches so far."""
    _warned_topics: set[str] = dataclasses.field(default_factory=set)

    def refuse_coupled_samples(
        self, model: torch.nn.Module, batch: Any, loss_of: Callable[[Any], torch.Tensor], *, is_part: bool = False
    ) -> None:
        """Raise `DecisionError` if the gradient of some samples is not the weighted sum of the gradients of two halves.

        Losses that cannot be probed are logged.

        Args:
            loss_of: the loss of a batch, computed by the model.
            is_part: the batch is no larger than one micro-batch.
        """
        if not self._can_probe(model, batch):
            return
        samples = count_samples(batch, self.batch_size)
        if samples <= self.micro_batch_size < self.batch_size and not is_part:  # it was not split
            return
        if self._batches + 1 in _CHECKED_BATCHES:
            new_probe = self._probe_factory(model, batch, samples, loss_of)
            difference = self._difference_in_samples(new_probe, batch, samples)
            if difference is not None and not self._micro_batches_agree(new_probe, batch, samples):
                if not self.has_stated_weights and not difference.is_slight:
                    raise DecisionError(f"{difference}; {self.way_out}")
                remark = (
                    "Micro-batches are weighted by the loss_weight that was given"
                    if self.has_stated_weights
                    else self.way_out
                )
                self._warn_once("difference", f"{difference}. {remark}")
        self._batches += 1

    def agrees(
        self,
        model: torch.nn.Module,
        batch: Any,
        loss_of: Callable[[Any], torch.Tensor],
        *,
        parts: tuple[int, int],
        count: int,
    ) -> bool:
        """True if the gradient of two micro-batches together is the weighted sum of their gradients.

        The comparison takes more memory than was promised, so it is made only if the step would be refused otherwise.

        Args:
            parts: indices of the two micro-batches.
            count: number of micro-batches in the batch.
        """
        if not self._can_probe(model, batch):
            return False
        samples = count_samples(batch, self.batch_size)
        blocks = torch.arange(samples).split(self.micro_batch_size)
        if count != len(blocks):
            return False
        probe = self._probe_factory(model, batch, samples, loss_of)()
        return _all_agree(probe, [(blocks[parts[0]], blocks[parts[1]])])

    def _probe_factory(
        self, model: torch.nn.Module, batch: Any, samples: int, loss_of: Callable[[Any], torch.Tensor]
    ) -> Callable[..., GradientProbe]:
        """Makes probes that all start from the state that the model has now."""
        guard = SideEffectGuard(model, self.loss_fn)
        if not guard.is_complete:
            self._warn_once(
                "objects",
                "model and loss function hold more objects than a snapshot takes: some may keep changes that the check "
                "made",
            )
        return functools.partial(GradientProbe, model, batch, samples, loss_of, self.terms_of, guard)

    def _warn_once(self, topic: str, message: str) -> None:
        """Log a warning, once per topic."""
        if topic not in self._warned_topics:
            logger.warning("%s", message)
        self._warned_topics.add(topic)

    def _can_probe(self, model: torch.nn.Module, batch: Any) -> bool:
        """False for tensors without values, and for wrapper subclasses, where writes to inner tensors are not seen."""
        tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]

        def note(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor)
            return tensor

        map_tensors(note, batch)
        if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
            return False
        wrappers = {type(tensor).__name__ for tensor in tensors if is_traceable_wrapper_subclass(tensor)}
        if wrappers:
            self._warn_once(
                "wrappers",
                f"the loss could not be tried on parts of a batch: {min(wrappers)} is a tensor that wraps others",
            )
            return False
        return True

    def _choices(self, batch: Any, samples: int) -> Iterator[tuple[Halves, bool]]:
        """Yields the halves to compare, and True if there is room for their gradients.

        The first batch gets all choices of samples, later ones two of them. Without gradients there is room for more
        samples, so that the values of the loss are compared too, in the first batch only.
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
    ) -> ProbeResult | None:
        """The first difference that is too large; None if there is none. Warns if nothing could be compared."""
        try:
            choices = list(self._choices(batch, samples))
        except Exception as error:  # an unusual kind of tensor in the batch; training may work all the same
            self._warn_once("not probed", f"the loss could not be tried on parts of a batch ({error})")
            return None
        reason, compared, differs_by_draws = "it is zero, or not finite", 0, None
        for number, (halves, with_gradients) in enumerate(choices):
            # In training mode; in evaluation mode if that fails or there is nothing to compare.
            for in_training_mode in (True, False):
                probe = new_probe(in_training_mode=in_training_mode)
                try:
                    result = _compare(probe, halves, with_gradients)
                    # All samples had the same random numbers so far, which may hide what depends on them. Repeat the
                    # first choice with numbers of its own for each sample. A difference is only logged then: which
                    # draws have a row for each sample is guessed by their shape.
                    if probe.drew and number == 0 and with_gradients and not (result is not None and result.is_off):
                        drawn = probe.compare_gradients(halves, own_draws=True)
                        differs_by_draws = drawn if drawn is not None and drawn.is_off else None
                except Exception as error:  # raised by the model or its loss; training may work all the same
                    reason = f"{type(error).__name__}: {error}"
                    continue
                if result is not None and result.is_off:
                    return result
                compared += result is not None
                break
        if differs_by_draws is not None:
            self._warn_once("random numbers", f"with random numbers of its own for each sample, {differs_by_draws}")
        elif choices and not compared:
            self._warn_once("not probed", f"the loss could not be tried on parts of a batch ({reason})")
        return None

    def _micro_batches_agree(self, new_probe: Callable[..., GradientProbe], batch: Any, samples: int) -> bool:
        """True if the gradient of each of several pairs of whole micro-batches is the weighted sum of their gradients.

        This accepts losses that compare samples only within groups of which each micro-batch has whole ones.
        """
        if samples <= self.micro_batch_size:
            return False
        return _all_agree(new_probe(), pairs_of_micro_batches(batch, samples, self.micro_batch_size))


def _compare(probe: GradientProbe, halves: Halves, with_gradients: bool) -> ProbeResult | None:
    """Compare gradients, or the loss (also with perturbed parameters) if there is no room or all gradients are zero."""
    result = probe.compare_gradients(halves) if with_gradients else None
    if result is not None:
        return result
    result = probe.compare_losses(halves)
    if result is not None and result.is_off:
        return result
    perturbed = probe.compare_losses(halves, perturbed=True)
    return result if perturbed is None else perturbed


def _all_agree(probe: GradientProbe, pairs: list[Halves]) -> bool:
    """True if gradients agree for all pairs that could be compared, and at least one could."""
    results = []
    for pair in pairs:
        try:
            results.append(probe.compare_gradients(pair))
        except Exception as error:  # for example out of memory
            logger.info("two micro-batches could not be taken together (%s: %s)", type(error).__name__, error)
            return False
        if results[-1] is not None and results[-1].is_off:
            return False
    return any(result is not None for result in results)
