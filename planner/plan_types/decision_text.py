"""Formats module names and op numbers for the one-line descriptions of decisions."""

from __future__ import annotations

from collections.abc import Iterable

_MOST_NAMES, _MOST_RANGES = 6, 4
"""Maximum number of name patterns, and of ranges of op numbers, in a description."""


def counted(number: int, noun: str) -> str:
    """Formats a number with its noun: '1 module', '3 modules'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def module_listing(names: Iterable[str]) -> str:
    """Lists module names. Names that differ only in the first number are joined: 'encoder.layer.{0-3,7}.attention'."""
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
    """Formats half-open ranges of op numbers with the last op included: [(0, 10), (12, 21)] gives '0-9, 12-20'."""
    return _shortened([f"{start}-{stop - 1}" for start, stop in ranges], _MOST_RANGES)


def _shortened(items: list[str], most: int) -> str:
    return ", ".join(items) if len(items) <= most else f"{', '.join(items[:most])} and {len(items) - most} more"


def _ranges(numbers: list[int]) -> str:
    """Formats numbers as ranges in braces: '{0-3,7}'. A single number has no braces."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return text if len(numbers) == 1 else f"{{{text}}}"
