"""The loss of a micro-batch as its share of the batch's, in transformers' Trainer, which steps by itself.

The Trainer counts the labels of all micro-batches of a step, and calls the model with that number. What it trains with
on a whole batch is what is kept: for a model that divides by that number, the sum over its own labels divided by it,
also where the two are not the same (transformers 5.23 counts the first label of each sample for `GPT2LMHeadModel`,
whose loss leaves it out); for all others the mean over the labels of the batch, which has to be the same number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch

from planner.errors import DecisionError
from rewrite.rules.accumulation import counted_labels, divides_by_count, ignored_label, shifts_labels
from rewrite.step import weighted

COUNT = "num_items_in_batch"
"""The Trainer's word for how many labels all micro-batches of a step have."""


@final
class LossShare:
    """Weights the mean loss that a model returns for a micro-batch by its share of the labels of the batch."""

    def __init__(self, *, shifted: bool, ignored: int, divides: bool) -> None:
        self.shifted, self.ignored = shifted, ignored
        self.divides = divides
        """Whether the model itself divides by the number that it is called with."""
        self._of_batch: Any = None
        """The Trainer's count, from before a forward to after it."""
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        """Labels of each micro-batch and of its batch, while they are watched."""
        self._was_not_told = False

    @classmethod
    def of(cls, model: torch.nn.Module) -> LossShare:
        divides = divides_by_count(type(model))
        return cls(shifted=shifts_labels(model), ignored=ignored_label(model), divides=divides)

    def hooks_on(self, model: torch.nn.Module) -> list[Any]:
        """Handles of the hooks: before a forward the count is taken from its arguments, and used after it."""
        return [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True),
        ]

    def watch(self, wanted: bool) -> None:
        """From now on keep the counts for `refuse_another_count`, or no longer."""
        self._seen, self._was_not_told = ([] if wanted else None), False

    def refuse_another_count(self) -> None:
        """Look at the micro-batches that were watched since the last look: those of one step.

        Raises:
            DecisionError: where the model's loss is a mean over another number of labels than the Trainer counted, or
                the model was called with labels and without their number.
        """
        if self._was_not_told:
            raise DecisionError(
                f"the model was called with labels and without {COUNT}, by which micro-batches are weighted: pass "
                "it on in a compute_loss of your own, or plan with accumulation forbidden"
            )
        if not self._seen:
            return
        ours, theirs = sum(part.item() for part, _ in self._seen), self._seen[-1][1].item()
        self._seen.clear()
        if ours != theirs and not self.divides:
            raise DecisionError(
                f"the Trainer counted {theirs:g} labels in the micro-batches of a step, and the model's loss is a mean "
                f"over {ours:g} of them: their shares would not add up to one batch; plan with accumulation forbidden"
            )

    def _before(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        self._of_batch = kwargs.get(COUNT)
        return args, {name: value for name, value in kwargs.items() if name != COUNT}

    def _after(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        of_batch, self._of_batch = self._of_batch, None
        labels = kwargs.get("labels")
        if not isinstance(labels, torch.Tensor):
            return output
        is_watched = self._seen is not None and model.training and torch.is_grad_enabled()
        if of_batch is None:
            self._was_not_told |= is_watched
            return output
        of_part = self._count(labels)
        of_batch = torch.as_tensor(of_batch, device=labels.device)
        if is_watched:
            self._seen.append((of_part, of_batch))
        return _with_weight(output, of_part / of_batch)

    def _count(self, labels: torch.Tensor) -> torch.Tensor:
        """As `rewritten.step` counts; what is one label a sample, or no class, is counted as the Trainer does."""
        if labels.dim() < 2 or labels.is_floating_point():
            return labels.ne(-100).sum(dtype=torch.float64)
        return counted_labels({"labels": labels}, len(labels), shifted=self.shifted, ignored=self.ignored)


def _with_weight(output: Any, weight: torch.Tensor) -> Any:
    if not isinstance(output, Mapping):
        return (weighted(output[0], weight), *output[1:])
    if output.get("loss") is not None:
        output["loss"] = weighted(output["loss"], weight)
    return output
