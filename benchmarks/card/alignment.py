"""Align two streams of signed sizes with the fewest insertions and deletions.

Myers, An O(ND) Difference Algorithm and Its Variations, Algorithmica 1 (1986): of all alignments the one with the
smallest number D of differences, in (N + M) D steps. A layer's stream resembles the next layer's, so an alignment by
longest common runs (`planner.stream.compare`) slips by a layer at the first difference; the shortest edit does not.
It serves as a fallback above `MOST_DIFFERENCES`, where two streams have little in common anyway.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from planner.stream import Comparison, Difference
from planner.stream import compare as compare_by_longest_runs

MOST_DIFFERENCES = 2000
"""Work and memory grow with the square of it: about five seconds and 200 MB here."""


def align(recorded: Sequence[int], rehearsed: Sequence[int]) -> Comparison:
    """Bytes taken (positive) and freed (negative) in order, each rounded to the allocator's granularity."""
    pairs = _matched_pairs(rehearsed, recorded)
    if pairs is None:
        return compare_by_longest_runs(recorded, rehearsed)
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


def _matched_pairs(one: Sequence[int], other: Sequence[int]) -> list[tuple[int, int]] | None:
    """Positions of equal elements in an alignment with the fewest differences; None if there are too many."""
    shorter = min(len(one), len(other))
    head = next((place for place in range(shorter) if one[place] != other[place]), shorter)
    rest = shorter - head
    tail = next((place for place in range(rest) if one[-1 - place] != other[-1 - place]), rest)
    middle = _shortest_edit(one[head : len(one) - tail], other[head : len(other) - tail])
    if middle is None:
        return None
    return [
        *((place, place) for place in range(head)),
        *((head + a, head + b) for a, b in middle),
        *((len(one) - tail + place, len(other) - tail + place) for place in range(tail)),
    ]


def _shortest_edit(one: Sequence[int], other: Sequence[int]) -> list[tuple[int, int]] | None:
    """Furthest points on each diagonal k = x - y, for 0, 1, 2 ... differences."""
    n, m = len(one), len(other)
    reached = {1: 0}
    history: list[dict[int, int]] = []
    for count in range(min(n + m, MOST_DIFFERENCES) + 1):
        history.append(dict(reached))
        for diagonal in range(-count, count + 1, 2):
            x = _start(reached, diagonal, count)
            y = x - diagonal
            while x < n and y < m and one[x] == other[y]:
                x, y = x + 1, y + 1
            reached[diagonal] = x
            if x >= n and y >= m:
                return _walk_back(history, n, m)
        reached = {diagonal: reached[diagonal] for diagonal in range(-count, count + 1, 2)}
    return None


def _start(reached: dict[int, int], diagonal: int, count: int) -> int:
    if diagonal == -count or (diagonal != count and reached[diagonal - 1] < reached[diagonal + 1]):
        return reached[diagonal + 1]
    return reached[diagonal - 1] + 1


def _walk_back(history: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    pairs = []
    for count in range(len(history) - 1, -1, -1):
        start = _start(history[count], x - y, count)
        while x > max(start, 0) and y > max(start - (x - y), 0):
            x, y = x - 1, y - 1
            pairs.append((x, y))
        if count == 0:
            break
        before = history[count]
        diagonal = x - y
        down = diagonal == -count or (diagonal != count and before[diagonal - 1] < before[diagonal + 1])
        x, y = (x, y - 1) if down else (x - 1, y)
    return pairs[::-1]
