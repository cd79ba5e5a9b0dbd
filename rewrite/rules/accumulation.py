"""Gradient accumulation: take one optimizer step from several micro-batches, with the gradient of the full batch.

The loss of a batch is a mean over its terms. Terms are samples, or for a language model the labels that are not
ignored. The mean equals the sum of the losses of the micro-batches, if each loss is multiplied by the fraction of the
batch's terms that are in its micro-batch. So gradient accumulation with these weights gives the gradient of the full
batch. Weighting by samples would not, if micro-batches have different numbers of labels that are not ignored.

Two things differ from the full batch. Sums run in another order, which rounds differently. And ops that combine several
samples only see one micro-batch: batch normalization computes its statistics from it. Dropout draws other masks.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable

import torch

from planner.errors import DecisionError
from planner.plan_types.decisions import Accumulation
from planner.plan_types.plan import Plan
from planner.plan_types.words import counted
from planner.rewrite.emitted_code import EmittedCode, assignment
from planner.rewrite.loss_terms import loss_terms_of, terms_source
from planner.rewrite.portable.batch_slicing import count_samples, map_tensors, samples_between
from planner.rewrite.portable.loss_and_clipping import weighted
from planner.rewrite.portable.loss_terms import as_tensor
from planner.rewrite.rewriting import Rewriting


def accumulation(rewriting: Rewriting, decision: Accumulation) -> None:
    """Make the training step split each batch into micro-batches.

    Raises:
        DecisionError: if the batch size does not give the planned number of micro-batches.
    """
    needed = -(-rewriting.batch_size // decision.micro_batch_size)
    if needed != decision.micro_batches:
        raise DecisionError(
            f"the plan has {decision.micro_batches} micro-batches of {counted(decision.micro_batch_size, 'sample')}, "
            f"but a batch of {counted(rewriting.batch_size, 'sample')} makes {needed}: make the plan again for this "
            "batch size"
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
    weight None. A micro-batch without terms is left out if one process trains; several processes wait for each other in
    every micro-batch. Every micro-batch gets the tensors whose paths `not_by_sample` names, such as 'mask', whole.
    """
    samples = count_samples(batch, batch_size, not_by_sample)
    if samples <= micro_batch_size:
        yield batch, None
        return
    terms = loss_terms(batch, samples)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        terms = as_tensor(terms, batch)
    if not isinstance(terms, torch.Tensor) and terms == 0:
        raise ValueError("the loss of this batch, which is a mean over zero terms, has no gradient: skip the batch")
    for start in range(0, samples, micro_batch_size):
        stop = min(start + micro_batch_size, samples)
        part = samples_between(start, stop, batch, samples, not_by_sample)
        share = loss_terms(part, stop - start) / terms
        if isinstance(share, torch.Tensor) or share != 0:  # a mean over no terms has the gradient NaN
            yield part, share


def accumulation_source(plan: Plan, decision: Accumulation) -> EmittedCode:
    """Return the code that does the same as `accumulation` in an emitted file."""
    terms = terms_source(plan)
    arguments = "batch, micro_batch_size=MICRO_BATCH_SIZE, batch_size=BATCH_SIZE, loss_terms=loss_terms"
    if plan.workload.not_by_sample:
        arguments += ", not_by_sample=NOT_BY_SAMPLE"
    functions: list[Callable] = [micro_batches, as_tensor, samples_between, count_samples, map_tensors]
    first, *others = terms.constants
    return dataclasses.replace(
        terms,
        constants=(first, assignment("MICRO_BATCH_SIZE", decision.micro_batch_size), *others),
        functions=(*map(inspect.getsource, functions), *terms.functions, inspect.getsource(weighted)),
        split=f"micro_batches({arguments})",
    )
