"""Which samples of a batch are tried: those in which a fault of weights or coupling would show."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from planner.rewrite.portable.batch_slicing import map_tensors

_PAIRS = 12
"""Of micro-batches beside each other."""


def probe_pairs(
    batch: Any, samples: int, few: int, micro_batch_size: int, turn: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Numbers of samples of two parts: by padding, from both sides of a cut, and by their commonest labels.

    Args:
        few: how many samples both parts have together.
        turn: which cut is looked at; another one in another batch.
    """
    half = few // 2
    order = amounts_of_padding(batch, samples).argsort(stable=True)
    rows = order[torch.linspace(0, samples - 1, few).round().long()]
    yield rows[:half], rows[half:]
    cuts = range(micro_batch_size, samples, micro_batch_size) or [samples // 2]
    start = min(max(cuts[turn % len(cuts)] - half, 0), samples - few)
    rows = torch.arange(start, start + few)
    yield rows[:half], rows[half:]
    yield from _by_labels(batch, samples, few)


def _by_labels(batch: Any, samples: int, few: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of the commonest labels.

    As many samples of each in one part as in the other: a loss over pairs of a class has some in both together that no
    part has. And three quarters with the commonest one, so that the parts have other shares of it than the whole.
    """
    labels = [t for t in _tensors(batch) if t.dim() == 1 and len(t) == samples and _is_whole(t)]
    for tensor in labels[:1]:
        values, counts = tensor.cpu().unique(return_counts=True)
        if len(values) == 1:
            continue
        by_label = [
            (tensor.cpu() == value).nonzero().flatten().tolist()
            for value in values[counts.argsort(descending=True, stable=True)]
        ]
        firsts, seconds = [], []
        for rows in by_label:
            pairs = min(len(rows) // 2, max(1, few // 4), few // 2 - len(firsts))
            firsts += rows[: 2 * pairs : 2]
            seconds += rows[1 : 2 * pairs : 2]
        if firsts:
            yield torch.tensor(firsts), torch.tensor(seconds)
        most = few - max(1, few // 4)
        uneven = [*by_label[0][:most], *itertools.chain(*by_label[1:])][:few]
        if few > 2:
            yield torch.tensor(uneven[: few // 2]), torch.tensor(uneven[few // 2 :])


def amounts_of_padding(batch: Any, samples: int) -> torch.Tensor:
    """For each sample.

    Padding is what is commonest in a tensor, or zero or no number among those that are not whole. Samples without a
    second dimension differ by their value, unless all of them do.
    """
    amounts = torch.zeros(samples, dtype=torch.float64)
    for tensor in _tensors(batch, samples):
        if not tensor.dim() or len(tensor) != samples or tensor.is_complex():
            continue
        flat = tensor.detach().reshape(samples, -1)
        if flat.shape[1] > 1:
            if flat.is_floating_point():
                found = ((flat == 0) | flat.isnan()).double().mean(1).cpu()
            else:
                whole = flat.long()
                found = (whole == whole.flatten().mode().values).double().mean(1).cpu()
        elif flat.numel():
            found = flat[:, 0].double().cpu()
            if not flat.is_floating_point() and len(found.unique()) == samples > 2:  # names of samples
                continue
            found = torch.where(found.isnan(), 2 * found.nan_to_num().abs().max() + 1, found)
        else:
            continue
        amounts += _scaled(found)
    for mappings in _lists(batch, samples):
        filled = [sum(t.numel() for t in _tensors(mapping)) for mapping in mappings]
        amounts -= _scaled(torch.tensor(filled, dtype=torch.float64))
    return amounts


def _scaled(found: torch.Tensor) -> torch.Tensor:
    most = found.abs().max()
    return found / most if math.isfinite(most) and most else torch.zeros_like(found)


def pairs_of_blocks(batch: Any, samples: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Numbers of the samples of some pairs of micro-batches, that with least padding and that with most among them.

    Several: over the hardest samples of each, two micro-batches often agree by chance.
    """
    blocks = torch.arange(samples).split(size)
    amounts = torch.stack([each.mean() for each in amounts_of_padding(batch, samples).split(size)])
    last = len(blocks) - 1
    order = amounts.argsort(stable=True).tolist()
    firsts = set(torch.linspace(0, last - 1, min(_PAIRS, last)).long().tolist())
    pairs = {(first, first + 1) for first in firsts} | {(0, last), (min(order[0], order[-1]), max(order[0], order[-1]))}
    return [(blocks[a], blocks[b]) for a, b in sorted(pairs) if a < b]


def _tensors(batch: Any, samples: int | None = None) -> list[torch.Tensor]:
    """Without those of lists that have a mapping for each sample."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, batch, lambda mappings: mappings if samples in (None, len(mappings)) else None)
    return found


def _lists(batch: Any, samples: int) -> list[list[Any]]:
    """Those that have a mapping for each sample."""
    found: list[list[Any]] = []

    def note(mappings: list[Any]) -> list[Any] | None:
        if len(mappings) != samples:
            return None
        found.append(mappings)
        return mappings

    map_tensors(lambda tensor: tensor, batch, note)
    return found


def _is_whole(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
