"""Compares a recorded stream of allocations with the rehearsed one: the matched share, and the ops that differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from benchmarks.card.alignment import Comparison, Difference, align
from benchmarks.card.predicting import BEFORE, Place, Prediction

SHOWN_DIFFERENCES = 12
"""Maximum number of differences in a row."""
SHOWN_EVENTS = 12
"""Maximum number of events of each stream in a difference."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of comparing two streams."""

    matched_share: float
    """Fraction of the bytes of all recorded allocations that the rehearsal has too, in the same order."""
    missing_bytes: int
    """Bytes of recorded allocations that were not rehearsed."""
    surplus_bytes: int
    """Bytes of rehearsed allocations that were not recorded."""
    missing_by_op: dict[str, int]
    """Missing bytes by the rehearsed op before them (scratch memory follows an op's outputs), the largest first."""
    surplus_by_op: dict[str, int]
    differences: list[dict[str, object]]
    """The first differences: rehearsed ops around each (`after`, `before`), recorded and rehearsed bytes in order."""


def compare_steps(recorded: Sequence[int], step_ends: Sequence[int], prediction: Prediction) -> Finding:
    """Compare in two parts: the set-up with the first step, and the second step.

    Args:
        recorded: signed bytes of at least two steps.
        step_ends: index in `recorded` of the end of the set-up, of the first and of the second step.
    """
    split = prediction.second_step_event
    first = align(recorded[: step_ends[1]], prediction.sizes[:split])
    second = align(recorded[step_ends[1] : step_ends[2]], prediction.sizes[split:])
    located = [*_located(first, prediction, 0), *_located(second, prediction, split)]
    missing: dict[str, int] = {}
    surplus: dict[str, int] = {}
    for difference, after, _ in located:
        _count(missing, difference.recorded, after)
        for offset, size in enumerate(difference.rehearsed):
            _count(surplus, (size,), prediction.places[difference.at_event + offset])
    recorded_bytes = first.recorded_bytes + second.recorded_bytes
    return Finding(
        matched_share=(first.matched_bytes + second.matched_bytes) / recorded_bytes if recorded_bytes else 1.0,
        missing_bytes=sum(missing.values()),
        surplus_bytes=sum(surplus.values()),
        missing_by_op=_largest_first(missing),
        surplus_by_op=_largest_first(surplus),
        differences=[_shown(*found) for found in located[:SHOWN_DIFFERENCES]],
    )


def _located(found: Comparison, prediction: Prediction, offset: int) -> list[tuple[Difference, Place, Place]]:
    """Returns each difference with its position in the whole stream, and the ops around it."""
    places = prediction.places
    result = []
    for difference in found.differences:
        at = difference.at_event + offset
        after = places[at - 1] if at else BEFORE
        following = at + len(difference.rehearsed)
        before = places[following] if following < len(places) else after
        result.append((dataclasses.replace(difference, at_event=at), after, before))
    return result


def _count(totals: dict[str, int], sizes: Sequence[int], place: Place) -> None:
    """Add the allocated bytes to the op's total."""
    taken = sum(size for size in sizes if size > 0)
    if taken:
        name = place.op or "before the first step"
        totals[name] = totals.get(name, 0) + taken


def _largest_first(totals: dict[str, int]) -> dict[str, int]:
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


def _shown(difference: Difference, after: Place, before: Place) -> dict[str, object]:
    """Returns the difference as data for a row."""
    return {
        "at_event": difference.at_event,
        "after": str(after),
        "before": str(before),
        "recorded": list(difference.recorded[:SHOWN_EVENTS]),
        "rehearsed": list(difference.rehearsed[:SHOWN_EVENTS]),
    }
