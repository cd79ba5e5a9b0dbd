"""The rules, which apply the decisions of a plan: one module per technique.

A decision's method `rule_name` returns the name of its module, such as `chunked_loss`. The module defines two
functions: `chunked_loss(rewriting, decision)` changes a live model, and `chunked_loss_source(plan, decision)` returns
the code that does the same in an emitted file (`EmittedCode`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from planner.plan_types.decisions import Decision
from planner.plan_types.techniques import KINDS


def _functions(suffix: str) -> dict[type[Decision], Callable]:
    """Maps each type of decision, in the order of `KINDS`, to the function of its module named `<module><suffix>`."""
    names = {kind: kind.rule_name() for kind in KINDS.values()}
    return {
        kind: getattr(importlib.import_module(f"{__name__}.{name}"), f"{name}{suffix}") for kind, name in names.items()
    }


RULES = _functions("")
"""Maps each type of decision to its rule, `rule(rewriting, decision)`. Rules are applied in the order of this dict."""

SOURCES = _functions("_source")
"""Maps each type of decision to the function that writes its code, `source(plan, decision)` -> `EmittedCode`."""
