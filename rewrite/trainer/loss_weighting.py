"""The loss of a micro-batch as its share of the batch's, in transformers' Trainer, which steps by itself.

The Trainer counts the labels of all micro-batches of a step, and calls the model with that number. What it trains with
on a whole batch is what is kept: for a model that divides by that number, the sum over its own labels divided by it,
also where the two are not the same (transformers 5.23 counts the first label of each sample for `GPT2LMHeadModel`,
whose loss leaves it out); for all others the mean over the labels of the batch, which has to be the same number.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

from planner.errors import DecisionError
from planner.plan_types.decision_base import Role, has_role
from planner.plan_types.plan import Plan
from planner.rewrite.accumulation_check.coupling_check import CouplingCheck
from planner.rewrite.accumulation_check.reduction_check import ReductionWatcher
from planner.rewrite.portable.batch_slicing import count_samples
from planner.rewrite.portable.loss_and_clipping import weighted
from planner.rewrite.rules.accumulation import counted_labels
from planner.rewrite.trainer.arguments import micro_batches
from planner.workload.model_loss import divides_by_count, ignored_label, shifts_labels, takes_the_loss

logger = logging.getLogger(__name__)

COUNT = "num_items_in_batch"
"""The Trainer's word for how many labels all micro-batches of a step have."""


@final
class LossWeighting:
    """Weights the mean loss that a model returns for a micro-batch by its share of the labels of the batch.

    Where a batch has no `labels` that the Trainer counts, it takes the mean of all micro-batches alike, and so they
    have to be of one size.
    """

    def __init__(
        self,
        *,
        shifted: bool,
        ignored: int,
        divides: bool,
        labelled: bool,
        size: int,
        batch_size: int,
        in_lower: bool,
        in_chunks: bool,
    ) -> None:
        self.shifted, self.ignored = shifted, ignored
        self.divides = divides
        """Whether the model itself divides by the number that it is called with."""
        self.labelled = labelled
        """Whether the planned batch has labels."""
        self.size = size
        """Samples of a whole micro-batch."""
        self._tried: CouplingCheck | None = None
        if not in_chunks:  # or else logits are never held whole
            self._tried = CouplingCheck(
                batch_size=batch_size, micro_batch_size=size, terms_of=self._terms, doubled=in_lower,
                way_out="plan with accumulation forbidden",
            )  # fmt: skip
        self._of_batch: Any = None
        """The Trainer's count, from before a forward to after it."""
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        """Labels of each micro-batch and of its batch, while they are watched."""
        self._means: ReductionWatcher | None = None
        """What the losses of a step were means over, while they are watched."""
        self._model: torch.nn.Module | None = None
        self._parts: list[dict[str, Any]] = []
        """What the model was called with for the micro-batches of a step, which the Trainer holds as well."""
        self._is_right = False
        """Whether means were seen to be no part of the loss, or of single samples."""
        self._forward = contextlib.ExitStack()
        """Closed after each forward."""
        self._note_loss: Callable[[torch.Tensor], None] | None = None
        self._samples: list[int] | None = None
        """Of the micro-batches without labels of a step, once somebody looks."""
        self._was_not_told = self._warns_of_own_loss = False
        self.pending_micro_batches = 0
        """Micro-batches since the last look."""

    @classmethod
    def of(cls, model: torch.nn.Module, plan: Plan) -> LossWeighting:
        return cls(
            shifted=shifts_labels(model),
            ignored=ignored_label(model),
            divides=divides_by_count(type(takes_the_loss(model))),
            labelled=any(path.partition(".")[0] == "labels" for path, _, _ in plan.workload.batch),
            size=micro_batches(plan)[0],
            batch_size=plan.workload.batch_size,
            in_lower=has_role(plan.decisions, Role.PRECISION),
            in_chunks=has_role(plan.decisions, Role.LOSS),
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
        self._means = ReductionWatcher(may_be_stated=False) if wanted else None
        self._warns_of_own_loss = wanted
        self._parts, self._is_right = [], False
        self._samples, self.pending_micro_batches = [], 0

    def refuse_another_loss(self) -> None:
        """Look at the micro-batches since the last look: those of one step. Of those without labels at any time.

        Raises:
            DecisionError: where the model's loss is a mean over another number of labels than the Trainer counted, or
                over other terms; where the model was called without labels that there are, or without their number;
                or where micro-batches of several sizes have no labels.
        """
        inputs, self._parts = self._parts, []
        samples, self._samples, self.pending_micro_batches = self._samples or [], [], 0
        if len(set(samples)) > 1:
            raise DecisionError(told_uneven(samples))
        if self._was_not_told:
            raise DecisionError(
                f"the model was called without labels or without {COUNT}, by which micro-batches are weighted: pass "
                "both on in a compute_loss of your own and take the loss that the model returns, or plan with "
                "accumulation forbidden"
            )
        whole = _joined(inputs)
        if self._seen is not None:
            self._refuse_other_means(samples, whole)
        if inputs and self._tried is not None:
            loss_of = functools.partial(_loss_in_full, self._model)
            batch = inputs[0] if whole is None else whole
            self._tried.refuse_coupled_samples(self._model, batch, loss_of, is_part=whole is None)

    def _refuse_other_means(self, samples: list[int], whole: dict[str, Any] | None) -> None:
        """`samples`: of micro-batches without labels. `whole`: the batch, where it could be put together."""
        seen, self._seen = self._seen, []
        means, self._means = self._means, ReductionWatcher(may_be_stated=False)
        parts = [part.item() for part, _ in seen]
        if seen and sum(parts) != (theirs := seen[-1][1].item()) and not self.divides:
            raise DecisionError(
                f"the Trainer counted {theirs:g} labels in the micro-batches of a step, and the model's loss is a mean "
                f"over {sum(parts):g} of them: their shares would not add up to one batch; plan with accumulation "
                "forbidden"
            )
        weights = [part / sum(parts) for part in parts] if sum(parts) else [1 / len(samples) for _ in samples]
        if not weights or self._is_right:
            return
        try:
            means.refuse_other_weights(weights)
        except DecisionError:
            options = {"parts": means.farthest_off, "among": means.parts}
            loss_of = functools.partial(_loss_in_full, self._model)
            if self._tried is None or whole is None:
                raise
            if not self._tried.agrees(self._model, whole, loss_of, **options):
                raise
            self._is_right = True

    def _before(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        self._of_batch = kwargs.get(COUNT)
        kwargs = {name: value for name, value in kwargs.items() if name != COUNT}
        takes_loss = self._of_batch is None or kwargs.get("labels") is not None
        if takes_loss and _trains(model):
            self._model = model
            self._parts.append(kwargs)
            if self._means is not None:
                self._note_loss = self._forward.enter_context(self._means.part(None))
        return args, kwargs

    def _terms(self, part: dict[str, Any], samples: int) -> torch.Tensor | int:
        return self._count(part["labels"]) if "labels" in part else samples

    def _after(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Called after a forward that failed as well, without an output."""
        of_batch, self._of_batch = self._of_batch, None
        note_loss, self._note_loss = self._note_loss, None
        self._forward.close()
        loss = _loss_in(output)
        if note_loss is not None and loss is not None:
            note_loss(loss)
        labels = kwargs.get("labels")
        self.pending_micro_batches += _trains(model)
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


def _joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """One batch of the micro-batches; None where their tensors are of several shapes, or something else differs."""
    whole: dict[str, Any] = {}
    for name in parts[0] if parts else ():
        values = [part.get(name) for part in parts]
        if all(isinstance(value, torch.Tensor) and value.dim() for value in values):
            if len({value.shape[1:] for value in values}) > 1:
                return None
            whole[name] = torch.cat(values)
        elif all(isinstance(value, list) for value in values):
            whole[name] = [item for value in values for item in value]
        elif (
            all(value is None or isinstance(value, (bool, int, float, str)) for value in values)
            and len(set(values)) == 1
        ):
            whole[name] = values[0]
        else:
            return None
    return whole or None


def told_uneven(samples: Sequence[int]) -> str:
    return (
        f"the micro-batches of a step have {', '.join(map(str, samples))} samples and no labels, so that the Trainer "
        "would take the mean of their losses as if they were of one size: give it as many samples as make up whole "
        "batches, or plan with accumulation forbidden"
    )


def _trains(model: torch.nn.Module) -> bool:
    return model.training and torch.is_grad_enabled()


def _loss_in_full(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor | None:
    """Past the hooks on the model, and past the forward in lower precision that accelerate puts around its own."""
    return _loss_in(vars(model).get("_original_forward", model.forward)(**batch))


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
