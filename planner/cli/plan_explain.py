"""`plan explain snapshot.pickle plan.json`: why a run ran out of memory. This module does not import torch.

Exit code 0: no request failed, and no more memory was taken than planned; 1: the opposite; 2: a file could not be read.
"""

from __future__ import annotations

import argparse
import json

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.cli.options import Arguments
from planner.plan_types.sizes import format_size
from planner.snapshot.explain import Explanation, explain
from planner.snapshot.explain.explanation import MOST_GROUPS


def parser() -> argparse.ArgumentParser:
    """Returns the parser of `plan explain`, which raises `WorkloadError` for wrong usage, as that of `plan diff`."""
    arguments = Arguments(
        prog="plan explain",
        description="Explain why a run ran out of memory or took more than planned, and which settings would have "
        "helped. Exit code 1 if a request failed or more was taken than planned.",
    )
    arguments.add_argument(
        "snapshot",
        metavar="snapshot.pickle",
        help="what torch.cuda.memory._dump_snapshot wrote; with _record_memory_history() before the program, it "
        "has the history of all requests",
    )
    arguments.add_argument("plan", nargs="?", metavar="plan.json", help="the saved plan of the run")
    arguments.add_argument("--device", type=int, metavar="N", help="number of the CUDA device")
    arguments.add_argument(
        "--capacity",
        metavar="SIZE",
        help="the most memory that the allocator could hold, such as 23GiB (default: as the record shows it)",
    )
    arguments.add_argument("--json", action="store_true", help="print the explanation as one JSON object")
    return arguments


def run(options: argparse.Namespace) -> tuple[bool, RenderableType | str]:
    """Returns whether memory is a surprise, and the answer: JSON text with --json, else what is to be printed.

    Raises:
        PlannerError: a file cannot be read or is not what it should be.
    """
    found = explain(options.snapshot, options.plan, device=options.device, capacity=options.capacity)
    return found.is_surprise, json.dumps(found.to_json(), indent=2) if options.json else render(found)


def render(found: Explanation) -> RenderableType:
    """Returns the explanation as text and tables."""
    parts: list[RenderableType] = [Text(found.headline(), style="bold"), Text(found.state())]
    parts += _bullets("why", found.causes)
    if found.trials:
        parts += [Text("\nreplayed in the simulated allocator", style="bold"), _trials(found)]
    if found.more_memory_bytes:
        parts.append(Text(f"With {format_size(found.more_memory_bytes)} more memory the request would have fit."))
    parts += [Text("\nalive at that moment", style="bold"), _contents(found), _places(found)]
    parts += _bullets("compared with the plan", found.findings)
    parts += _bullets("notes", found.notes)
    return Group(*parts)


def _bullets(title: str, lines: tuple[str, ...]) -> list[RenderableType]:
    if not lines:
        return []
    return [Text(f"\n{title}", style="bold"), *(Text(f"  - {line}") for line in lines)]


def _trials(found: Explanation) -> Table:
    has_limit = found.moment.limit_bytes is not None
    table = Table()
    table.add_column("", overflow="fold")
    if has_limit:
        table.add_column("fits")
        table.add_column("to spare", justify="right")
    table.add_column("reserved at most", justify="right")
    for trial in found.trials:
        spare = "" if trial.spare_bytes is None else format_size(trial.spare_bytes)
        verdict = ("yes" if trial.passes else "no", spare) if has_limit else ()
        table.add_row(Text(trial.name), *verdict, format_size(trial.peak_reserved_bytes))
    return table


def _contents(found: Explanation) -> Table:
    has_plan = any(part.planned_bytes is not None for part in found.parts)
    table = Table()
    table.add_column("")
    for title in ("in the run", *(("plan, at most",) if has_plan else ())):
        table.add_column(title, justify="right")
    for part in found.parts:
        planned = () if part.planned_bytes is None else (format_size(part.planned_bytes),)
        asked = f" + {format_size(part.asked_bytes)} that failed" if part.asked_bytes else ""
        table.add_row(part.purpose, format_size(part.total_bytes) + asked, *planned)
    return table


def _places(found: Explanation) -> Table:
    table = Table()
    for title in ("size", "blocks"):
        table.add_column(title, justify="right")
    for title in ("allocated at", "called by", "purpose"):
        table.add_column(title, overflow="fold")
    for group in found.groups[:MOST_GROUPS]:
        place = Text(group.place or "no stack trace")
        table.add_row(format_size(group.total_bytes), str(group.blocks), place, Text(group.caller), group.purpose)
    return table
