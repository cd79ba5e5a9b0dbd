"""All techniques by name: the kinds that users write, their former names, and decisions read from JSON."""

from __future__ import annotations

import dataclasses

from planner.errors import DecisionError
from planner.plan_types import decisions
from planner.plan_types.decision_base import Decision

KINDS: dict[str, type[Decision]] = {
    decision.kind: decision
    for decision in vars(decisions).values()
    if isinstance(decision, type) and issubclass(decision, Decision) and decision is not Decision
}
"""Every decision class of `decisions.py` by its kind, in the order in which they are defined and applied."""

_CANONICAL = {
    name: kind
    for kind, decision in KINDS.items()
    for name in (kind, decision.former_kind, *decision.aliases)
    if name is not None
}


def canonical_kind(name: str) -> str:
    """The kind that a name or a former name stands for; an unknown name is returned unchanged."""
    return _CANONICAL.get(name, name)


def decision_from_json(data: dict[str, object]) -> Decision:
    """Inverse of `Decision.to_json`, for former kinds too. Raises `DecisionError` for an unknown kind or field."""
    fields = dict(data)
    kind = fields.pop("kind", None)
    decision = KINDS.get(canonical_kind(kind)) if isinstance(kind, str) else None
    if decision is None:
        raise DecisionError(f"decision kind {kind!r} is unknown: known are {', '.join(KINDS)}")
    known = {field.name for field in dataclasses.fields(decision)}
    if unknown := sorted(set(fields) - known):
        raise DecisionError(f"decision {kind!r} has no field {unknown[0]!r}: known are {', '.join(sorted(known))}")
    return decision(**{name: _as_tuples(value) for name, value in fields.items()})


def _as_tuples(value: object) -> object:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value
