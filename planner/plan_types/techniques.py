"""Finds techniques by name: the kinds that users write, former names and aliases. Reads decisions from JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from planner.errors import DecisionError
from planner.plan_types import decisions, recompute_decisions
from planner.plan_types.decision_base import Decision

KINDS: dict[str, type[Decision]] = {
    decision.kind: decision
    for module in (decisions, recompute_decisions)
    for decision in vars(module).values()
    if isinstance(decision, type) and issubclass(decision, Decision) and decision.__module__ == module.__name__
    if hasattr(decision, "kind")  # it is not a base class
}
"""Every decision class by its kind, in the order in which they are defined and applied."""

_CANONICAL = {
    name: kind
    for kind, decision in KINDS.items()
    for name in (kind, decision.former_kind, *decision.aliases)
    if name is not None
}


def canonical_kind(name: str) -> str:
    """The kind of the technique with this kind, former kind or alias. An unknown name is returned unchanged."""
    return _CANONICAL.get(name, name)


def decision_from_json(data: dict[str, object]) -> Decision:
    """Reads what `Decision.to_json` returned. Former kinds are accepted, too.

    Raises:
        DecisionError: the kind or a field is unknown, or a value is not allowed.
        TypeError: a field is missing.
    """
    fields = dict(data)
    kind = fields.pop("kind", None)
    decision = KINDS.get(canonical_kind(kind)) if isinstance(kind, str) else None
    if decision is None:
        raise DecisionError(f"decision kind {kind!r} is unknown: choose from {', '.join(KINDS)}")
    known = {field.name for field in dataclasses.fields(decision)}
    if unknown := sorted(set(fields) - known):
        raise DecisionError(f"decision {kind!r} has no field {unknown[0]!r}: its fields are {', '.join(sorted(known))}")
    return decision(**{name: as_tuples(value) for name, value in fields.items()})


def as_tuples(value: Any) -> Any:
    """Converts lists of JSON to tuples. Returns other values, such as a text, for `check_field_types` to refuse."""
    return tuple(as_tuples(item) for item in value) if isinstance(value, list) else value
