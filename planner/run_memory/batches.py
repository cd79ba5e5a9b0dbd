"""The shapes of the batches that are made of samples of different lengths, in several orders."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

_MEGABATCHES = 50
"""Number of batches whose samples are sorted together when samples are grouped by length, as in transformers."""


class BatchShape(NamedTuple):
    """The size of a batch."""

    samples: int
    length: int
    """Tokens of each sample, with padding."""

    @property
    def tokens(self) -> int:
        return self.samples * self.length


Arrange = Callable[[Sequence[int], int, random.Random], list[int]]
"""Returns the order of the samples: their lengths, given the lengths, the batch size, and a source of randomness."""


def shuffled(lengths: Sequence[int], batch_size: int, source: random.Random) -> list[int]:
    """Returns the lengths in random order."""
    return source.sample(lengths, len(lengths))


def grouped(lengths: Sequence[int], batch_size: int, source: random.Random) -> list[int]:
    """Returns the lengths in the order of transformers' `group_by_length`.

    Samples are shuffled, and sorted within groups of 50 batches, longest first. The longest sample comes first of all.
    """
    order = shuffled(lengths, batch_size, source)
    size = batch_size * max(min(len(order) // (batch_size * 4), _MEGABATCHES), 1)
    groups = [sorted(order[start : start + size], reverse=True) for start in range(0, len(order), size)]
    longest = max(range(len(groups)), key=lambda number: groups[number][0])
    groups[0][0], groups[longest][0] = groups[longest][0], groups[0][0]
    return [length for group in groups for length in group]


def batches_of_samples(
    lengths: Sequence[int],
    *,
    batch_size: int,
    seed: int,
    multiple: int = 1,
    longest: int | None = None,
    steps: int,
    arrange: Arrange = shuffled,
) -> list[BatchShape]:
    """Returns the batches of a run with a fixed number of samples. All samples are padded to the longest of the batch.

    Each epoch has its own order. The last batch of an epoch is left out if it has fewer samples than the others.

    Args:
        lengths: lengths of all samples.
        batch_size: number of samples in a batch. If there are fewer samples, they are repeated.
        seed: seed of the random orders.
        multiple: batches are padded to a multiple of this length.
        longest: longer samples are cut to this length; None for no limit.
        steps: number of batches.
        arrange: order of the samples in an epoch.
    """
    source = random.Random(seed)
    samples = list(lengths) * -(-batch_size // len(lengths))

    def epochs() -> Iterator[BatchShape]:
        while True:
            order = arrange(samples, batch_size, source)
            for start in range(0, len(order) - batch_size + 1, batch_size):
                yield BatchShape(batch_size, padded(max(order[start : start + batch_size]), multiple, longest))

    return list(itertools.islice(epochs(), steps))


def batches_of_tokens(
    lengths: Sequence[int],
    *,
    most_tokens: int,
    parts: int = 1,
    seed: int,
    multiple: int = 1,
    longest: int | None = None,
    steps: int,
) -> list[BatchShape]:
    """Returns the batches of a run with a limit on the tokens of a batch, padding included.

    The samples are sorted by length and cut into batches. The order of the batches is random in each epoch.

    Args:
        lengths: lengths of all samples.
        most_tokens: maximum number of tokens in a batch; at least `parts` times the longest length.
        parts: the number of samples in each batch is a multiple of this number of micro-batches.
        seed, multiple, longest, steps: as in `batches_of_samples`.
    """
    source, waiting = random.Random(seed), sorted(lengths, reverse=True)
    batches: list[BatchShape] = []
    while waiting:
        length = padded(waiting[0], multiple, longest)
        count = most_tokens // length // parts * parts
        if count < 1:
            raise ValueError(f"{parts} samples of {length} tokens exceed {most_tokens} tokens")
        if count > len(waiting) and batches:
            break
        batches.append(BatchShape(count, length))
        del waiting[:count]
    epochs = (source.sample(batches, len(batches)) for _ in itertools.count())
    return list(itertools.islice(itertools.chain.from_iterable(epochs), steps))


def padded(length: int, multiple: int, longest: int | None) -> int:
    """Returns a length after padding to a multiple, and after cutting what exceeds the longest length."""
    rounded = -(-length // multiple) * multiple
    return rounded if longest is None else min(rounded, longest)


def largest_first(batches: Sequence[BatchShape]) -> list[BatchShape]:
    """Returns the batches with the largest one moved to the beginning."""
    first = batches.index(max(batches, key=by_size))
    return [batches[first], *batches[:first], *batches[first + 1 :]]


def by_size(shape: BatchShape) -> tuple[int, int]:
    """Returns the key that sorts batches by their tokens, and those of as many tokens by their length."""
    return shape.tokens, shape.length


def coarser(lengths: Iterable[int], most: int) -> int:
    """Returns the smallest power of two to whose multiples the lengths can be padded so that at most `most` differ."""
    different, multiple = set(lengths), 1
    while len({-(-length // multiple) for length in different}) > most:
        multiple *= 2
    return multiple
