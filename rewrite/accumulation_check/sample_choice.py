"""Choose which samples of a batch are compared: those in which wrong weights or coupled samples would show.

Wrong weights show if the two halves have different shares of the terms, so samples are ordered by their amount of
padding, and taken with uneven classes. Coupling shows if related samples are in different halves, so samples are taken
from both sides of a cut between micro-batches, and with each class in both halves. All choices are deterministic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from planner.rewrite.portable.batch_slicing import map_tensors

_ADJACENT_PAIRS = 12
"""Maximum number of pairs of adjacent micro-batches that are compared."""


def probe_pairs(
    batch: Any, samples: int, chosen: int, micro_batch_size: int, turn: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the indices of the samples of two halves: by padding, around a cut, and by class.

    Args:
        samples: number of samples in the batch.
        chosen: number of samples in both halves together.
        turn: which cut between micro-batches is used; pass another number for each batch.
    """
    half = chosen // 2
    # From the least padding to the most: the halves have the largest difference in terms.
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
    """Yields choices by the most common classes, if the batch has one label per sample.

    First with as many samples of each class in one half as in the other: a loss over pairs of one class has pairs in
    the whole that neither half has. Then with three quarters from the most common class, so that the halves have other
    shares of the classes than the whole.
    """
    labels = [t for t in _tensors(batch) if t.dim() == 1 and len(t) == samples and _is_integer(t)]
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
    """Estimates how much padding each sample has, on an arbitrary scale.

    Padding is taken to be the most common value of an integer tensor, and zero or NaN in other tensors; each tensor
    adds its share, scaled to 1. In a list with one mapping per sample, samples with fewer elements count as more
    padded. Tensors with one value per sample add that value, unless all integers differ (identifiers of samples).
    """
    amounts = torch.zeros(samples, dtype=torch.float64)
    for tensor in _tensors(batch, samples):
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
        elements = [sum(t.numel() for t in _tensors(mapping)) for mapping in mappings]
        amounts -= _scaled(torch.tensor(elements, dtype=torch.float64))
    return amounts


def _scaled(values: torch.Tensor) -> torch.Tensor:
    """Scales to a maximum magnitude of 1; zeros if the maximum is zero or not finite."""
    largest = float(values.abs().max())
    return values / largest if math.isfinite(largest) and largest else torch.zeros_like(values)


def pairs_of_micro_batches(batch: Any, samples: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Indices of the samples of several pairs of whole micro-batches.

    The pairs are up to 12 adjacent ones, the first and the last, and the ones with the least and the most padding. One
    pair would not do: for losses over the hardest samples, two micro-batches often agree by chance.
    """
    blocks = torch.arange(samples).split(size)
    padding = torch.stack([amounts.mean() for amounts in amounts_of_padding(batch, samples).split(size)])
    last = len(blocks) - 1
    order = padding.argsort(stable=True).tolist()
    starts = set(torch.linspace(0, last - 1, min(_ADJACENT_PAIRS, last)).long().tolist())
    least, most = order[0], order[-1]
    pairs = {(start, start + 1) for start in starts} | {(0, last), (min(least, most), max(least, most))}
    return [(blocks[a], blocks[b]) for a, b in sorted(pairs) if a < b]


def _tensors(batch: Any, samples: int | None = None) -> list[torch.Tensor]:
    """Returns the tensors of a batch, without those in lists of one mapping per sample (None: in any such list)."""
    tensors: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(note, batch, lambda mappings: mappings if samples in (None, len(mappings)) else None)
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
