"""Do what a plan says: `rewrite.apply(plan, model)` for live objects, `rewrite.emit(plan, path)` for a Python file."""

from __future__ import annotations

from typing import Any

from rewrite.apply import Rewritten, apply, apply_decisions
from rewrite.emit import emit, source

__all__ = ["Rewritten", "apply", "apply_decisions", "certify", "emit", "source"]


def __getattr__(name: str) -> Any:
    """Import `certify` on first use: it needs the recorder, which applying a plan does not."""
    if name == "certify":
        from rewrite.certify import certify

        return certify
    raise AttributeError(f"module 'rewrite' has no attribute {name!r}")
