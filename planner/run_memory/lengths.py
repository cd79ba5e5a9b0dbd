"""Lengths of samples, as they are read from a file."""

from __future__ import annotations

import pathlib

from planner.errors import WorkloadError
from planner.files import reading
from planner.plan_types.plan_parts import MOST_SAMPLES

FORMS = "one length per line, or 'length count' per line, or JSON: a list of lengths or an object {length: count}"
_MOST_BYTES = 1 << 30
"""Maximum size of the file."""


def read_lengths(path: pathlib.Path) -> list[int]:
    """Returns the lengths of samples from a file, in the order of the file.

    The file has one length per line; or a length and a count, separated by blanks, a comma or a tab, so that it is a
    histogram; or it is JSON with a list of lengths, or with an object of counts by length.

    Raises:
        WorkloadError: the file cannot be read, or has something else in it.
    """
    try:
        text = reading.text(path, most_bytes=_MOST_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise WorkloadError(f"the lengths in '{path}' cannot be read: {why}") from error
    try:
        data = reading.parsed_json(text) if text.lstrip()[:1] in ("[", "{") else _table(text)
        pairs = list(data.items()) if isinstance(data, dict) else [_pair(item) for item in data]
        counted = [(_whole(length), _whole(count)) for length, count in pairs]
        if sum(count for _, count in counted) > MOST_SAMPLES:
            raise ValueError(f"there are more than {MOST_SAMPLES:,} samples: give a part of them")
        lengths = [length for length, count in counted for _ in range(count)]
    except (ValueError, TypeError) as error:
        raise WorkloadError(f"the lengths in '{path}' cannot be read ({error}): give {FORMS}") from error
    if not lengths:
        raise WorkloadError(f"'{path}' has no lengths: give {FORMS}")
    return lengths


def _table(text: str) -> list[list[str]]:
    rows = [line.replace(",", " ").split() for line in text.splitlines()]
    return [row for row in rows if row]


def _pair(item: object) -> tuple[object, object]:
    """Returns a length and its count, which is 1 if it is not stated."""
    values = list(item) if isinstance(item, (list, tuple)) else [item]
    if len(values) not in (1, 2):
        raise ValueError(f"{item!r} is neither a length nor a length with a count")
    return (values[0], 1) if len(values) == 1 else (values[0], values[1])


def _whole(value: object) -> int:
    text = str(value)
    if isinstance(value, (bool, float)) or not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{value!r} is not a whole number above zero")
    return int(text)
