"""The rules: one file per technique, with the change to a live model and the source text that does the same.

A rule is found by its name. For a decision of kind 'chunked-loss' the module `chunked_loss` has two functions:
`chunked_loss(rewriting, decision)` changes a live model, `chunked_loss_source(plan, decision)` returns `EmittedCode`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from planner.plan_types.decisions import Decision
from planner.plan_types.techniques import KINDS


def _functions(suffix: str) -> dict[type[Decision], Callable]:
    """Returns the functions that are named after each kind, in the order of `KINDS`."""
    names = {kind: kind.rule_name() for kind in KINDS.values()}
    return {
        kind: getattr(importlib.import_module(f"{__name__}.{name}"), f"{name}{suffix}") for kind, name in names.items()
    }


RULES = _functions("")
"""`rule(rewriting, decision)` by type of decision, in the order in which the rules are applied."""

SOURCES = _functions("_source")
"""The emitted counterpart of each rule, `source(plan, decision)` -> `EmittedCode`."""
