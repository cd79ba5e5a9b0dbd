"""Choose two halves of samples to compare, so that wrong weights and coupled samples show.

Wrong weights show if one half has more loss terms than the other. Therefore one choice has samples with little padding
in one half and with much padding in the other, and one choice has mostly samples of one class in one half. Coupled
samples (a loss that compares samples) show if related samples are in different halves. Therefore one choice takes the
samples on both sides of a cut between micro-batches, and one has samples of each class in both halves. All choices are
deterministic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from planner.rewrite.portable.batch_slicing import map_tensors

_ADJACENT_PAIRS = 12
"""Maximum number of pairs of adjacent micro-batches that are compared."""


def probe_pairs(
    batch: Any, samples: int, chosen: int, micro_batch_size: int, turn: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the pairs of halves that the coupling check compares with their union, as indices of samples.

    In the first pair, samples with little padding are in one half and those with much in the other. The halves of the
    second are the samples before and after a cut between micro-batches. Further pairs differ in classes (`_by_class`).

    Args:
        samples: number of samples in the batch.
        chosen: number of samples in both halves together.
        turn: selects the cut between micro-batches; pass another number for each batch.
    """
    half = chosen // 2
    # Samples with the least padding in the first half, with the most in the second.
    order = amounts_of_padding(batch, samples).argsort(stable=True)
    indices = order[torch.linspace(0, samples - 1, chosen).round().long()]
    yield indices[:half], indices[half:]
    # Adjacent samples on both sides of a cut: groups of samples that belong together are cut there.
    cuts = range(micro_batch_size, samples, micro_batch_size) or [samples // 2]
    start = min(max(cuts[turn % len(cuts)] - half, 0), samples - chosen)
    indices = torch.arange(start, start + chosen)
    yield indices[:half], indices[half:]
    yield from _by_class(batch, samples, chosen)


def _by_class(batch: Any, samples: int, chosen: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields two pairs of halves by the classes of samples, if the batch has one label per sample and several classes.

    In the first pair, both halves have the same number of samples of each class: a loss over pairs of samples of one
    class then has pairs across the halves, which neither half has. In the second pair, the first half has
    samples of the most common class, as far as there are enough, and the second half has the other classes too.
    """
    labels = [t for t in tensors_of(batch, lambda _: True) if t.dim() == 1 and len(t) == samples and _is_integer(t)]
    for tensor in labels[:1]:
        classes, counts = tensor.cpu().unique(return_counts=True)
        if len(classes) == 1:
            continue
        by_class = [
            (tensor.cpu() == label).nonzero().flatten().tolist()
            for label in classes[counts.argsort(descending=True, stable=True)]
        ]
        first: list[int] = []
        second: list[int] = []
        for indices in by_class:
            pairs = min(len(indices) // 2, max(1, chosen // 4), chosen // 2 - len(first))
            first += indices[: 2 * pairs : 2]
            second += indices[1 : 2 * pairs : 2]
        if first:
            yield torch.tensor(first), torch.tensor(second)
        most_common = chosen - max(1, chosen // 4)
        uneven = [*by_class[0][:most_common], *itertools.chain(*by_class[1:])][:chosen]
        if chosen > 2:
            yield torch.tensor(uneven[: chosen // 2]), torch.tensor(uneven[chosen // 2 :])


def amounts_of_padding(batch: Any, samples: int) -> torch.Tensor:
    """Estimates how much padding each sample has, on an arbitrary scale, as one number per sample.

    Each tensor adds the fraction of padding in the sample, scaled to a maximum of 1. Padding is assumed to be the most
    common value of an integer tensor, and zero or NaN in a floating-point tensor. A tensor with one value per sample
    adds this value, unless it holds integers that all differ (identifiers of samples). In a list with one mapping per
    sample, samples with fewer elements count as more padded.
    """
    amounts = torch.zeros(samples, dtype=torch.float64)
    for tensor in tensors_of(batch, lambda mappings: len(mappings) == samples):
        if not tensor.dim() or len(tensor) != samples or tensor.is_complex():
            continue
        flat = tensor.detach().reshape(samples, -1)
        if flat.shape[1] > 1:
            if flat.is_floating_point():
                amount = ((flat == 0) | flat.isnan()).double().mean(1).cpu()
            else:
                integers = flat.long()
                amount = (integers == integers.flatten().mode().values).double().mean(1).cpu()
        elif flat.numel():
            amount = flat[:, 0].double().cpu()
            if not flat.is_floating_point() and len(amount.unique()) == samples > 2:  # identifiers of samples
                continue
            amount = torch.where(amount.isnan(), 2 * amount.nan_to_num().abs().max() + 1, amount)
        else:
            continue
        amounts += _scaled(amount)
    for mappings in _lists_of_samples(batch, samples):
        elements = [sum(t.numel() for t in tensors_of(mapping, lambda _: True)) for mapping in mappings]
        amounts -= _scaled(torch.tensor(elements, dtype=torch.float64))
    return amounts


def _scaled(values: torch.Tensor) -> torch.Tensor:
    """Scale values to a largest absolute value of 1. Returns zeros if the largest is zero or not finite."""
    largest = float(values.abs().max())
    return values / largest if math.isfinite(largest) and largest else torch.zeros_like(values)


def pairs_of_micro_batches(batch: Any, samples: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return several pairs of whole micro-batches, as indices of their samples.

    The pairs are up to 12 pairs of adjacent micro-batches, the first and the last micro-batch, and those with the least
    and the most padding. One pair is not enough: with a loss over the hardest samples only, two micro-batches often
    agree by chance.
    """
    blocks = torch.arange(samples).split(size)
    padding = torch.stack([amounts.mean() for amounts in amounts_of_padding(batch, samples).split(size)])
    last = len(blocks) - 1
    order = padding.argsort(stable=True).tolist()
    starts = set(torch.linspace(0, last - 1, min(_ADJACENT_PAIRS, last)).long().tolist())
    least, most = order[0], order[-1]
    pairs = {(start, start + 1) for start in starts} | {(0, last), (min(least, most), max(least, most))}
    return [(blocks[a], blocks[b]) for a, b in sorted(pairs) if a < b]


def tensors_of(batch: Any, leaves_out: Callable[[list[Any]], bool] = lambda mappings: False) -> list[torch.Tensor]:
    """Returns the tensors of a batch.

    Args:
        leaves_out: given a list of mappings in the batch, returns True if its tensors are left out.
    """
    tensors: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(note, batch, lambda mappings: mappings if leaves_out(mappings) else None)
    return tensors


def _lists_of_samples(batch: Any, samples: int) -> list[list[Any]]:
    """Returns the lists of a batch that have one mapping per sample."""
    lists: list[list[Any]] = []

    def note(mappings: list[Any]) -> list[Any] | None:
        if len(mappings) != samples:
            return None
        lists.append(mappings)
        return mappings

    map_tensors(lambda tensor: tensor, batch, note)
    return lists


def _is_integer(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
