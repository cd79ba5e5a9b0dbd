"""Finds out which terms the loss of a rewritten step is a mean over, and writes the code that counts them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import EmittedCode, assignment
from planner.rewrite.portable.loss_terms import counted_labels, labels_of_experts, samples_only
from planner.rewrite.rewriting import LossWeight, Rewriting
from planner.workload.model_loss import own_loss


def loss_terms_of(rewriting: Rewriting) -> Callable[[Any, int], torch.Tensor | float]:
    """Return a function that takes a batch or a part of it, and its number of samples, and returns its loss terms.

    The terms are those that the user states. Otherwise they are read from the model, or are samples.
    """
    if rewriting.loss_weight is not None:
        return functools.partial(_stated_terms, loss_weight=rewriting.loss_weight)
    own = own_loss(rewriting.model, rewriting.calling, rewriting.loss_fn)
    if own is None:
        return samples_only
    if own.balances_experts:
        return functools.partial(labels_of_experts, shifted=own.shifted, ignored=own.ignored)
    return functools.partial(counted_labels, shifted=own.shifted, ignored=own.ignored, divides=own.divides)


def _stated_terms(batch: Any, samples: int, *, loss_weight: LossWeight) -> float:
    """Return the number of terms in a batch, according to the user's function `loss_weight`, as a Python float.

    A tensor on a GPU would not do: a quotient of integer tensors is computed in fp32, and a micro-batch with 0 terms
    could only be skipped after a synchronization.
    """
    return float(loss_weight(batch))


def terms_source(plan: Plan) -> EmittedCode:
    """Return the code that defines `loss_terms(batch, samples)` in an emitted file.

    If the plan knows how the model's own loss counts labels, the emitted code counts them in the same way. Otherwise
    the emitted training step has an argument `loss_terms`, a function that the user passes.
    """
    labels = next((entry for entry in plan.workload.batch if entry[0] == "labels"), None)
    own = plan.workload.own_loss
    by_labels = labels is not None and len(labels[1]) > 0 and "int" in labels[2] and own is not None and own.certain
    constants = [assignment("BATCH_SIZE", plan.workload.batch_size)]
    if plan.workload.not_by_sample:
        constants.append(assignment("NOT_BY_SAMPLE", plan.workload.not_by_sample) + _NOT_BY_SAMPLE_COMMENT)
    if by_labels and own is not None:
        constants.append(assignment("LABELS_SHIFTED", own.shifted) + _SHIFTED_COMMENT)
        constants.append(assignment("IGNORED_LABEL", own.ignored))
        if not own.balances_experts:
            constants.append(assignment("LOSS_DIVIDES", own.divides) + _DIVIDES_COMMENT)
    counting: tuple[Callable[..., Any], ...] = (samples_only,)
    if by_labels and own is not None:
        counting = (counted_labels, labels_of_experts) if own.balances_experts else (counted_labels,)
    return EmittedCode(
        imports=("import copy", "import dataclasses", "from collections.abc import Mapping"),
        constants=tuple(constants),
        functions=tuple(map(inspect.getsource, counting)),
        defaults=(_LOSS_TERMS_OF_EXPERTS if labels_of_experts in counting else _LOSS_TERMS,) if by_labels else (),
        options=("loss_terms=loss_terms",) if by_labels else ("loss_terms",),
        main_arguments=() if by_labels else ("loss_terms=samples_only",),
    )


_LOSS_TERMS = '''\
def loss_terms(batch, samples):
    """Count the terms that this model's loss is a mean over."""
    return counted_labels(batch, samples, shifted=LABELS_SHIFTED, ignored=IGNORED_LABEL, divides=LOSS_DIVIDES)
'''

_LOSS_TERMS_OF_EXPERTS = '''\
def loss_terms(batch, samples):
    """Count the terms that this model's loss is a mean over, besides the term that balances its experts."""
    return labels_of_experts(batch, samples, shifted=LABELS_SHIFTED, ignored=IGNORED_LABEL)
'''

_NOT_BY_SAMPLE_COMMENT = "  # paths of tensors that each micro-batch gets whole"

_SHIFTED_COMMENT = "  # True if the loss leaves out each sample's first label, as next-token losses do"

_DIVIDES_COMMENT = "  # True if the loss is a sum divided by num_items_in_batch, for batches that have it"
