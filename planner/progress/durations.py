"""Parses durations such as 30s or 2min."""

from __future__ import annotations

import math
import re

from planner.errors import WorkloadError

_UNIT_SECONDS = {"": 1, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600}
_DURATION = re.compile(r"\s*(?P<number>[0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(?P<unit>[a-z]*)\s*")


def parse_duration(text: str | float) -> float:
    """Convert a duration to seconds.

    Args:
        text: a number of seconds, or a text with a number and a unit: s (sec), m (min) or h, such as '30s' or '2min'.

    Raises:
        WorkloadError: the text is anything else, or the duration is not above zero.
    """
    match = _DURATION.fullmatch(text.lower()) if isinstance(text, str) else None
    if match is not None and match["unit"] in _UNIT_SECONDS:
        seconds = float(match["number"]) * _UNIT_SECONDS[match["unit"]]
    else:
        seconds = float(text) if isinstance(text, (int, float)) and not isinstance(text, bool) else math.nan
    if not 0 < seconds < math.inf:
        raise WorkloadError(f"time limit {text!r} is not a duration above zero: write a text such as 30s or 2min")
    return seconds
