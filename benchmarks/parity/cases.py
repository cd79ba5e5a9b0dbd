"""All cases, by file."""

from __future__ import annotations

from benchmarks.parity import (
    losses,
    models_effects,
    models_nets,
    models_plain,
    models_state,
    models_training,
    models_transformers,
    models_tricks,
)
from benchmarks.parity.case import Case

FILES = (
    models_plain,
    models_nets,
    models_tricks,
    models_state,
    models_effects,
    models_training,
    models_transformers,
    losses,
)


def cases() -> tuple[Case, ...]:
    """Returns all cases. Their names are unique."""
    found = [case for file in FILES for case in file.CASES.cases]
    names = [case.name for case in found]
    if len(set(names)) < len(names):
        raise ValueError(f"two cases have the same name: {sorted(n for n in names if names.count(n) > 1)[0]}")
    return tuple(found)
