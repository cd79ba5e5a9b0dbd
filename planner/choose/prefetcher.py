"""Starts recordings and rehearsals that the chooser will probably need next, while it still waits for others.

A recording takes seconds in a child process, and the chooser asks for one recording after another. It tries
configurations in a fixed order (`Chooser._bounded_configs`), so the next configurations are known: `with_upcoming`
reads a few of them ahead, and the prefetcher starts their recordings in parallel. This changes only when the work
starts, and never what is chosen. A wrong guess keeps a core busy for a few seconds.

The prefetcher makes two guesses. The first configuration often fits without recompute, so its certificate is rehearsed
while it is still being recorded. If it did not fit, several configurations will be tried until a plan fits, so their
recordings start together.
"""

from __future__ import annotations

import collections
import itertools
import os
from collections.abc import Iterable, Iterator
from typing import TypeVar

from planner.choose.candidates import ChunkedCandidates
from planner.choose.certificates import Certificates
from planner.plan_types.decision_base import Decision
from planner.space.micro_batches import MicroBatching

LOOKAHEAD = max(2, min(os.cpu_count() or 2, 4))
"""Number of configurations whose recordings are started together: the present one and the next ones."""

Planned = tuple[tuple[Decision, ...], tuple[MicroBatching, ...]]
"""A configuration and the splits with which it is tried, in order."""

T = TypeVar("T")


class Prefetcher:
    """Starts recordings and certificates ahead of the search."""

    def __init__(self, candidates: ChunkedCandidates, certificates: Certificates) -> None:
        self._candidates, self._certificates = candidates, certificates

    def several(self, planned: Iterable[Planned]) -> None:
        """Start recordings of several configurations that will be tried soon, with the first split of each."""
        self._certificates.forget()  # that certificate is no longer likely to be needed, and recordings need the cores
        for config, splits in planned:
            self._candidates.prefetch(config, splits[:1])

    def first_split(self, config: tuple[Decision, ...], splits: tuple[MicroBatching, ...]) -> None:
        """Start the recording of a configuration with its first split."""
        self._candidates.prefetch(config, splits[:1])

    def all_splits(self, config: tuple[Decision, ...], splits: tuple[MicroBatching, ...]) -> None:
        """Start recordings for all splits of a configuration that does not fit with its first split."""
        self._certificates.forget()
        self._candidates.prefetch(config, splits)

    def smallest(self, planned: Iterable[Planned]) -> None:
        """Start recordings of configurations that may have the smallest peak, with all given splits."""
        for config, splits in planned:
            self._candidates.prefetch(config, splits)

    def with_certificate(self, config: tuple[Decision, ...], splits: tuple[MicroBatching, ...]) -> None:
        """Start recording a configuration with its first split, and start rehearsing the same step for a certificate.

        If the step fits without recompute, the search needs no other recording and no other certificate.
        """
        for split in splits[:1]:
            if self._candidates.get(config, split) is None:
                self._candidates.prefetch(config, (split,))
                self._certificates.foresee((*self._candidates.config(config, split), *split.decisions()))


def with_upcoming(items: Iterable[T], size: int = LOOKAHEAD) -> Iterator[tuple[T, ...]]:
    """Yields for each item a tuple of this item and the next `size - 1` items; the last tuples are shorter."""
    remaining = iter(items)
    window = collections.deque(itertools.islice(remaining, size))
    while window:
        yield tuple(window)
        window.popleft()
        window.extend(itertools.islice(remaining, 1))
