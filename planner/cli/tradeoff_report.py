"""A trade-off for people: one row a plan, from the fastest to the smallest."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.cli.report import headline
from planner.plan_types.plan import Footprint
from planner.plan_types.sizes import format_size
from planner.plan_types.tradeoff import Tradeoff


def render_tradeoff(tradeoff: Tradeoff) -> RenderableType:
    """Everything the command prints for a trade-off."""
    parts: list[RenderableType] = [headline(tradeoff.as_it_is), Text(), _table(tradeoff), Text(), _verdict(tradeoff)]
    if not tradeoff.complete:
        parts.append(Text("time ran out: there may be plans between these; --seconds gives it more", style="dim"))
    words = "memory is the smallest total in which a plan gets through, certified by rehearsal; times are predicted"
    parts.append(Text(f"{words}; {tradeoff.seconds:.1f} s", style="dim"))
    return Group(*parts)


def _table(tradeoff: Tradeoff) -> Table:
    table = Table(title="memory against step time", title_justify="left", title_style="bold")
    for name in ("memory", "step time", "x as it is"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("plan")
    baseline = tradeoff.baseline
    table.add_row(*_numbers(baseline, baseline), "(as it is, with as much memory as it likes)", style="dim")
    table.add_section()
    chosen = tradeoff.chosen
    for plan in tradeoff.points:
        words = "; ".join(decision.describe() for decision in plan.decisions) or "as it is"
        mark = "fits: " if plan is chosen else ""
        table.add_row(*_numbers(plan.peak, baseline), mark + words, style="bold green" if plan is chosen else None)
    return table


def _numbers(footprint: Footprint, baseline: Footprint) -> tuple[str, str, str]:
    ratio = footprint.step_ns / max(baseline.step_ns, 1)
    return format_size(footprint.total_bytes), f"{footprint.step_ns / 1e6:,.1f} ms", f"{ratio:.2f}"


def _verdict(tradeoff: Tradeoff) -> Text:
    if not tradeoff.points:
        return Text("no plan keeps the slowdown that is allowed", style="bold red")
    if tradeoff.vram_bytes is None:
        smallest = tradeoff.points[-1].peak.total_bytes
        return Text(f"the smallest total in which this step can be trained: {format_size(smallest)}", style="bold")
    budget = format_size(tradeoff.vram_bytes)
    if tradeoff.chosen is None:
        needed = format_size(min(plan.peak.total_bytes for plan in tradeoff.points))
        return Text(f"none fits in {budget}: the smallest takes {needed}", style="bold red")
    return Text(f"the fastest inside {budget}: {format_size(tradeoff.chosen.peak.total_bytes)}", style="bold green")
