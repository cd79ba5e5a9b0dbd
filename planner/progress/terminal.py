"""Creates rich's consoles, also if environment variables have sizes of the terminal that are not valid."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console

_SIZES = ("COLUMNS", "LINES")
_MOST_DIGITS = 6


def console(*, least_columns: int = 1, **settings: Any) -> Console:
    """Return a console with rich's settings, which ignores sizes in environment variables that are not numbers.

    rich fails at some of them, such as `COLUMNS=\N{SUPERSCRIPT TWO}`.

    Args:
        least_columns: minimum width, if the environment gives one.
    """
    environment = {name: text for name, text in os.environ.items() if name not in _SIZES or _is_size(text)}
    if int(environment.get("COLUMNS", least_columns)) < least_columns:
        environment["COLUMNS"] = str(least_columns)
    return Console(_environ=environment, **settings)


def _is_size(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
