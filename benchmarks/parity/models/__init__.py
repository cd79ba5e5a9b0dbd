"""All cases, by file."""

from __future__ import annotations

from benchmarks.parity.case import Case
from benchmarks.parity.models import (
    adapters,
    arguments,
    effects,
    losses,
    nets,
    plain,
    state,
    structures,
    training,
    transformers,
    tricks,
    wrapping,
)

FILES = (
    plain,
    nets,
    structures,
    tricks,
    wrapping,
    state,
    arguments,
    effects,
    training,
    transformers,
    adapters,
    losses,
)


def cases() -> tuple[Case, ...]:
    """Returns all cases. Their names are unique."""
    found = [case for file in FILES for case in file.CASES.cases]
    names = [case.name for case in found]
    if len(set(names)) < len(names):
        raise ValueError(f"two cases have the same name: {sorted(n for n in names if names.count(n) > 1)[0]}")
    return tuple(found)
