"""Formats module names and op numbers for the one-line descriptions of decisions."""

from __future__ import annotations

from collections.abc import Iterable

_MOST_NAMES, _MOST_RANGES = 6, 4
"""Maximum number of name patterns, and of ranges of ops, that one line shows."""


def counted(number: int, noun: str) -> str:
    """'1 module', '3 modules'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def module_listing(names: Iterable[str]) -> str:
    """Module names; names that differ only in their first number share a pattern: 'encoder.layer.{0-3,7}.attention'."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for name in names:
        parts = name.split(".")
        position = next((position for position, part in enumerate(parts) if part.isdigit()), None)
        if position is None:
            numbers.setdefault((name, ""), [])
        else:
            before, after = ".".join([*parts[:position], ""]), ".".join(["", *parts[position + 1 :]])
            numbers.setdefault((before, after), []).append(int(parts[position]))
    patterns = [before + (_ranges(members) + after if members else "") for (before, after), members in numbers.items()]
    return _shortened(patterns, _MOST_NAMES)


def op_ranges(ranges: Iterable[tuple[int, int]]) -> str:
    """Half-open ranges of op numbers, written with their last op: '0-9, 12-20'."""
    return _shortened([f"{start}-{stop - 1}" for start, stop in ranges], _MOST_RANGES)


def _shortened(items: list[str], most: int) -> str:
    return ", ".join(items) if len(items) <= most else f"{', '.join(items[:most])} and {len(items) - most} more"


def _ranges(numbers: list[int]) -> str:
    """Formats numbers as ranges in braces; a single number has no braces."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return text if len(numbers) == 1 else f"{{{text}}}"
