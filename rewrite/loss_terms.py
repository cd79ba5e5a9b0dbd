"""Finds out which terms the loss of a rewritten step is a mean over."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from planner.rewrite.portable.loss_terms import counted_labels, samples_only
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
    return functools.partial(counted_labels, shifted=own.shifted, ignored=own.ignored, divides=own.divides)


def _stated_terms(batch: Any, samples: int, *, loss_weight: LossWeight) -> float:
    """Return the number of terms in a batch, according to the user's function `loss_weight`, as a Python float.

    A tensor on a GPU would not do: a quotient of integer tensors is computed in fp32, and a micro-batch with 0 terms
    could only be skipped after a synchronization.
    """
    return float(loss_weight(batch))
