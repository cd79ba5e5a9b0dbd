"""The checkpoint problem: which units to recompute so that memory stays inside a budget at the least cost.

Time is an index of events 0..E-1 of the recorded step. A *unit* is a module whose calls may be
checkpointed. Bytes come in three kinds: those alive whatever is chosen (`fixed_bytes`), those held
on a condition (`Hold`), and those a recompute adds at one event (`Recompute`).
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hold:
    """`size_bytes` alive at events start <= e < stop if ANY of these holds:

    - some set in `unless` contains no selected unit (an empty set therefore always holds),
    - some unit in `when` is selected.
    """

    size_bytes: int
    start: int
    stop: int
    unless: tuple[tuple[int, ...], ...]
    when: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recompute:
    """If `unit` is selected, `extra_bytes` more are alive at event `at`, beside the curve at that event."""

    unit: int
    at: int
    extra_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointProblem:
    """Everything the search knows."""

    fixed_bytes: np.ndarray
    """int64[E]: bytes alive at each event whatever is chosen."""
    holds: tuple[Hold, ...]
    recomputes: tuple[Recompute, ...]
    """Several per unit are possible (one per call). They do not add up: each is a separate peak."""
    cost_ns: tuple[int, ...]
    """Time to recompute each unit, all its calls together; its length is the number of units."""
    paths: tuple[tuple[int, ...], ...]
    """At most one unit of each tuple may be selected (a unit and what it is nested in)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """Units to recompute, and what that takes."""

    units: tuple[int, ...]
    """Sorted."""
    peak_bytes: int
    """Largest value of the memory curve with these units selected, recomputes included."""
    cost_ns: int
    status: str
    """'optimal' or 'time limit'."""
    gap: float
    """Relative distance between `cost_ns` (or the peak, when that was minimised) and the proven bound."""
    seconds: float
