"""Values of tensors that the user states, because a rehearsal does not compute them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from planner.errors import WorkloadError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers:
    """The values that the user states, and how the values of the batch are used."""

    values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Numbers by line of the model's code, such as {'model.py:42': 100}.

    The number is the value that the line reads from a tensor (`.item()`, a condition), or the largest number of
    elements that it selects.
    """
    worst_case: bool = True
    """True to take the masks of the batch as full and its lengths as the longest one; False to use their own values."""

    def at(self, line: str) -> float | None:
        """Returns the number for a line, given as 'path/to/model.py:42'; None if the user stated none."""
        for stated, value in self.values.items():
            if line == stated or line.endswith(f"/{stated}"):
                return value
        return None


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
