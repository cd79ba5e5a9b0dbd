"""Accumulation: one optimizer step from several micro-batches, with the gradient of the full batch.

The loss of a batch is a mean over its terms. It equals the sum of the micro-batches' losses, each weighted by its share
of the terms, so gradient accumulation with these weights gives the gradient of the full batch. The terms are samples,
or for token losses the labels that count: if micro-batches have different numbers of counted labels, weighting by
samples would compute another loss.

Two things differ from the full batch. Sums run in another order, which rounds differently. And whatever looks across
samples sees the micro-batch only: batch normalisation normalises over it, and dropout draws other masks.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
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
    """Make the step split its batch into micro-batches.

    Raises:
        DecisionError: if the micro-batches do not add up to the planned batch.
    """
    needed = -(-rewriting.batch_size // decision.micro_batch_size)
    if needed != decision.micro_batches:
        raise DecisionError(
            f"accumulation plans {decision.micro_batches} micro-batches of {decision.micro_batch_size} samples, but a "
            f"batch of {rewriting.batch_size} makes {needed}: make the plan again for this batch size"
        )
    # Which terms the loss is a mean over: the user says, else it is read from the model, else it is samples.
    loss_terms: Callable[[Any, int], torch.Tensor | float]
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
    """Return the user's weight as a number on the host.

    On a device, integers would be divided in fp32. Besides, the step has to know on the host whether a weight is zero,
    because it skips such a micro-batch.
    """
    return float(loss_weight(batch))


# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


def micro_batches(batch, *, micro_batch_size, batch_size, loss_terms):
    """Yield micro-batches, each with the weight of its loss: its share of the terms that the batch's loss averages.

    A batch that fits into one micro-batch is yielded whole, with the weight None. A micro-batch in which no term
    counts is left out.
    """
    samples = count_samples(batch, batch_size)
    if samples <= micro_batch_size:
        yield batch, None
        return
    terms = loss_terms(batch, samples)
    if not isinstance(terms, torch.Tensor) and terms == 0:
        raise ValueError("no term of this batch counts in its loss, which is a mean over zero terms: skip the batch")
    for start in range(0, samples, micro_batch_size):
        stop = min(start + micro_batch_size, samples)
        part = samples_between(start, stop, batch, samples)
        share = loss_terms(part, stop - start) / terms
        if isinstance(share, torch.Tensor) or share != 0:  # a mean over no terms has the gradient NaN
            yield part, share


def samples_only(batch, samples):
    """Count the terms of a loss that is a mean over samples.

    For a mean over other terms write a function that counts those; for a loss that is a sum return 1.
    """
    return samples


def counted_labels(batch, samples, *, shifted, ignored, divides=False):
    """Count the terms of a loss that is a mean over labels, on their device; over samples if there are no such labels.

    shifted: the first label of each sample does not count. ignored: labels with this value do not count.
    divides: if the batch has `num_items_in_batch`, the loss is a sum divided by that number, and micro-batch losses add
    up without weights.
    """
    if divides and batch.get("num_items_in_batch") is not None:
        return 1.0
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.dim() < 1 or labels.is_floating_point():
        return samples
    return (labels[..., 1:] if shifted and labels.dim() > 1 else labels).ne(ignored).sum(dtype=torch.float64)


def accumulation_source(plan: Plan, decision: Accumulation) -> EmittedCode:
    """Return the emitted counterpart of `accumulation`.

    If the plan knows how the model's own loss counts labels, the file counts them in the same way. Otherwise its
    training step has an argument `loss_terms`.
    """
    labels = next((entry for entry in plan.workload.batch if entry[0] == "labels"), None)
    own = plan.workload.own_loss
    by_labels = labels is not None and len(labels[1]) > 0 and "int" in labels[2] and own is not None
    counting = counted_labels if by_labels else samples_only
    functions = (micro_batches, samples_between, count_samples, map_tensors, counting)
    arguments = "batch, micro_batch_size=MICRO_BATCH_SIZE, batch_size=BATCH_SIZE"
    constants = [
        assignment("BATCH_SIZE", plan.workload.batch_size),
        assignment("MICRO_BATCH_SIZE", decision.micro_batch_size),
    ]
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
            *([_LOSS_TERMS] if by_labels else []),
            inspect.getsource(weighted),
        ),
        split=f"micro_batches({arguments}, loss_terms=loss_terms)",
        options=("loss_terms=loss_terms",) if by_labels else ("loss_terms",),
        main_arguments=() if by_labels else ("loss_terms=samples_only",),
    )


_LOSS_TERMS = '''\
def loss_terms(batch, samples):
    """Count the terms that this model's loss is a mean over."""
    return counted_labels(batch, samples, shifted=LABELS_SHIFTED, ignored=IGNORED_LABEL, divides=LOSS_DIVIDES)
'''

_SHIFTED_COMMENT = "  # True if the loss leaves out each sample's first label, as next-token losses do"

_DIVIDES_COMMENT = "  # True if the loss is a sum divided by num_items_in_batch, for batches that have it"
