"""Parses memory sizes such as 6GiB or 80%, and formats bytes as text."""

from __future__ import annotations

import re
from fractions import Fraction

from planner.errors import SizeError

DEFAULT_MARGIN = "3%"
"""The part of a card's memory that a plan leaves free by default."""
KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
SMALLEST_PLAIN_BYTES = MIB
"""A number without a unit is a number of bytes, and must be at least this large.

A smaller number is refused: it is probably a size in another unit, such as 6 for 6 GiB.
"""
_MOST_BYTES = 2**63 - 1
"""Maximum number of bytes, which fits into a signed 64-bit integer, as sizes in plan files do."""

_UNIT_BYTES = {
    **dict.fromkeys(("tib", "ti"), 1024 * GIB),
    **dict.fromkeys(("gib", "gi"), GIB),
    **dict.fromkeys(("mib", "mi"), MIB),
    **dict.fromkeys(("kib", "ki"), KIB),
    **dict.fromkeys(("tb", "t"), 10**12),
    **dict.fromkeys(("gb", "g"), 10**9),
    **dict.fromkeys(("mb", "m"), 10**6),
    **dict.fromkeys(("kb", "k"), 10**3),
    "b": 1,
}
_SIZE = re.compile(r"\s*(?P<number>[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})\s*(?P<unit>[A-Za-z]{1,3}|%)?\s*")
_ZERO = re.compile(r"\s*0+(?:\.0*)?\s*(?:[A-Za-z]{1,3}|%)?\s*")
_LONGEST_SHOWN = 40
"""Maximum number of characters of the user's text that an error message repeats."""


def parse_size(text: str | int, *, device_bytes: int | None) -> int:
    """Convert a size to bytes, rounded down to a whole byte.

    Args:
        text: a number and a unit, in upper or lower case, with or without a space between them. TiB, GiB, MiB, KiB
            (also Ti, Gi, Mi, Ki) are binary. TB, GB, MB, KB (also T, G, M, K) are decimal, which is the smaller and
            therefore safer reading of a budget. B is bytes, and `%` is a percentage of `device_bytes`. A number without
            a unit is a number of bytes, and must be at least 1 MiB.
        device_bytes: memory of the card in bytes; None if it is not known.

    Raises:
        SizeError: the text is anything else, the size is zero or more than 100% or 2**63 - 1 bytes, or `device_bytes`
            is needed and None.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise SizeError(
            f"size {_shown(text)} is a {type(text).__name__}: write a text such as 6GiB, or a whole number of bytes"
        )
    if isinstance(text, int):
        return _plain_bytes(text, written=text)
    match = _SIZE.fullmatch(text)
    if match is None:
        raise SizeError(f"size {_shown(text)} cannot be read: write a number and a unit, such as 6GiB, 6000MiB or 80%")
    number, unit = Fraction(f"0{match['number']}"), match["unit"]
    if unit == "%":
        return _share(number, device_bytes, written=text)
    if unit is None:
        return _plain_bytes(number, written=match["number"])
    if unit.lower() not in _UNIT_BYTES:
        raise SizeError(f"size {_shown(text)} has the unknown unit {unit!r}: use GiB, MiB, KiB, GB, MB, KB or %")
    return _possible(number * _UNIT_BYTES[unit.lower()], written=text)


def margin_bytes(margin: str | int | None, *, card_bytes: int) -> int:
    """Returns the number of bytes of a card that a plan leaves free.

    Args:
        margin: a size or a percentage of the card's memory as for `parse_size`, or a number of bytes; each may be zero.
            None means `DEFAULT_MARGIN`.
        card_bytes: memory of the card in bytes.

    Raises:
        SizeError: the text cannot be read, or the margin is the whole card.
    """
    if margin is None:
        return parse_size(DEFAULT_MARGIN, device_bytes=card_bytes)
    if isinstance(margin, int):
        size_bytes = margin
    elif _ZERO.fullmatch(margin):
        size_bytes = 0
    else:
        size_bytes = parse_size(margin, device_bytes=card_bytes)
    if not 0 <= size_bytes < card_bytes:
        raise SizeError(f"margin {_shown(margin)} leaves nothing of {format_size(card_bytes)}: write less, such as 3%")
    return size_bytes


def format_size(n_bytes: int) -> str:
    """Format bytes in the largest binary unit in which the number is at least 1: '5.59 GiB', '812.0 MiB', '17 B'.

    TiB and GiB have two decimals, MiB and KiB one decimal, bytes none. A negative number, such as a difference, gets a
    minus sign.
    """
    if n_bytes < 0:
        return f"-{format_size(-n_bytes)}"
    for unit, unit_bytes, decimals in (("TiB", 1024 * GIB, 2), ("GiB", GIB, 2), ("MiB", MIB, 1), ("KiB", KIB, 1)):
        # A size that the next smaller unit would print as 1024.0 is printed in this one.
        if 10 * n_bytes >= 10 * unit_bytes - unit_bytes // 1024 // 2:
            return f"{n_bytes / unit_bytes:.{decimals}f} {unit}"
    return f"{n_bytes} B"


def _plain_bytes(number: Fraction | int, *, written: str | int) -> int:
    if number < 0:
        raise SizeError("size in bytes is negative: write a size above zero, such as 6GiB")
    if number < SMALLEST_PLAIN_BYTES:
        example = written if number > 0 else "6"
        raise SizeError(
            f"size '{written}' has no unit and is too small for a number of bytes: did you mean {example}GiB?"
        )
    return _possible(Fraction(number), written=str(written))


def _share(percent: Fraction, device_bytes: int | None, *, written: str) -> int:
    if device_bytes is None:
        raise SizeError(
            f"size {_shown(written)} is a percentage of the card's memory, which is not known: name a real card with "
            "--gpu, or write a size such as 6GiB"
        )
    if percent > 100:
        raise SizeError(f"size {_shown(written)} is more than the card has: write at most 100%, or a size such as 6GiB")
    return _possible(percent * device_bytes / 100, written=written)


def _possible(size_bytes: Fraction, *, written: str) -> int:
    if size_bytes < 1:
        raise SizeError(f"size {_shown(written)} is zero: write a size above zero, such as 6GiB")
    if size_bytes > _MOST_BYTES:
        raise SizeError(f"size {_shown(written)} is more than 2**63 - 1 bytes: write a size such as 6GiB")
    return int(size_bytes)


def _shown(value: object) -> str:
    """Quotes the user's value in a message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."
