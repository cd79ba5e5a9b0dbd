"""Describes a plan in one line, and as an HTML table for notebooks."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from planner.plan_types.sizes import format_size

if TYPE_CHECKING:
    from planner.plan_types.plan import Plan


def summary(plan: Plan) -> str:
    """Returns one line: the model, whether the plan fits, memory, step time and techniques."""
    total = format_size(plan.total_bytes)
    if plan.limit_bytes is None:
        return f"{plan.model.name} needs {total}"
    budget = format_size(plan.limit_bytes)
    if plan.shortfall is None:
        verdict = f"fits {budget} with {total}"
    elif plan.run is not None and not plan.run.fits:
        verdict = f"does not fit {budget}: the whole run takes {total}"
    elif plan.shortfall.missing_bytes:
        verdict = f"does not fit {budget}: the smallest plan {as_found(plan)} takes {total}"
    else:
        verdict = f"is too slow in {budget}, with {total}"
    techniques = ", ".join(dict.fromkeys(decision.kind for decision in plan.decisions)) or "no change"
    return (
        f"{plan.model.name} {verdict} (baseline {format_size(plan.baseline.total_bytes)}), step "
        f"{speed_text(plan.slowdown)}: {techniques}"
    )


def as_found(plan: Plan) -> str:
    """Returns words to add to 'the smallest plan', because a smaller one may exist."""
    return "found in time" if plan.solver.status == "time limit" else "that was found"


def speed_text(slowdown: float) -> str:
    """Returns a slowdown in words: '1.20 x slower than the baseline', or 'as fast as the baseline'."""
    if abs(slowdown - 1) < 0.005:
        return "as fast as the baseline"
    if slowdown > 1:
        return f"{slowdown:.2f} x slower than the baseline"
    return f"{1 / slowdown:.2f} x faster than the baseline"


def html_table(plan: Plan) -> str:
    """Returns the summary and the memory by category as HTML, which notebooks show for a plan."""
    before, after = plan.baseline.breakdown, plan.peak.breakdown
    rows = [
        (category, before.get(category, 0), after.get(category, 0)) for category in dict.fromkeys((*before, *after))
    ]
    rows.append(("total of the process", plan.baseline.total_bytes, plan.peak.total_bytes))
    cells = "".join(
        f"<tr><th>{escape(name)}</th><td>{format_size(old)}</td><td>{format_size(new)}</td></tr>"
        for name, old, new in rows
    )
    decisions = "".join(f"<li>{escape(decision.describe())}</li>" for decision in plan.decisions)
    return (
        f"<p><b>{escape(summary(plan))}</b></p><table><thead><tr><th>at the peak</th><th>baseline</th>"
        f"<th>with the plan</th></tr></thead><tbody>{cells}</tbody></table><ul>{decisions}</ul>"
    )
