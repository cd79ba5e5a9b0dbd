"""Starts recordings and rehearsals that the chooser will probably need next, while it still waits for others.

A recording takes seconds in a child process, and the chooser asks for one recording after another. It tries
configurations in a fixed order (`Chooser._bounded_configs`), so the next configurations are known: `with_upcoming`
reads a few of them ahead, and the prefetcher starts their recordings in parallel. As soon as the search has found a
plan, the prefetcher starts the recordings of the optimizer updates of all configurations that may be faster and whose
steps have been recorded. These recordings are short. All this changes only when the work starts, and never what is
chosen. A wrong guess keeps a core busy for a few seconds.

While a configuration is recorded, the most likely choice is rehearsed for its certificate. The most likely choice is
the best plan so far, because few later configurations are faster by more than 5 % (`TIE`). A best plan that recomputes
modules is not rehearsed, because it will probably recompute other ones when the allocator's slack is known. If no plan
has been found, the most likely choice is the present configuration without recompute, but only if a simpler recording
shows that this probably fits. Else several configurations will be tried until one fits, so their recordings start
together.
"""

from __future__ import annotations

import collections
import itertools
import os
from collections.abc import Iterable, Iterator
from typing import TypeVar

from planner.choose.candidates import ChunkedCandidates
from planner.choose.certificates import Certificates
from planner.plan_types.decision_base import Decision, Role, has_role
from planner.space.micro_batches import MicroBatching

LOOKAHEAD = max(2, min(os.cpu_count() or 2, 4))
"""Number of configurations whose steps are recorded together: the present one and the next ones."""

Planned = tuple[tuple[Decision, ...], tuple[MicroBatching, ...]]
"""A configuration and the splits with which it is tried, in order."""

T = TypeVar("T")


class Prefetcher:
    """Starts recordings and certificates ahead of the search."""

    def __init__(self, candidates: ChunkedCandidates, certificates: Certificates) -> None:
        self._candidates, self._certificates = candidates, certificates

    def several(self, planned: Iterable[Planned]) -> None:
        """Start recordings of several configurations that will be tried soon, with the first split of each."""
        for config, splits in planned:
            self._candidates.prefetch(config, splits[:1])

    def first_split(
        self,
        config: tuple[Decision, ...],
        splits: tuple[MicroBatching, ...],
        *,
        best: tuple[Decision, ...],
        is_likely: bool,
    ) -> None:
        """Start the recording of a configuration with its first split, and the certificate of the most likely choice.

        Args:
            best: decisions of the best plan so far; empty if there is none. The certificate of this plan is started,
                unless the plan recomputes modules, because the allocator's slack will probably change which ones.
            is_likely: True if the configuration probably fits without recompute. The certificate of that step is then
                started if that of `best` is not.
        """
        best = () if has_role(best, Role.RECOMPUTE) else best
        for split in splits[:1]:
            if self._candidates.get(config, split) is None:
                self._candidates.prefetch(config, (split,))
                if best or is_likely:
                    self._certificates.foresee(best or self._without_recompute(config, split))

    def updates(self, planned: Iterable[Planned]) -> None:
        """Start recordings of the updates of these configurations (first splits), if their steps have been recorded."""
        for config, splits in planned:
            self._candidates.prefetch(config, splits[:1], updates_only=True)

    def all_splits(self, config: tuple[Decision, ...], splits: tuple[MicroBatching, ...]) -> None:
        """Start recordings for all splits of a configuration that does not fit with its first split."""
        self._certificates.forget(self._without_recompute(config, splits[0]))
        self._candidates.prefetch(config, splits)

    def smallest(self, planned: Iterable[Planned]) -> None:
        """Start recordings of configurations that may have the smallest peak, with all given splits."""
        for config, splits in planned:
            self._candidates.prefetch(config, splits)

    def _without_recompute(self, config: tuple[Decision, ...], split: MicroBatching) -> tuple[Decision, ...]:
        """Returns the decisions of the plan of a configuration that recomputes nothing."""
        return (*self._candidates.config(config, split), *split.decisions())


def with_upcoming(items: Iterable[T], size: int = LOOKAHEAD) -> Iterator[tuple[T, ...]]:
    """Yields for each item a tuple of this item and the next `size - 1` items; the last tuples are shorter."""
    remaining = iter(items)
    window = collections.deque(itertools.islice(remaining, size))
    while window:
        yield tuple(window)
        window.popleft()
        window.extend(itertools.islice(remaining, 1))
