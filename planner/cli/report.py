"""A plan for people: what the step takes as it is, what to change, what it takes then, and what that costs."""

from __future__ import annotations

from html import escape

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner.plan_types.plan import Footprint, Plan, Shortfall
from planner.plan_types.sizes import MIB, format_size
from planner.recording.step_graph import Category

_TOTALS = (
    ("allocated, as blocks", "allocated_bytes"),
    ("reserved by the allocator", "reserved_bytes"),
    ("total of the process", "total_bytes"),
)


GENERIC = "generic"


def render(plan: Plan) -> RenderableType:
    """Everything the command prints for a plan."""
    parts: list[RenderableType] = [headline(plan), Text(), _table(plan), Text(), *_where(plan), Text()]
    parts += [*_decisions(plan), Text(), _verdict(plan)]
    if plan.shortfall is not None:
        parts += _shortfall(plan, plan.shortfall)
    if plan.notes:
        parts += [Text(), *(Text(f"note: {note}", style="dim") for note in plan.notes)]
    parts += [Text(), _provenance(plan)]
    return Group(*parts)


def html(plan: Plan) -> str:
    """The same as a page of HTML."""
    console = Console(record=True, width=110, file=_Nowhere(), force_terminal=True)
    console.print(render(plan))
    page = console.export_html(inline_styles=True)
    return page.replace("<head>", f"<head>\n<title>{escape(plan.model.name)}: memory plan</title>", 1)


class _Nowhere:
    """A file that keeps nothing: the console records by itself."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def headline(plan: Plan) -> Text:
    """Model, batch and card; the budget, if there is one."""
    work = plan.workload
    per_sample = f" x {work.seq_len} tokens" if work.seq_len else ""
    text = Text.assemble((plan.model.name, "bold"), f", {_count(plan.model.parameters)} parameters, ")
    text.append(f"batch {work.batch_size}{per_sample}, {work.optimizer}\n")
    if work.gradients_alive:
        text.append("gradients of earlier batches are alive before the step, which adds to them\n")
    card = "a made-up card of this size, name yours with --gpu" if plan.card == GENERIC else plan.card
    text.append(f"card: {card} ({plan.card_source})")
    if plan.vram_bytes is not None:
        text.append(f"\nbudget: {format_size(plan.vram_bytes)}, fidelity: {plan.fidelity}")
    return text


def _table(plan: Plan) -> Table:
    """Bytes by category at each peak, and the three totals."""
    changed = bool(plan.decisions)
    table = Table(title="what is alive at the peak of one step", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("as it is", justify="right")
    if changed:
        table.add_column("with the plan", justify="right")
    before, after = plan.baseline.breakdown, plan.peak.breakdown
    for category in (str(category) for category in Category if category in {*before, *after}):
        row = [category, _size(before.get(category, 0))]
        table.add_row(*row, *([_size(after.get(category, 0))] if changed else []))
    table.add_section()
    for label, field in _TOTALS:
        row = [label, format_size(getattr(plan.baseline, field))]
        style = "bold" if field == "total_bytes" else None
        table.add_row(*row, *([format_size(getattr(plan.peak, field))] if changed else []), style=style)
    table.add_section()
    table.add_row("step time (predicted)", _time(plan.baseline), *([_time(plan.peak)] if changed else []))
    return table


def _where(plan: Plan) -> list[Text]:
    lines = [Text(f"peak as it is: {_moment(plan.baseline)}")]
    if plan.decisions:
        lines.append(Text(f"peak with the plan: {_moment(plan.peak)}"))
    return lines


def _moment(footprint: Footprint) -> str:
    module = f" of {footprint.module}" if footprint.module else ""
    return f"{footprint.phase}{module}, at {footprint.op}"


def _decisions(plan: Plan) -> list[RenderableType]:
    if plan.vram_bytes is None:
        return []
    if not plan.decisions:
        return [Text("plan: train as it is", style="bold")]
    lines: list[RenderableType] = []
    if plan.fits and plan.baseline.total_bytes <= plan.vram_bytes:
        size = f"{format_size(plan.baseline.total_bytes)} of {format_size(plan.vram_bytes)}"
        lines.append(Text(f"it fits as it is ({size}); the plan is only faster, and --fidelity exact leaves it alone"))
    lines.append(Text(_which(plan), style="bold"))
    for decision in plan.decisions:
        words = f"- {decision.describe()} ({decision.fidelity.name.lower()})"
        lines.append(Padding(Text(words), (0, 0, 0, 2)))
    return lines


def _which(plan: Plan) -> str:
    if plan.shortfall is None:
        return "plan"
    return "smallest plan that is allowed" if plan.shortfall.missing_bytes else "fastest plan inside the budget"


def _verdict(plan: Plan) -> RenderableType:
    if plan.vram_bytes is None:
        return Text(f"needs {format_size(plan.baseline.total_bytes)}", style="bold")
    if plan.shortfall is not None:
        if not plan.shortfall.missing_bytes:
            found = f"the fastest plan inside the budget takes {plan.slowdown:.2f} x the step time"
            return Text(f"does not fit: {found}, and at most {plan.max_slowdown:g} x is allowed", style="bold red")
        missing = format_size(plan.shortfall.missing_bytes)
        return Text(f"does not fit: the smallest allowed plan is {missing} over the budget", style="bold red")
    ratio = plan.slowdown
    speed = "as fast as before" if abs(ratio - 1) < 0.005 else f"{_factor(ratio)} {'slower' if ratio > 1 else 'faster'}"
    fits = f"fits: {format_size(plan.peak.total_bytes)} of {format_size(plan.vram_bytes)}, certified by rehearsal"
    return Group(Text(fits, style="bold green"), Text(f"step time: {speed}, predicted from the card's {_rates(plan)}"))


def _rates(plan: Plan) -> str:
    return "measured rates" if plan.card_source.startswith("calibrated") else "datasheet, not measured"


def _shortfall(plan: Plan, shortfall: Shortfall) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if shortfall.missing_bytes:
        lines.append(Text(f"what binds there: {shortfall.binding}, {format_size(shortfall.binding_bytes)}"))
    if shortfall.next_step is None:
        needed = plan.vram_bytes + shortfall.missing_bytes
        budget = f"; a budget of {-(-needed // MIB):,} MiB would" if shortfall.missing_bytes else ""
        lines.append(Text(f"no further step makes it fit{budget}"))
    else:
        step = shortfall.next_step
        size = format_size(step.total_bytes)
        lines.append(
            Text(f"what would make it fit: {step.relax}, {size} in total, {step.slowdown:.2f} x the step time")
        )
        lines += [Text(f"  - {decision.describe()}") for decision in step.decisions]
    return [*lines, *([Text(), _relaxations(shortfall)] if shortfall.relaxations else [])]


def _relaxations(shortfall: Shortfall) -> Table:
    """Everything that is not allowed, and what it would do."""
    table = Table(title="what is not allowed", title_justify="left", title_style="bold")
    for name in ("", "then it", "total", "x the step time", "fidelity"):
        table.add_column(name, justify="right" if name in ("total", "x the step time") else "left")
    for one in shortfall.relaxations:
        if one.next_step is None:
            table.add_row(one.relax, one.why if one.opens is None else f"does not fit: {one.why}", "", "", "")
        else:
            size, slowdown = format_size(one.next_step.total_bytes), f"{one.next_step.slowdown:.2f}"
            table.add_row(one.relax, "fits", size, slowdown, one.fidelity)
    return table


def _provenance(plan: Plan) -> Text:
    versions = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    solver = plan.solver
    promised, certified = format_size(solver.promised_bytes), format_size(solver.certified_bytes)
    return Text(
        f"solver: {solver.status}, gap {solver.gap:.2%}, {solver.seconds:.2f} s; "
        f"tensors: promised {promised}, rehearsed {certified}; planned in {plan.seconds:.1f} s; {versions}",
        style="dim",
    )


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:,}"


def _factor(ratio: float) -> str:
    return f"{ratio:.2f} x" if ratio > 1 else f"{1 / ratio:.2f} x"


def _size(size_bytes: int) -> str:
    return format_size(size_bytes) if size_bytes else "-"


def _time(footprint: Footprint) -> str:
    return f"{footprint.step_ns / 1e6:,.1f} ms"
