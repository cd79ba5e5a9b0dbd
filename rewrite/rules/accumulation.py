"""Accumulation: one optimizer step from micro-batches, with the gradient of the full batch.

The loss of a batch is a mean over its terms, so the loss of the whole is the sum of the parts' losses, each
weighted by its share of the terms. Terms are samples, or for token losses the labels that count: a mean over
uneven parts weighted by samples would be another loss. Only the order of the sum differs from the full batch.
What looks across samples differs too: batch normalisation sees the micro-batch, dropout draws other masks.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import torch

from planner.errors import DecisionError
from planner.plan_types.decisions import Accumulation
from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import EmittedCode, assignment
from planner.rewrite.portable.batch_slicing import count_samples, map_tensors, samples_between
from planner.rewrite.portable.loss_and_clipping import weighted
from planner.rewrite.rewriting import LossWeight, Rewriting
from planner.workload.model_loss import own_loss


def accumulation(rewriting: Rewriting, decision: Accumulation) -> None:
    """Make the step split its batch. Raises `DecisionError` if the parts do not make up the planned batch."""
    needed = -(-rewriting.batch_size // decision.micro_batch_size)
    if needed != decision.micro_batches:
        raise DecisionError(
            f"accumulation plans {decision.micro_batches} micro-batches of {decision.micro_batch_size} samples, but a "
            f"batch of {rewriting.batch_size} makes {needed}: make the plan again for this batch size"
        )
    if rewriting.loss_weight is not None:
        loss_terms = functools.partial(_stated_terms, loss_weight=rewriting.loss_weight)
    else:
        own = own_loss(rewriting.model, rewriting.calling, rewriting.loss_fn)
        loss_terms = samples_only if own is None else functools.partial(counted_labels, **dataclasses.asdict(own))
    rewriting.loss_terms = loss_terms
    rewriting.split = functools.partial(
        micro_batches,
        micro_batch_size=decision.micro_batch_size,
        batch_size=rewriting.batch_size,
        loss_terms=loss_terms,
    )


def _stated_terms(batch: Any, samples: int, *, loss_weight: LossWeight) -> float:
    """As a number on the host: whole ones on a device have a quotient in fp32, and zero must be seen to be left out."""
    return float(loss_weight(batch))


# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


def micro_batches(batch, *, micro_batch_size, batch_size, loss_terms):
    """Parts of a batch, each with the weight of its loss: its share of the terms that the batch's loss averages."""
    samples = count_samples(batch, batch_size)
    if samples <= micro_batch_size:
        yield batch, None
        return
    terms = loss_terms(batch, samples)
    if not isinstance(terms, torch.Tensor) and terms == 0:
        raise ValueError("the loss of this batch is a mean over no term at all: leave the batch out")
    for start in range(0, samples, micro_batch_size):
        stop = min(start + micro_batch_size, samples)
        part = samples_between(start, stop, batch, samples)
        share = loss_terms(part, stop - start) / terms
        if isinstance(share, torch.Tensor) or share != 0:  # a mean over nothing has gradients that are not finite
            yield part, share


def samples_only(batch, samples):
    """For a loss that is a mean over samples. For one over other terms count those of the batch, for a sum return 1."""
    return samples


def counted_labels(batch, samples, *, shifted, ignored, divides=False):
    """The loss is a mean over the labels that count, on the device of the labels; over samples without such labels.

    Where the batch says by which number the model divides a sum instead, the losses of its parts are summed up.
    """
    if divides and batch.get("num_items_in_batch") is not None:
        return 1.0
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.dim() < 1 or labels.is_floating_point():
        return samples
    return (labels[..., 1:] if shifted and labels.dim() > 1 else labels).ne(ignored).sum(dtype=torch.float64)


def accumulation_source(plan: Plan, decision: Accumulation) -> EmittedCode:
    labels = next((entry for entry in plan.workload.batch if entry[0] == "labels"), None)
    by_labels = labels is not None and len(labels[1]) > 0 and "int" in labels[2] and plan.workload.own_loss is not None
    counting = counted_labels if by_labels else samples_only
    functions = (micro_batches, samples_between, count_samples, map_tensors, counting)
    arguments = "batch, micro_batch_size=MICRO_BATCH_SIZE, batch_size=BATCH_SIZE"
    constants = [
        assignment("BATCH_SIZE", plan.workload.batch_size),
        assignment("MICRO_BATCH_SIZE", decision.micro_batch_size),
    ]
    if by_labels:
        own = plan.workload.own_loss
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
            *([_LOSS_TERMS] if by_labels else []),
            inspect.getsource(weighted),
        ),
        split=f"micro_batches({arguments}, loss_terms=loss_terms)",
        options=("loss_terms=loss_terms",) if by_labels else ("loss_terms",),
        main_arguments=() if by_labels else ("loss_terms=samples_only",),
    )


_LOSS_TERMS = '''\
def loss_terms(batch, samples):
    """As this model's loss counts."""
    return counted_labels(batch, samples, shifted=LABELS_SHIFTED, ignored=IGNORED_LABEL, divides=LOSS_DIVIDES)
'''

_SHIFTED_COMMENT = "  # whether the model's loss leaves out each sample's first label (next-token losses do)"


_DIVIDES_COMMENT = "  # whether the model's loss is a sum divided by num_items_in_batch, where a batch has that"
