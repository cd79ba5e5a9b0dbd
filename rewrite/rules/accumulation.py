"""Gradient accumulation: take one optimizer step from several micro-batches, with the gradient of the full batch.

The loss of a batch is a mean over its terms. Terms are samples, or for a language model the labels that are not
ignored. The mean equals the sum of the losses of the micro-batches, if each loss is multiplied by the fraction of the
batch's terms that are in its micro-batch. So gradient accumulation with these weights gives the gradient of the full
batch. Weighting by samples would not, if micro-batches have different numbers of labels that are not ignored.

Two things differ from the full batch. Sums run in another order, which rounds differently. And ops that combine several
samples only see one micro-batch: batch normalization computes its statistics from it. Dropout draws other masks.
"""

from __future__ import annotations

import functools
import inspect

import torch

from planner.errors import DecisionError
from planner.plan_types.decisions import Accumulation
from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import EmittedCode, assignment
from planner.rewrite.loss_terms import loss_terms_of
from planner.rewrite.portable.batch_slicing import count_samples, map_tensors, samples_between
from planner.rewrite.portable.loss_and_clipping import weighted
from planner.rewrite.portable.loss_terms import counted_labels, samples_only
from planner.rewrite.rewriting import Rewriting


def accumulation(rewriting: Rewriting, decision: Accumulation) -> None:
    """Make the training step split each batch into micro-batches.

    Raises:
        DecisionError: if the batch size does not give the planned number of micro-batches.
    """
    needed = -(-rewriting.batch_size // decision.micro_batch_size)
    if needed != decision.micro_batches:
        raise DecisionError(
            f"the plan has {decision.micro_batches} micro-batches of {decision.micro_batch_size} samples, but a batch "
            f"of {rewriting.batch_size} samples makes {needed}: make the plan again for this batch size"
        )
    loss_terms = loss_terms_of(rewriting)
    rewriting.loss_terms = loss_terms
    rewriting.split = functools.partial(
        micro_batches,
        micro_batch_size=decision.micro_batch_size,
        batch_size=rewriting.batch_size,
        loss_terms=loss_terms,
        not_by_sample=rewriting.not_by_sample,
    )


# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


def micro_batches(batch, *, micro_batch_size, batch_size, loss_terms, not_by_sample=()):
    """Yield the micro-batches of a batch, each with the weight that its loss must be multiplied by.

    The weight is the fraction of the batch's terms that are in the micro-batch. `loss_terms(batch, samples)` returns
    the number of terms that the loss is a mean over. A batch that fits into one micro-batch is yielded whole, with the
    weight None. A micro-batch without terms is left out. Every micro-batch gets the tensors whose paths `not_by_sample`
    names, such as 'mask', whole.
    """
    samples = count_samples(batch, batch_size, not_by_sample)
    if samples <= micro_batch_size:
        yield batch, None
        return
    terms = loss_terms(batch, samples)
    if not isinstance(terms, torch.Tensor) and terms == 0:
        raise ValueError("the loss of this batch, which is a mean over zero terms, has no gradient: skip the batch")
    for start in range(0, samples, micro_batch_size):
        stop = min(start + micro_batch_size, samples)
        part = samples_between(start, stop, batch, samples, not_by_sample)
        share = loss_terms(part, stop - start) / terms
        if isinstance(share, torch.Tensor) or share != 0:  # a mean over no terms has the gradient NaN
            yield part, share


def accumulation_source(plan: Plan, decision: Accumulation) -> EmittedCode:
    """Return the code that does the same as `accumulation` in an emitted file.

    If the plan knows how the model's own loss counts labels, the emitted code counts them in the same way. Otherwise
    the emitted training step has an argument `loss_terms`, a function that the user passes.
    """
    labels = next((entry for entry in plan.workload.batch if entry[0] == "labels"), None)
    own = plan.workload.own_loss
    by_labels = labels is not None and len(labels[1]) > 0 and "int" in labels[2] and own is not None and own.certain
    counting = counted_labels if by_labels else samples_only
    functions = (micro_batches, samples_between, count_samples, map_tensors, counting)
    arguments = "batch, micro_batch_size=MICRO_BATCH_SIZE, batch_size=BATCH_SIZE, loss_terms=loss_terms"
    constants = [
        assignment("BATCH_SIZE", plan.workload.batch_size),
        assignment("MICRO_BATCH_SIZE", decision.micro_batch_size),
    ]
    if plan.workload.not_by_sample:
        constants.append(assignment("NOT_BY_SAMPLE", plan.workload.not_by_sample) + _NOT_BY_SAMPLE_COMMENT)
        arguments += ", not_by_sample=NOT_BY_SAMPLE"
    if by_labels and own is not None:
        constants.append(assignment("LABELS_SHIFTED", own.shifted) + _SHIFTED_COMMENT)
        constants.append(assignment("IGNORED_LABEL", own.ignored))
        constants.append(assignment("LOSS_DIVIDES", own.divides) + _DIVIDES_COMMENT)
    return EmittedCode(
        imports=(
            "import copy",
            "import dataclasses",
            "from collections.abc import Mapping",
        ),
        constants=tuple(constants),
        functions=(
            *map(inspect.getsource, functions),
            inspect.getsource(weighted),
        ),
        defaults=(_LOSS_TERMS,) if by_labels else (),
        split=f"micro_batches({arguments})",
        options=("loss_terms=loss_terms",) if by_labels else ("loss_terms",),
        main_arguments=() if by_labels else ("loss_terms=samples_only",),
    )


_LOSS_TERMS = '''\
def loss_terms(batch, samples):
    """Count the terms that this model's loss is a mean over."""
    return counted_labels(batch, samples, shifted=LABELS_SHIFTED, ignored=IGNORED_LABEL, divides=LOSS_DIVIDES)
'''

_NOT_BY_SAMPLE_COMMENT = "  # paths of tensors that each micro-batch gets whole"

_SHIFTED_COMMENT = "  # True if the loss leaves out each sample's first label, as next-token losses do"

_DIVIDES_COMMENT = "  # True if the loss is a sum divided by num_items_in_batch, for batches that have it"
