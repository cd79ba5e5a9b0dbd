"""Builds the integer programs of recordings. Recordings that differ only in their optimizer update share one.

Which units there are, what they free and what they cost follows from the step before its update. To build this takes
seconds for a large model, and the bytes that an update adds to it are only added to the bytes that are always alive.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from planner.derive.cut_update import cut_update
from planner.recompute.units import Units
from planner.recording.step_graph import StepGraph
from planner.search.milp import Search

Build = Callable[[StepGraph, list[int]], Units]
"""Builds the units of a recording from it and the time of each of its ops in nanoseconds."""


class Program:
    """The units of a recording, and the integer program that selects some of them."""

    def __init__(self, units: Units, shared: _Shared | None = None) -> None:
        """
        Args:
            shared: the program of the recording before its update; None if it cannot be separated from the update.
        """
        self.units, self._shared = units, shared

    @functools.cached_property
    def search(self) -> Search:
        """The integer program."""
        if self._shared is None:
            return Search(self.units.problem)
        return self._shared.search.with_fixed_bytes(self.units.problem.fixed_bytes)


@dataclasses.dataclass(kw_only=True)
class _Shared:
    """The program of a recording before its update."""

    before: Callable[[], StepGraph]
    """Returns the recording before its update. A recording of a large model takes hundreds of megabytes."""
    op_ns: Sequence[int]
    units: Units

    @functools.cached_property
    def search(self) -> Search:
        return Search(self.units.problem)

    def with_update(self, update_bytes: np.ndarray) -> Program:
        problem = dataclasses.replace(self.units.problem, fixed_bytes=self.units.problem.fixed_bytes + update_bytes)
        return Program(dataclasses.replace(self.units, problem=problem), self)


class Programs:
    """Builds the programs of recordings, and keeps those of recordings before their updates."""

    def __init__(self) -> None:
        self._known: dict[Hashable, list[_Shared]] = defaultdict(list)

    def of(
        self,
        recording: Callable[[], StepGraph],
        op_ns: list[int],
        build: Build,
        *,
        granularity_bytes: int,
        key: Hashable,
    ) -> Program:
        """Returns the program of a recording.

        Args:
            recording: returns the recording, each time the same.
            op_ns: time of each op in nanoseconds.
            build: builds the units.
            granularity_bytes: storage sizes are rounded up to a multiple of it.
            key: only recordings with the same key are compared. Whatever `build` depends on besides its arguments has
                to be the same for all recordings with a key.
        """
        graph = recording()
        cut = cut_update(graph, granularity_bytes=granularity_bytes)
        if cut is None:
            return Program(build(graph, op_ns))
        times = op_ns[: len(cut.before.ops)]
        for shared in self._known[key]:
            if shared.op_ns == times and shared.before() == cut.before:
                return shared.with_update(cut.update_bytes)

        def before() -> StepGraph:
            again = cut_update(recording(), granularity_bytes=granularity_bytes)
            assert again is not None
            return again.before

        shared = _Shared(before=before, op_ns=times, units=build(cut.before, times))
        self._known[key].append(shared)
        return shared.with_update(cut.update_bytes)

    def clear(self) -> None:
        """Forget all programs."""
        self._known.clear()
