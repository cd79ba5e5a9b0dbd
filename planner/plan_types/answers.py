"""Values of tensors that the user states, because a rehearsal does not compute them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

from planner.errors import WorkloadError

_EXAMPLE = "{'model.py:42': 100}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers:
    """The values that the user states, and how the values of the batch are used.

    Raises:
        WorkloadError: `values` does not have numbers by line of code.
    """

    values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Numbers by line of the model's code, such as {'model.py:42': 100}.

    The number is the value that the line reads from a tensor (`.item()`, a condition), or the largest number of
    elements that it selects.
    """
    worst_case: bool = True
    """True to take the masks of the batch as full, or as full up to one position of each sample if an attention mask
    has padding, and its lengths as the longest one; False to use their own values."""

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            raise WorkloadError(f"values is of type {type(self.values).__name__}: give a dict such as {_EXAMPLE}")
        for line, value in self.values.items():
            path, _, position = line.rpartition(":") if isinstance(line, str) else ("", "", "")
            if not path or not position.isdigit() or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise WorkloadError(
                    f"{line!r}: {value!r} does not state a value: give a line of code and a finite number, such as "
                    f"{_EXAMPLE}"
                )

    def at(self, line: str) -> float | None:
        """Returns the number for a line, given as 'path/to/model.py:42'; None if the user stated none.

        If several of the stated lines match, it is the number for the longest one.
        """
        matching = [stated for stated in self.values if _is_line(line, stated)]
        return self.values[max(matching, key=len)] if matching else None

    def unused(self, lines: Collection[str]) -> tuple[str, ...]:
        """Returns the stated lines that are none of these lines of code."""
        return tuple(stated for stated in self.values if not any(_is_line(line, stated) for line in lines))


def _is_line(line: str, stated: str) -> bool:
    """True if a stated line such as 'model.py:42' is the line 'path/to/model.py:42'."""
    return line == stated or line.endswith(f"/{stated}")


NOTHING_STATED = Answers()


def parse_answer(text: str) -> tuple[str, float]:
    """Returns (line, number) of a text such as 'model.py:42=100' or 'model.py:42=true'.

    Raises:
        WorkloadError: the text has another form.
    """
    line, _, number = text.rpartition("=")
    _, _, position = line.rpartition(":")
    words = {"true": 1, "false": 0}
    try:
        value = words[number.lower()] if number.lower() in words else float(number)
    except ValueError:
        value = None
    if value is None or not position.isdigit():
        raise WorkloadError(
            f"'{text}' does not state a value: write a line of code and a number, such as model.py:42=100"
        )
    return line, value
