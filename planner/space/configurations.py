"""The configurations of a search space, in the order in which they are tried, and the splits of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from planner.plan_types.decision_base import Decision, Role, conflict, has_role, with_roles
from planner.space.micro_batches import MicroBatching
from planner.space.search_space import SearchSpace

Config = tuple[Decision, ...]
"""A configuration: the decisions about precision, loss, optimizer and time of the update."""


class Configurations:
    """Lists the configurations of a search space.

    The user's optimizer comes before its replacements, and the fastest precision first, so that it prunes others.
    """

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._unchunked: set[Config] = set()
        """Decisions about the time of the update with which a step with its loss in chunks could not be rehearsed."""

    def __iter__(self) -> Iterator[Config]:
        """Yields all configurations in the order in which they are tried."""
        for optimizer, update in itertools.product(self._space.optimizers, self._space.updates):
            for precision, loss in itertools.product(reversed(self._space.precisions), self._space.losses):
                config = (*precision, *loss, *optimizer, *update)
                if conflict(config) is None and not (loss and update in self._unchunked):
                    yield config

    def clash(self) -> str | None:
        """Returns why two decisions of this search space cannot be combined (the first such pair); None if all can."""
        space = self._space
        alternatives = itertools.product(space.optimizers, space.updates, space.precisions, space.losses)
        pairs = itertools.product((tuple(itertools.chain(*parts)) for parts in alternatives), space.splits)
        return next(filter(None, (conflict((*config, *split.decisions())) for config, split in pairs)), None)

    def splits(self, config: Config) -> tuple[MicroBatching, ...]:
        """Returns the splits with which a configuration is tried.

        If the loss can be computed in chunks, a configuration without chunks is tried with the whole batch only,
        because chunks save more memory than micro-batches and cost less time.
        """
        return tuple(
            split
            for split in (self._space.splits[:1] if self.could_use_chunks(config) else self._space.splits)
            if conflict((*config, *split.decisions())) is None
        )

    def could_use_chunks(self, config: Config) -> bool:
        """True if `config` computes its loss without chunks, and the same configuration with chunks is available."""
        update = with_roles(config, Role.UPDATE_TIME)
        return len(self._space.losses) > 1 and not has_role(config, Role.LOSS) and update not in self._unchunked

    def that_may_recompute(self) -> Iterator[Config]:
        """Yields the configurations in which modules may be recomputed.

        A configuration without chunks is left out if the loss can be computed in chunks, because chunks save more
        memory and cost less time.
        """
        return (config for config in self if not self.could_use_chunks(config))

    def leave_chunks_out(self, update: Config) -> bool:
        """Leave configurations with the loss in chunks and this time of the update out; False if they are already."""
        is_new = update not in self._unchunked
        self._unchunked.add(update)
        return is_new
