"""`plan diff first.json second.json`: what differs between two saved plans. This module does not import torch.

Exit code 0: nothing differs; 1: something differs; 2: a file could not be read.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.cli.options import Arguments
from planner.plan_types.categories import Category
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import format_size

MISSING = "-"
"""Text for a value that one of the plans lacks."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """A row of the table: a quantity and its values in the two plans, as texts."""

    what: str
    first: str
    second: str
    change: str = ""
    """By how much a number changes; empty for other values."""


def differences(first: Plan, second: Plan) -> list[Difference]:
    """Returns the quantities that differ, in the order of the report. Decisions are left out."""
    return [row for row in _rows(first, second) if row.first != row.second]


def decisions_changed(first: Plan, second: Plan) -> list[str]:
    """Returns a line for each decision that only one plan has: '- ' and '+ ' before those of the first and second."""
    before, after = ([decision.describe() for decision in plan.decisions] for plan in (first, second))
    gone = [f"- {line}" for line in before if line not in after]
    return gone + [f"+ {line}" for line in after if line not in before]


def changed_fields(first: object, second: object, path: str = "") -> Iterator[dict[str, object]]:
    """Yields each value of two JSON data that differs: its `field` as 'plan.total_bytes', `first` and `second`.

    Lists are compared as a whole. A field that one of the two lacks is null there.
    """
    if isinstance(first, dict) and isinstance(second, dict):
        for name in dict.fromkeys((*first, *second)):
            yield from changed_fields(first.get(name), second.get(name), f"{path}.{name}" if path else name)
    elif first != second:
        yield {"field": path, "first": first, "second": second}


def render_diff(first: Plan, second: Plan, names: Sequence[str]) -> RenderableType:
    """Returns the table of the differences, the decisions that differ, and the names of other parts that differ.

    Args:
        names: the names of the two files.
    """
    rows, decisions = differences(first, second), decisions_changed(first, second)
    parts: list[RenderableType] = []
    if rows:
        table = Table()
        table.add_column("")
        for name in (*names, "change"):
            table.add_column(name, justify="right", overflow="fold")
        for row in rows:
            table.add_row(row.what, row.first, row.second, row.change)
        parts.append(table)
    if decisions:
        parts += [Text("decisions", style="bold"), *(Text(f"  {line}") for line in decisions)]
    changed = {str(change["field"]).partition(".")[0] for change in changed_fields(first.to_json(), second.to_json())}
    if others := sorted(changed & _NOT_SHOWN):
        parts.append(Text(f"also different: {', '.join(others)} (--json shows them)"))
    return Group(*parts) if parts else Text("the plans are equal")


_NOT_SHOWN = {"certified", "card_source", "notes", "shortfall", "solver", "tensors"}
"""Parts of a plan that neither the table nor the list of decisions shows."""


def _rows(first: Plan, second: Plan) -> Iterator[Difference]:
    """Yields all quantities that the table may show, whether they differ or not."""
    before, after = _texts(first), _texts(second)
    for what in dict.fromkeys((*before, *after)):
        yield Difference(what, before.get(what, MISSING), after.get(what, MISSING))
    sizes, other_sizes = _sizes(first), _sizes(second)
    for what, size in sizes.items():
        change = format_size(other_sizes[what] - size)
        yield Difference(what, format_size(size), format_size(other_sizes[what]), f"+{change}".replace("+-", "-"))
    for what, footprint, other in (
        ("step time of the baseline", first.baseline, second.baseline),
        ("step time of the plan", first.peak, second.peak),
    ):
        times = [f"{found.step_ns / 1e6:,.1f} ms" for found in (footprint, other)]
        yield Difference(what, times[0], times[1], f"{other.step_ns / max(footprint.step_ns, 1):.2f} x")


def _texts(plan: Plan) -> dict[str, str]:
    """Returns the facts of a plan that are not sizes or times."""
    model, workload = plan.model, plan.workload
    values = {
        "model": model.name,
        "MODEL": model.reference,
        "parameters": f"{model.parameters:,} in {model.dtype}",
        "trained parameters": None if model.trained_parameters is None else f"{model.trained_parameters:,}",
        "adapters": model.adapter,
        "trained by": None if model.program is None else model.program.name,
        "gradient checkpointing": None if model.program is None else model.program.gradient_checkpointing,
        "fingerprint": model.fingerprint[:12],
        "batch size": workload.batch_size,
        "tokens in a sample": workload.seq_len,
        "optimizer": workload.optimizer,
        "card": plan.card,
        "link": plan.link,
        "cards in a machine": plan.cards_per_node,
        "budget": None if plan.vram_bytes is None else format_size(plan.vram_bytes),
        "allocator options": plan.alloc_conf,
        "cudnn.benchmark": "on" if plan.cudnn_benchmark else None,
        "fidelity": plan.fidelity,
        "forced": ", ".join(plan.forced),
        "forbidden": ", ".join(plan.forbidden),
        "largest slowdown": plan.max_slowdown,
        "fits": "yes" if plan.fits else "no",
        "peak": f"{plan.peak.phase}, {plan.peak.module or 'the model'}, {plan.peak.op}",
        **plan.versions,
    }
    return {what: str(value) for what, value in values.items() if value not in (None, "")}


def _sizes(plan: Plan) -> dict[str, int]:
    """Returns the sizes of a plan in bytes."""
    return {
        "margin": plan.margin_bytes,
        "total of the baseline": plan.baseline.total_bytes,
        "total of the plan": plan.peak.total_bytes,
        "reserved": plan.peak.reserved_bytes,
        "allocated": plan.peak.allocated_bytes,
        **{f"{category} at the peak": plan.peak.breakdown.get(category, 0) for category in Category},
    }


def parser() -> argparse.ArgumentParser:
    """Returns the parser of `plan diff`. For wrong usage it raises `WorkloadError` instead of exiting the process."""
    arguments = Arguments(
        prog="plan diff", description="Show what differs between two saved plans. Exit code 1 if anything differs."
    )
    arguments.add_argument("first", type=pathlib.Path, metavar="first.json", help="a saved plan")
    arguments.add_argument("second", type=pathlib.Path, metavar="second.json", help="another saved plan")
    arguments.add_argument("--json", action="store_true", help="print the fields that differ as one JSON object")
    return arguments


def run(options: argparse.Namespace) -> tuple[bool, RenderableType | str]:
    """Returns whether anything differs, and the answer: JSON text with --json, else what is to be printed.

    Raises:
        PlanFileError: a file cannot be read or is not a plan.
    """
    first, second = Plan.load(options.first), Plan.load(options.second)
    changes = list(changed_fields(first.to_json(), second.to_json()))
    if options.json:
        return bool(changes), json.dumps({"equal": not changes, "changes": changes}, indent=2)
    return bool(changes), render_diff(first, second, (options.first.name, options.second.name))
