"""Lengths of samples, and the lengths of the batches that are made of them, in several orders."""

from __future__ import annotations

import json
import pathlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from planner.errors import WorkloadError

_MEGABATCHES = 50
"""Number of batches whose samples are sorted together when samples are grouped by length, as in transformers."""
FORMS = "one length per line, or 'length count' per line, or JSON: a list of lengths or an object {length: count}"


def read_lengths(path: pathlib.Path) -> list[int]:
    """Returns the lengths of samples from a file, in the order of the file.

    The file has one length per line; or a length and a count, separated by blanks, a comma or a tab, so that it is a
    histogram; or it is JSON with a list of lengths, or with an object of counts by length.

    Raises:
        WorkloadError: the file cannot be read, or has something else in it.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"the lengths in '{path}' cannot be read: {error}") from error
    try:
        data = json.loads(text) if text.lstrip()[:1] in ("[", "{") else _table(text)
        pairs = list(data.items()) if isinstance(data, dict) else [_pair(item) for item in data]
        lengths = [length for length, count in ((_whole(a), _whole(b)) for a, b in pairs) for _ in range(count)]
    except (ValueError, TypeError) as error:
        raise WorkloadError(f"the lengths in '{path}' cannot be read ({error}): give {FORMS}") from error
    if not lengths:
        raise WorkloadError(f"'{path}' has no lengths: give {FORMS}")
    return lengths


def _table(text: str) -> list[list[str]]:
    rows = [line.replace(",", " ").split() for line in text.splitlines()]
    return [row for row in rows if row]


def _pair(item: object) -> tuple[object, object]:
    """Returns a length and its count, which is 1 if it is not stated."""
    values = list(item) if isinstance(item, (list, tuple)) else [item]
    if len(values) not in (1, 2):
        raise ValueError(f"{item!r} is neither a length nor a length with a count")
    return (values[0], 1) if len(values) == 1 else (values[0], values[1])


def _whole(value: object) -> int:
    text = str(value)
    if isinstance(value, (bool, float)) or not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{value!r} is not a whole number above zero")
    return int(text)


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


def batch_lengths(
    lengths: Sequence[int],
    *,
    batch_size: int,
    seed: int,
    multiple: int = 1,
    longest: int | None = None,
    steps: int,
    arrange: Arrange = shuffled,
) -> list[int]:
    """Returns the length of each batch of a run: that of its longest sample, to which the others are padded.

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

    def epochs() -> Iterator[int]:
        while True:
            order = arrange(samples, batch_size, source)
            for start in range(0, len(order) - batch_size + 1, batch_size):
                yield padded(max(order[start : start + batch_size]), multiple, longest)

    batches = epochs()
    return [next(batches) for _ in range(steps)]


def padded(length: int, multiple: int, longest: int | None) -> int:
    """Returns a length after padding to a multiple, and after cutting what exceeds the longest length."""
    rounded = -(-length // multiple) * multiple
    return rounded if longest is None else min(rounded, longest)


def longest_first(batches: Sequence[int]) -> list[int]:
    """Returns the batches with the longest one moved to the beginning."""
    first = batches.index(max(batches))
    return [batches[first], *batches[:first], *batches[first + 1 :]]


def coarser(batches: Sequence[int], most: int) -> int:
    """Returns the smallest power of two to whose multiples the lengths can be padded so that at most `most` differ."""
    multiple = 1
    while len(Counter(-(-length // multiple) for length in batches)) > most:
        multiple *= 2
    return multiple
