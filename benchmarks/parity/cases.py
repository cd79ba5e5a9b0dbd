"""All cases, by file."""

from __future__ import annotations

from benchmarks.parity import models_plain, models_state
from benchmarks.parity.case import Case


def cases() -> tuple[Case, ...]:
    """Returns all cases. Their names are unique."""
    found = [case for file in (models_plain, models_state) for case in file.CASES.cases]
    assert len({case.name for case in found}) == len(found), "two cases have the same name"
    return tuple(found)
