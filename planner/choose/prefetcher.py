"""Starts recordings and rehearsals that the chooser will probably need next, while it still waits for others.

A recording takes seconds in a child process, and the chooser needs one after another. It tries configurations in a
fixed order (`Chooser._bounded_configs`), so the next ones are known: `with_upcoming` reads a few items ahead, and the
prefetcher starts their recordings in parallel. It never changes what is chosen, only when the work starts. A wrong
guess costs a core for a few seconds.

It makes two guesses. As long as no plan fits, several configurations will be tried, so their recordings start together.
The first configuration, however, often fits without recompute, so its certificate is rehearsed while the configuration
is still being recorded.
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
"""Number of configurations, including the present one, whose recordings are started together."""

Planned = tuple[tuple[Decision, ...], tuple[MicroBatching, ...]]
"""A configuration and the splits with which it is tried, in order."""

T = TypeVar("T")


class Prefetcher:
    """Starts recordings and certificates ahead of the search."""

    def __init__(self, candidates: ChunkedCandidates, certificates: Certificates) -> None:
        self._candidates, self._certificates = candidates, certificates

    def several(self, planned: Iterable[Planned]) -> None:
        """Start recordings of several configurations that will be tried soon, with the first split of each."""
        self._certificates.forget()  # no single guess is likely any more, and the cores are needed
        for config, splits in planned:
            self._candidates.prefetch(config, splits[:1])

    def first_split(self, config: tuple[Decision, ...], splits: tuple[MicroBatching, ...]) -> None:
        """Start the recording of a configuration with its first split."""
        self._candidates.prefetch(config, splits[:1])

    def all_splits(self, config: tuple[Decision, ...], splits: tuple[MicroBatching, ...]) -> None:
        """Start recordings for all splits of a configuration that does not fit with its first one."""
        self._certificates.forget()
        self._candidates.prefetch(config, splits)

    def smallest(self, planned: Iterable[Planned]) -> None:
        """Start recordings of configurations that may have the smallest peak, with all given splits."""
        for config, splits in planned:
            self._candidates.prefetch(config, splits)

    def with_certificate(self, config: tuple[Decision, ...], splits: tuple[MicroBatching, ...]) -> None:
        """Start recording a configuration with its first split, and start rehearsing that step without recompute.

        If the step fits without recompute, the search needs no other recording or rehearsal.
        """
        for split in splits[:1]:
            if self._candidates.get(config, split) is None:
                self._candidates.prefetch(config, (split,))
                self._certificates.foresee((*self._candidates.config(config, split), *split.decisions()))


def with_upcoming(items: Iterable[T], size: int = LOOKAHEAD) -> Iterator[tuple[T, ...]]:
    """Yields each item together with the items after it, `size` items in all; the last windows are shorter."""
    remaining = iter(items)
    window = collections.deque(itertools.islice(remaining, size))
    while window:
        yield tuple(window)
        window.popleft()
        window.extend(itertools.islice(remaining, 1))
