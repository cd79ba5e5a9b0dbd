"""Weights the loss of each micro-batch by its share of the batch, under transformers' Trainer.

The Trainer takes the steps itself. It counts the labels of all micro-batches of a step and calls the model with that
number (`num_items_in_batch`). The weighted losses add up to the loss that the Trainer would train with on the whole
batch:

- If the model itself divides by that number: the sum over the labels in the model's loss, divided by the Trainer's
  number. The loss may have fewer labels than the Trainer counts (for `GPT2LMHeadModel`, transformers 5.23 counts the
  first label of each sample, which the loss leaves out).
- For all other models: the mean over the labels of the batch. Model and Trainer have to count the same number.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from planner.errors import DecisionError, WorkloadError
from planner.plan_types.decision_base import Role, has_role
from planner.plan_types.plan import Plan
from planner.rewrite.accumulation_check import AccumulationCheck, CouplingCheck
from planner.rewrite.portable.batch_slicing import count_samples
from planner.rewrite.portable.loss_and_clipping import weighted
from planner.rewrite.portable.loss_terms import counted_labels
from planner.rewrite.trainer.arguments import micro_batches
from planner.workload.model_loss import divides_by_count, ignored_label, shifts_labels, takes_the_loss

logger = logging.getLogger(__name__)

COUNT = "num_items_in_batch"
"""The Trainer's name for the number of labels in all micro-batches of a step."""


@final
class LossWeighting:
    """Weights the mean loss that a model returns for a micro-batch by its share of the labels of the batch.

    If a batch has no `labels` that the Trainer counts, the Trainer takes the mean over all micro-batches, so that these
    must have the same size. `refuse_another_loss` checks the losses of each step; between `start_checking` and
    `stop_checking` it also checks that the weights are right.

    Args:
        model: the rewritten model.
        shifted: True if the model's loss leaves out the first label of each sample.
        ignored: the value of labels that do not count.
        divides: True if the model itself divides its loss by the number of labels that it is called with.
        labelled: True if the planned batch has labels.
        micro_batch_size: number of samples in a micro-batch (the last one may be smaller).
        batch_size: number of samples in the planned batch.
        uses_autocast: True if the plan has mixed precision.
        chunked_head: module that computes its logits in chunks; None if the plan does not compute the loss in chunks.
        makes_checks: False to compare no gradients of samples.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        shifted: bool,
        ignored: int,
        divides: bool,
        labelled: bool,
        micro_batch_size: int,
        batch_size: int,
        uses_autocast: bool,
        chunked_head: torch.nn.Module | None,
        makes_checks: bool = True,
    ) -> None:
        self.shifted, self.ignored, self.divides, self.labelled = shifted, ignored, divides, labelled
        self.micro_batch_size = micro_batch_size
        self.pending_micro_batches = 0
        """Number of micro-batches since the last `refuse_another_loss`."""
        coupling = CouplingCheck(
            batch_size=batch_size, micro_batch_size=micro_batch_size, terms_of=self._terms,
            uses_autocast=uses_autocast, chunked_head=chunked_head, way_out="plan with accumulation forbidden",
            unchecked_way_out='plan with accumulation forbidden, or pass check="off" to apply_for_trainer',
        )  # fmt: skip
        self._check = AccumulationCheck(
            model, functools.partial(full_precision_loss, model), coupling if makes_checks else None,
            checks_weights=False, has_loss_weight_option=False, every_step=True,
        )  # fmt: skip
        self._is_checking = False
        self._count: Any = None
        """The Trainer's number of labels, kept while a forward runs; None if the Trainer passes none."""
        self._label_counts: list[tuple[torch.Tensor, torch.Tensor]] = []
        """For each micro-batch, (its own number of labels, the Trainer's number); noted only while checking weights."""
        self._inputs: list[dict[str, Any]] = []
        """Arguments of the model for each micro-batch of a step. The Trainer holds the same tensors in memory."""
        self._unlabelled_samples: list[int] | None = None
        """Number of samples in each micro-batch without labels; None before `start_checking` was first called."""
        self._missed_labels_or_count = False
        """True if the model was called without labels, or without the Trainer's count of them (`COUNT`), during a step
        whose loss weights are checked."""
        self._warns_of_own_loss = False
        """True if a loss that is computed outside of the model is still to be warned of, once."""

    @classmethod
    def of(
        cls, model: torch.nn.Module, plan: Plan, chunked_head: torch.nn.Module | None, *, makes_checks: bool = True
    ) -> LossWeighting:
        """Create the weighting for a model and a plan.

        Args:
            chunked_head: the module that computes logits in chunks, if there is one.
            makes_checks: False to compare no gradients of samples.
        """
        return cls(
            model,
            shifted=shifts_labels(model),
            ignored=ignored_label(model),
            divides=divides_by_count(type(takes_the_loss(model))),
            labelled=any(path.partition(".")[0] == "labels" for path, _, _ in plan.workload.batch),
            micro_batch_size=micro_batches(plan)[0],
            batch_size=plan.workload.batch_size,
            uses_autocast=has_role(plan.decisions, Role.PRECISION),
            chunked_head=chunked_head,
            makes_checks=makes_checks,
        )

    def hooks_on(self, model: torch.nn.Module) -> list[Any]:
        """Register the hooks on the model and return their handles.

        One hook takes the Trainer's label count out of the arguments before a forward. The other uses it to weight the
        loss.
        """
        return [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True),
        ]

    def start_checking(self) -> None:
        """Check the weights of all steps from now on."""
        self._check.start_watching()
        self._set_checking(True)

    def stop_checking(self) -> None:
        """Stop checking weights. Sizes of micro-batches without labels and coupled samples are still checked."""
        self._check.stop_watching()
        self._set_checking(False)

    def _set_checking(self, is_checking: bool) -> None:
        self._is_checking = self._warns_of_own_loss = is_checking
        self._missed_labels_or_count = False
        self._label_counts, self._inputs, self._unlabelled_samples = [], [], []
        self.pending_micro_batches = 0

    def refuse_another_loss(self) -> None:
        """Check the micro-batches since the last call, which have to be those of one step.

        Raises:
            DecisionError: if the loss of the model is a mean over a different number of labels than the Trainer
                counted, or over other terms; if the model was called without labels that the batch has, or without
                their number; if micro-batches of several sizes have no labels.
        """
        inputs, self._inputs = self._inputs, []
        samples, self._unlabelled_samples, self.pending_micro_batches = self._unlabelled_samples or [], [], 0
        if len(set(samples)) > 1:
            raise DecisionError(uneven_micro_batches(samples))
        if self._missed_labels_or_count:
            raise DecisionError(
                f"the model was called without labels or {COUNT}, which the weights of micro-batches need: pass both "
                "to the model in your compute_loss and return its loss, or plan with accumulation forbidden"
            )
        batch = _joined(inputs)
        if self._is_checking:
            self._refuse_other_means(samples, batch)
        if inputs:
            self._check.refuse_coupled_samples(inputs[0] if batch is None else batch, is_part=batch is None)

    def _refuse_other_means(self, samples: list[int], batch: dict[str, Any] | None) -> None:
        """Check that model and Trainer count the same number of labels, and check the weights (`AccumulationCheck`).

        Args:
            samples: number of samples in each micro-batch, if they have no labels.
            batch: the micro-batches joined; None if they cannot be joined.
        """
        label_counts, self._label_counts = self._label_counts, []
        counts = [count.item() for count, _ in label_counts]
        if label_counts and sum(counts) != (trainers := label_counts[-1][1].item()) and not self.divides:
            raise DecisionError(
                f"the Trainer counted {trainers:g} labels in the micro-batches of a step, and the model's loss is a "
                f"mean over {sum(counts):g} of them, so that their weights would not add up to one: plan with "
                "accumulation forbidden"
            )
        weights = [count / sum(counts) for count in counts] if sum(counts) else [1 / len(samples) for _ in samples]
        self._check.refuse_other_weights(batch, weights)

    def _before_forward(
        self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Take the Trainer's label count out of the arguments, and watch the forward if it computes the loss."""
        self._count = kwargs.get(COUNT)
        kwargs = {name: value for name, value in kwargs.items() if name != COUNT}
        computes_loss = self._count is None or kwargs.get("labels") is not None
        if computes_loss and _trains(model):
            if not self.pending_micro_batches:
                self._check.refuse_dependence_on_calls(kwargs, is_part=True)
            self._inputs.append(kwargs)
            self._check.watch_part(None)
        return args, kwargs

    def _after_forward(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Weight the loss of a micro-batch. Also called, without an output, after a forward that failed."""
        count, self._count = self._count, None
        loss = _loss_in(output)
        self._check.after_loss(loss)
        labels = kwargs.get("labels")
        self.pending_micro_batches += _trains(model)
        # Note what `refuse_another_loss` needs.
        if count is None and _trains(model):
            if labels is not None or self.labelled:
                self._missed_labels_or_count |= self._is_checking
            elif self._unlabelled_samples is not None:
                self._unlabelled_samples.append(count_samples(kwargs, self.micro_batch_size))
        elif labels is None and self._warns_of_own_loss and _trains(model):
            self._warns_of_own_loss = False
            logger.warning(
                "the loss is computed outside of the model, where the plan cannot weight it: make sure that it is a "
                "sum divided by %s",
                COUNT,
            )
        # Weight the loss by this micro-batch's share of the labels.
        if count is None or loss is None or not isinstance(labels, torch.Tensor):
            return output
        own_count = self._count_labels(labels)
        count = torch.as_tensor(count, device=labels.device)
        if self._is_checking and _trains(model):
            self._label_counts.append((own_count, count))
        return _with_loss(output, weighted(loss, own_count / count))

    def _terms(self, part: dict[str, Any], samples: int) -> torch.Tensor | int:
        """Return the number of terms over which the loss of some samples is a mean: their labels, or else samples."""
        return self._count_labels(part["labels"]) if "labels" in part else samples

    def _count_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Count labels as the step of `rewrite.apply` does.

        If there is one label per sample, or labels are not class numbers, count them as the Trainer does.
        """
        if labels.dim() < 2 or labels.is_floating_point():
            return labels.ne(-100).sum(dtype=torch.float64)
        return counted_labels({"labels": labels}, len(labels), shifted=self.shifted, ignored=self.ignored)


def _joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Join micro-batches into a batch; None if they cannot be joined because shapes or other arguments differ."""
    batch: dict[str, Any] = {}
    for name in parts[0] if parts else ():
        values: list[Any] = [part.get(name) for part in parts]
        if all(isinstance(value, torch.Tensor) and value.dim() for value in values):
            if len({value.shape[1:] for value in values}) > 1:
                return None
            batch[name] = torch.cat(values)
        elif all(isinstance(value, list) for value in values):
            batch[name] = [item for value in values for item in value]
        elif (
            all(value is None or isinstance(value, (bool, int, float, str)) for value in values)
            and len(set(values)) == 1
        ):
            batch[name] = values[0]
        else:
            return None
    return batch or None


def uneven_micro_batches(samples: Sequence[int]) -> str:
    """Return the error message for micro-batches of different sizes without labels.

    Args:
        samples: number of samples in each micro-batch.
    """
    return (
        f"the micro-batches of a step have {', '.join(map(str, samples))} samples and no labels, so that the Trainer "
        "would take the mean of their losses as if they were of one size: give it dataloader_drop_last=True, or a "
        "number of samples that makes up whole batches, or plan with accumulation forbidden"
    )


def _trains(model: torch.nn.Module) -> bool:
    return model.training and torch.is_grad_enabled()


def full_precision_loss(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Returns the loss of a batch without the model's hooks and accelerate's autocast wrapper."""
    loss = _loss_in(vars(model).get("_original_forward", model.forward)(**batch))
    if loss is None:
        raise WorkloadError("the model returned no loss for samples of the batch")
    return loss


def _loss_in(output: Any) -> torch.Tensor | None:
    """Return the loss in a model's output, found as the Trainer finds it; None if there is none."""
    if isinstance(output, Mapping):
        return output.get("loss")
    return output[0] if isinstance(output, (tuple, list)) and output else None


def _with_loss(output: Any, loss: torch.Tensor) -> Any:
    """Returns the output with its loss replaced."""
    if isinstance(output, (tuple, list)):
        return (loss, *output[1:])
    output["loss"] = loss
    return output
