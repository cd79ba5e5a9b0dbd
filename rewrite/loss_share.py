"""The loss of a micro-batch as its share of the batch's, in transformers' Trainer, which steps by itself.

The Trainer counts the labels of all micro-batches of a step, and calls the model with that number. What it trains with
on a whole batch is what is kept: for a model that divides by that number, the sum over its own labels divided by it,
also where the two are not the same (transformers 5.23 counts the first label of each sample for `GPT2LMHeadModel`,
whose loss leaves it out); for all others the mean over the labels of the batch, which has to be the same number.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

from planner.decisions import ChunkedLoss, Precision
from planner.errors import DecisionError
from planner.plan_file import Plan
from rewrite.apart import refuse_coupled_samples
from rewrite.means import MeansTaken
from rewrite.rules.accumulation import (
    count_samples,
    counted_labels,
    divides_by_count,
    ignored_label,
    shifts_labels,
    takes_the_loss,
)
from rewrite.step import weighted
from rewrite.trainer_arguments import micro_batches

logger = logging.getLogger(__name__)

COUNT = "num_items_in_batch"
"""The Trainer's word for how many labels all micro-batches of a step have."""


@final
class LossShare:
    """Weights the mean loss that a model returns for a micro-batch by its share of the labels of the batch.

    Where a batch has no `labels` that the Trainer counts, it takes the mean of all micro-batches alike, and so they
    have to be of one size.
    """

    def __init__(
        self, *, shifted: bool, ignored: int, divides: bool, labelled: bool, size: int, rough: bool, in_chunks: bool
    ) -> None:
        self.shifted, self.ignored = shifted, ignored
        self.divides = divides
        """Whether the model itself divides by the number that it is called with."""
        self.labelled = labelled
        """Whether the planned batch has labels."""
        self.size = size
        """Samples of a whole micro-batch."""
        self.rough = rough
        """Whether the loss is computed in a lower precision."""
        self.in_chunks = in_chunks
        """Whether logits are never held whole."""
        self._of_batch: Any = None
        """The Trainer's count, from before a forward to after it."""
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        """Labels of each micro-batch and of its batch, while they are watched."""
        self._means: MeansTaken | None = None
        """What the losses of a step were means over, while they are watched."""
        self._is_first = False
        """Whether the next micro-batch is the first that is watched."""
        self._forward = contextlib.ExitStack()
        """Closed after each forward."""
        self._note_loss: Callable[[torch.Tensor], None] | None = None
        self._samples: list[int] | None = None
        """Of the micro-batches without labels of a step, once somebody looks."""
        self._was_not_told = self._warns_of_own_loss = False
        self.untrained = 0
        """Micro-batches since the last look."""

    @classmethod
    def of(cls, model: torch.nn.Module, plan: Plan) -> LossShare:
        return cls(
            shifted=shifts_labels(model),
            ignored=ignored_label(model),
            divides=divides_by_count(type(takes_the_loss(model))),
            labelled=any(path.partition(".")[0] == "labels" for path, _, _ in plan.workload.batch),
            size=micro_batches(plan)[0],
            rough=plan.decision(Precision) is not None,
            in_chunks=plan.decision(ChunkedLoss) is not None,
        )

    def hooks_on(self, model: torch.nn.Module) -> list[Any]:
        """Handles of the hooks: before a forward the count is taken from its arguments, and used after it."""
        return [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def watch(self, wanted: bool) -> None:
        """From now on keep what `refuse_another_loss` looks at, or no longer."""
        self._seen, self._was_not_told = ([] if wanted else None), False
        self._means = MeansTaken(may_be_stated=False) if wanted else None
        self._warns_of_own_loss = wanted
        self._is_first = wanted and not self.in_chunks
        self._samples, self.untrained = [], 0

    def refuse_another_loss(self) -> None:
        """Look at the micro-batches since the last look: those of one step. Of those without labels at any time.

        Raises:
            DecisionError: where the model's loss is a mean over another number of labels than the Trainer counted, or
                over other terms; where the model was called without labels that there are, or without their number;
                or where micro-batches of several sizes have no labels.
        """
        samples, self._samples, self.untrained = self._samples or [], [], 0
        if len(set(samples)) > 1:
            raise DecisionError(told_uneven(samples))
        if self._was_not_told:
            raise DecisionError(
                f"the model was called without labels or without {COUNT}, by which micro-batches are weighted: pass "
                "both on in a compute_loss of your own and take the loss that the model returns, or plan with "
                "accumulation forbidden"
            )
        if self._seen is None:
            return
        seen, self._seen = self._seen, []
        means, self._means = self._means, MeansTaken(may_be_stated=False)
        parts = [part.item() for part, _ in seen]
        if seen and sum(parts) != (theirs := seen[-1][1].item()) and not self.divides:
            raise DecisionError(
                f"the Trainer counted {theirs:g} labels in the micro-batches of a step, and the model's loss is a mean "
                f"over {sum(parts):g} of them: their shares would not add up to one batch; plan with accumulation "
                "forbidden"
            )
        if sum(parts):
            means.refuse_other_weights([part / sum(parts) for part in parts])
        elif samples:
            means.refuse_other_weights([1 / len(samples)] * len(samples))

    def _before(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        self._of_batch = kwargs.get(COUNT)
        kwargs = {name: value for name, value in kwargs.items() if name != COUNT}
        takes_loss = self._of_batch is None or kwargs.get("labels") is not None
        if self._means is not None and takes_loss and _trains(model):
            if self._is_first:
                self._is_first = False
                self._try_samples_apart(model, kwargs)
            self._note_loss = self._forward.enter_context(self._means.part(None))
        return args, kwargs

    def _try_samples_apart(self, model: torch.nn.Module, batch: dict[str, Any]) -> None:
        refuse_coupled_samples(
            model, batch, batch_size=self.size, micro_batch_size=self.size, rough=self.rough,
            loss_of=lambda part: _loss_in(model.forward(**part)),  # past these hooks
            terms_of=lambda part, samples: self._count(part["labels"]) if "labels" in part else samples,
            way_out="plan with accumulation forbidden",
        )  # fmt: skip

    def _after(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Called after a forward that failed as well, without an output."""
        of_batch, self._of_batch = self._of_batch, None
        note_loss, self._note_loss = self._note_loss, None
        self._forward.close()
        loss = _loss_in(output)
        if note_loss is not None and loss is not None:
            note_loss(loss)
        labels = kwargs.get("labels")
        self.untrained += _trains(model)
        if of_batch is None and _trains(model):
            if labels is not None or self.labelled:
                self._was_not_told |= self._seen is not None
            elif self._samples is not None:
                self._samples.append(count_samples(kwargs, self.size))
        elif labels is None and self._warns_of_own_loss and _trains(model):
            self._warns_of_own_loss = False
            logger.warning("the loss is taken outside of the model: it has to be a sum that is divided by %s", COUNT)
        if of_batch is None or loss is None or not isinstance(labels, torch.Tensor):
            return output
        of_part = self._count(labels)
        of_batch = torch.as_tensor(of_batch, device=labels.device)
        if self._seen is not None and _trains(model):
            self._seen.append((of_part, of_batch))
        return _with_loss(output, weighted(loss, of_part / of_batch))

    def _count(self, labels: torch.Tensor) -> torch.Tensor:
        """As `rewritten.step` counts; what is one label a sample, or no class, is counted as the Trainer does."""
        if labels.dim() < 2 or labels.is_floating_point():
            return labels.ne(-100).sum(dtype=torch.float64)
        return counted_labels({"labels": labels}, len(labels), shifted=self.shifted, ignored=self.ignored)


def told_uneven(samples: Sequence[int]) -> str:
    return (
        f"the micro-batches of a step have {', '.join(map(str, samples))} samples and no labels, so that the Trainer "
        "would take the mean of their losses as if they were of one size: give it as many samples as make up whole "
        "batches, or plan with accumulation forbidden"
    )


def _trains(model: torch.nn.Module) -> bool:
    return model.training and torch.is_grad_enabled()


def _loss_in(output: Any) -> torch.Tensor | None:
    """As the Trainer finds it."""
    if isinstance(output, Mapping):
        return output.get("loss")
    return output[0] if isinstance(output, (tuple, list)) and output else None


def _with_loss(output: Any, loss: torch.Tensor) -> Any:
    if not isinstance(output, Mapping):
        return (loss, *output[1:])
    output["loss"] = loss
    return output
