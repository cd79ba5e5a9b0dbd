"""The greedy search for a selection within the budget is limited in its time and in the number of conditions."""

from __future__ import annotations

import itertools
import types

import numpy as np
import pytest

from planner.search import repair
from planner.search.curve import CompiledProblem
from planner.search.presolve import Presolve
from planner.search.problem import CheckpointProblem, Hold

pytestmark = pytest.mark.no_torch


def descended(problem: CheckpointProblem, *, moves: int) -> tuple[int, ...]:
    """Returns the selection that the search finds from the empty one. No selection fits."""
    reduced = Presolve(problem).above(0)
    return repair.descend(CompiledProblem(reduced.problem), reduced, (), budget_bytes=-1, moves=moves)


def tensors_at_one_event(sizes_bytes: list[int], cost_ns: list[int]) -> CheckpointProblem:
    """A problem in which each unit frees one tensor, and all tensors are alive at the only event."""
    return CheckpointProblem(
        fixed_bytes=np.zeros(1, np.int64),
        holds=tuple(
            Hold(size_bytes=size_bytes, start=0, stop=1, unless=((unit,),), when=())
            for unit, size_bytes in enumerate(sizes_bytes)
        ),
        recomputes=(),
        cost_ns=tuple(cost_ns),
        paths=(),
    )


@pytest.mark.parametrize(("seconds_per_look", "moves"), [(0.0, 20), (1.0, 3), (10.0, 0)])
def test_a_search_ends_when_its_time_is_up(seconds_per_look, moves, monkeypatch):
    """Each look at the clock takes the given time. The search begins with the first look."""
    clock = itertools.count(0.0, seconds_per_look)
    monkeypatch.setattr(repair, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    assert len(descended(tensors_at_one_event([512] * 20, [1] * 20), moves=20)) == moves


def test_a_move_looks_at_the_largest_of_many_conditions():
    """The smallest tensors would free the most bytes per ns, but there are too many tensors, so they are left out."""
    small, large = 50, repair._MOST_CONDITIONS
    sizes_bytes = [512 * (unit + 1) for unit in range(small + large)]
    problem = tensors_at_one_event(sizes_bytes, [0] * small + [10**9] * large)
    assert descended(problem, moves=1) == (small + large - 1,)
