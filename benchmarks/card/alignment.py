"""Align two streams of signed sizes with the fewest insertions and deletions.

Myers, An O(ND) Difference Algorithm and Its Variations, Algorithmica 1 (1986): it finds the alignment with the smallest
number D of differences in (N + M) D steps. A layer's stream resembles the next layer's, so an alignment by longest
common runs (`difflib`) slips by a layer at the first difference; the shortest edit does not.

Not optimal beyond `MOST_DIFFERENCES`: then the path that got furthest is kept, and the rest is aligned from there, so
that streams with little in common take linear time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

MOST_DIFFERENCES = 600
"""Maximum number of differences in one piece. Time grows with its square: 0.2 s for this number."""

Pairs = list[tuple[int, int]]
"""Positions of equal elements in two sequences, both ascending."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """A place where two streams differ, with the events of both."""

    at_event: int
    """Position in the rehearsed stream."""
    recorded: tuple[int, ...]
    """Bytes taken (positive) and freed (negative), each rounded up to the allocator's granularity."""
    rehearsed: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The part of a recorded stream that a rehearsed one has in the same order."""

    matched_bytes: int
    recorded_bytes: int
    """Bytes of all recorded allocations."""
    differences: tuple[Difference, ...]

    @property
    def matched_share(self) -> float:
        """Fraction of the recorded bytes that is matched."""
        return self.matched_bytes / self.recorded_bytes


def align(recorded: Sequence[int], rehearsed: Sequence[int]) -> Comparison:
    """Compare two streams of bytes taken (positive) and freed (negative), rounded to the allocator's granularity."""
    pairs = _matched(rehearsed, recorded)
    differences = []
    end = (len(rehearsed), len(recorded))
    for (a, c), (b, d) in itertools.pairwise([(-1, -1), *pairs, end]):
        if b > a + 1 or d > c + 1:
            differences.append(
                Difference(at_event=a + 1, recorded=tuple(recorded[c + 1 : d]), rehearsed=tuple(rehearsed[a + 1 : b]))
            )
    return Comparison(
        matched_bytes=sum(rehearsed[a] for a, _ in pairs if rehearsed[a] > 0),
        recorded_bytes=sum(size for size in recorded if size > 0),
        differences=tuple(differences),
    )


def _matched(one: Sequence[int], other: Sequence[int]) -> Pairs:
    """Align piece by piece, each with at most `MOST_DIFFERENCES`."""
    found: Pairs = []
    x = y = 0
    while x < len(one) and y < len(other):
        pairs, (right, down) = _shortest_edit(one[x:], other[y:])
        found += [(x + a, y + b) for a, b in pairs]
        x, y = x + right, y + down
    return found


def _shortest_edit(one: Sequence[int], other: Sequence[int]) -> tuple[Pairs, tuple[int, int]]:
    """Returns the pairs of the shortest edit, and how far they reach: all of both, or up to `MOST_DIFFERENCES`.

    Myers' greedy search: the furthest point on each diagonal k = x - y, for 0, 1, 2 ... differences.
    """
    n, m = len(one), len(other)
    reached = {1: 0}
    history: list[dict[int, int]] = []
    for count in range(MOST_DIFFERENCES + 1):
        history.append(reached)
        furthest: dict[int, int] = {}
        for diagonal in range(-count, count + 1, 2):
            x = _start(reached, diagonal, count)
            y = x - diagonal
            while x < n and y < m and one[x] == other[y]:
                x, y = x + 1, y + 1
            furthest[diagonal] = x
            if x >= n and y >= m:
                return _walk_back(history, n, m), (n, m)
        reached = furthest
    inside = [(2 * x - diagonal, x, x - diagonal) for diagonal, x in reached.items() if x <= n and x - diagonal <= m]
    _, x, y = max(inside)
    return _walk_back(history, x, y), (x, y)


def _start(reached: dict[int, int], diagonal: int, count: int) -> int:
    """Returns where a path with `count` differences enters the diagonal: one step down or one to the right."""
    if diagonal == -count or (diagonal != count and reached[diagonal - 1] < reached[diagonal + 1]):
        return reached[diagonal + 1]
    return reached[diagonal - 1] + 1


def _walk_back(history: list[dict[int, int]], x: int, y: int) -> Pairs:
    """Returns the matched pairs on the path to a point that took `len(history) - 1` differences."""
    pairs = []
    for count in range(len(history) - 1, -1, -1):
        before, diagonal = history[count], x - y
        start = _start(before, diagonal, count)
        while x > max(start, 0) and y > max(start - diagonal, 0):
            x, y = x - 1, y - 1
            pairs.append((x, y))
        down = diagonal == -count or (diagonal != count and before[diagonal - 1] < before[diagonal + 1])
        x, y = (x, y - 1) if down else (x - 1, y)
    return pairs[::-1]
