"""Report of a trade-off: a table with one row for each plan, from the fastest to the smallest."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.cli.report import headline
from planner.plan_types.plan import Footprint
from planner.plan_types.sizes import format_size
from planner.plan_types.tradeoff import Tradeoff


def render_tradeoff(tradeoff: Tradeoff) -> RenderableType:
    """Returns everything that the command prints for a trade-off."""
    parts: list[RenderableType] = [headline(tradeoff.as_it_is), Text(), _table(tradeoff), Text(), _verdict(tradeoff)]
    if notes := _common_notes(tradeoff):
        parts += [Text(), *(Text(f"note: {note}", style="dim") for note in notes), Text()]
    if not tradeoff.complete:
        parts.append(
            Text(
                "The time ran out: faster plans of the same size, and smaller plans, may exist. "
                "Set a longer --time-limit.",
                style="dim",
            )
        )
    parts.append(
        Text(
            "Memory is the smallest total of the process with which a plan runs, certified by rehearsal. Step times "
            f"are predicted. This took {tradeoff.seconds:.1f} s.",
            style="dim",
        )
    )
    return Group(*parts)


def _common_notes(tradeoff: Tradeoff) -> tuple[str, ...]:
    """Returns the notes that all plans have, such as those on techniques that are left out."""
    first, *others = tradeoff.points or (tradeoff.as_it_is,)
    return tuple(note for note in first.notes if all(note in plan.notes for plan in others))


def _table(tradeoff: Tradeoff) -> Table:
    """Returns the table of the plans. The baseline is its first row; the fastest plan inside the budget is marked."""
    table = Table(title="Memory against step time", title_justify="left", title_style="bold")
    for name in ("memory", "step time", "x baseline"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("plan")
    baseline = tradeoff.baseline
    table.add_row(*_numbers(baseline, baseline), "(baseline, without a memory limit)", style="dim")
    table.add_section()
    chosen = tradeoff.chosen
    for plan in tradeoff.points:
        decisions = "; ".join(decision.describe() for decision in plan.decisions) or "baseline"
        mark = "fits: " if plan is chosen else ""
        table.add_row(*_numbers(plan.peak, baseline), mark + decisions, style="bold green" if plan is chosen else None)
    return table


def _numbers(footprint: Footprint, baseline: Footprint) -> tuple[str, str, str]:
    """Formats three numbers: total memory, step time, and the ratio of the step time to that of the baseline."""
    ratio = footprint.step_ns / max(baseline.step_ns, 1)
    return format_size(footprint.total_bytes), f"{footprint.step_ns / 1e6:,.1f} ms", f"{ratio:.2f}"


def _verdict(tradeoff: Tradeoff) -> Text:
    """Returns the last line: the fastest plan inside the budget, or the smallest plan if there is no budget."""
    if not tradeoff.points:
        return Text("No plan is within the allowed slowdown (--max-slowdown).", style="bold red")
    if tradeoff.vram_bytes is None:
        smallest = tradeoff.points[-1].peak.total_bytes
        found = "" if tradeoff.complete else " that was found in time"
        return Text(f"The smallest plan{found} takes {format_size(smallest)} in total.", style="bold")
    budget = format_size(tradeoff.vram_bytes)
    if tradeoff.chosen is None:
        needed = format_size(min(plan.peak.total_bytes for plan in tradeoff.points))
        if not tradeoff.complete:
            words = f"not found in time: a plan inside {budget}; the smallest so far takes {needed}"
            return Text(words, style="bold red")
        return Text(f"does not fit: the smallest plan takes {needed}, and the budget is {budget}", style="bold red")
    return Text(
        f"fits: the fastest plan inside {budget} takes {format_size(tradeoff.chosen.peak.total_bytes)}",
        style="bold green",
    )
