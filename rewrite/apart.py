"""Whether the loss of a batch is made of the losses of its parts, tried out on a few samples.

A loss that compares samples with each other (contrastive ones, such as CLIP's), or a mean over what no label tells,
looks like any other: its parts have losses too. So the loss of the first samples of a batch is taken together, and that
of the first one apart from that of the others: in evaluation and without gradients, of no more samples than a
micro-batch has (or two), which takes less memory than to train by it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from planner.errors import DecisionError
from rewrite.rules.accumulation import count_samples, map_tensors, samples_between

logger = logging.getLogger(__name__)

_SAMPLES = 8
"""At most. More of them differ in more."""

_TOLERANCE, _ROUGH_TOLERANCE = 3e-3, 5e-2
"""Of the loss. In a lower precision, or with TF32, one sample is not computed as it is beside another."""


def refuse_coupled_samples(
    model: torch.nn.Module,
    batch: Any,
    *,
    batch_size: int,
    micro_batch_size: int,
    loss_of: Callable[[Any], torch.Tensor],
    terms_of: Callable[[Any, int], torch.Tensor | float],
    rough: bool,
    way_out: str = "forbid accumulation, or give apply loss_weight=... where it is a sum or another mean",
) -> None:
    """Raise `DecisionError` if samples have another loss than they have in two parts, each with its weight.

    Nothing is said where that cannot be tried: of losses that are random, of models that have none in evaluation or
    take no single sample.

    Args:
        batch_size: how many samples a batch was planned to have.
        loss_of: the loss of a batch, from the model.
        terms_of: from a batch and its samples, over how many terms its loss is taken to be a mean.
        rough: whether the loss is computed in a lower precision.
        way_out: what to do instead.
    """
    tensors: list[torch.Tensor] = list(model.parameters())
    map_tensors(tensors.append, batch)
    if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
        return
    rough = rough or any(tensor.is_floating_point() and tensor.itemsize < 4 for tensor in tensors)
    try:
        samples = count_samples(batch, batch_size)
        few = min(samples, _SAMPLES, max(2, micro_batch_size))
        if few < 2:
            return
        whole, first, others = (samples_between(*bounds, batch, samples) for bounds in ((0, few), (0, 1), (1, few)))
        with _looked_at(model, {tensor.device for tensor in tensors}):
            terms = float(terms_of(first, 1)), float(terms_of(others, few - 1))
            all_terms = float(terms_of(whole, few))
            together, again = float(loss_of(whole)), float(loss_of(whole))
            parts = zip((first, others), terms, strict=True)
            added = sum(float(loss_of(part)) * count for part, count in parts if count)
    except Exception as error:  # of the model or its loss, in evaluation: training may go well all the same
        logger.warning("the loss could not be tried on parts of a batch (%s: %s)", type(error).__name__, error)
        return
    if together != again or not all_terms:
        return
    added /= all_terms
    bound = (_ROUGH_TOLERANCE if rough else _TOLERANCE) * max(abs(together), abs(added))
    if math.isnan(added) or abs(together - added) > bound:
        raise DecisionError(
            f"the loss of the first {few} samples is {together:.6g}, and {added:.6g} where the first is taken apart "
            "from the others, as micro-batches are: it compares samples, or is a sum, or a mean over something else "
            f"than samples or labels; {way_out}"
        )


@contextlib.contextmanager
def _looked_at(model: torch.nn.Module, devices: set[torch.device]) -> Iterator[None]:
    """In evaluation, without gradients; modes, buffers and random numbers are afterwards as they were."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    numpy, numbers = sys.modules.get("numpy"), random.getstate()
    arrays = None if numpy is None else numpy.random.get_state()
    cards = [device for device in devices if device.type == "cuda"]
    try:
        with torch.no_grad(), torch.random.fork_rng(cards):
            for module, _ in modes:
                module.training = False  # past a `train` of its own, which may merge weights
            yield
    finally:
        torch.clear_autocast_cache()  # of weights without gradients
        random.setstate(numbers)
        if numpy is not None:
            numpy.random.set_state(arrays)
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        for module, mode in modes:
            module.training = mode
