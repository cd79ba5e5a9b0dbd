"""The parts of the page that are text and tables: verdict, figures, the plan with its prices, memory at the peak."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from planner.cli.page.recorded import Stage
from planner.cli.page.timeline import STACK
from planner.cli.run_report import run_sentence
from planner.plan_types.plan import Footprint, Plan, RunFacts
from planner.plan_types.plan_summary import as_found
from planner.plan_types.sizes import format_size
from planner.plan_types.tradeoff import Tradeoff

_MOST_LISTED = 6
"""Maximum number of decisions of one technique that the table of prices lists without a click."""


def verdict(plan: Plan) -> str:
    """Returns the title of the page: whether the plan fits, its peak, and its speed."""
    peak = format_size(plan.peak.total_bytes)
    if plan.limit_bytes is None:
        return f"Peak {peak}, {speed(plan.slowdown)}" if plan.decisions else f"Needs {peak}"
    budget = format_size(plan.limit_bytes)
    if not plan.fits and plan.shortfall is None:
        return f"Does not fit in {budget}: the smallest plan peaks at {peak}"
    if plan.shortfall is not None and plan.shortfall.missing_bytes:
        missing = format_size(plan.shortfall.missing_bytes)
        smallest = f"the smallest allowed plan {as_found(plan)} peaks at {peak}"
        return f"Does not fit in {budget}: {smallest}, {missing} over the budget"
    if plan.shortfall is not None:
        limit = f"at most {plan.max_slowdown:g}x is allowed"
        return f"Too slow in {budget}: {plan.slowdown:.2f}x the baseline's step time, {limit}"
    if not plan.decisions:
        return f"Fits in {budget}: peak {peak}, nothing needs to change"
    return f"Fits in {budget}: peak {peak}, {speed(plan.slowdown)}"


def speed(ratio: float) -> str:
    """Describes a ratio of step times in words, such as '1.21x slower than the baseline'."""
    if abs(ratio - 1) < 0.005:
        return "as fast as the baseline"
    return f"{max(ratio, 1 / ratio):.2f}x {'slower' if ratio > 1 else 'faster'} than the baseline"


def figures(plan: Plan) -> str:
    """Returns the figures below the title, as items of a description list."""
    changed = bool(plan.decisions)
    items = [
        ("peak memory", format_size(plan.peak.total_bytes), _before(changed, format_size(plan.baseline.total_bytes))),
        ("step time (predicted)", _ms(plan.peak.step_ns), _before(changed, _ms(plan.baseline.step_ns))),
    ]
    if plan.limit_bytes is not None and plan.room_bytes is not None:
        left = plan.room_bytes
        rest = f"{format_size(left)} to spare" if left >= 0 else f"{format_size(-left)} missing"
        items.append(("budget", format_size(plan.limit_bytes), rest))
    kinds = dict.fromkeys(decision.kind for decision in plan.decisions)
    if plan.vram_bytes is not None or kinds:
        items.append(("techniques", str(len(kinds)), ", ".join(kinds) or "none is needed"))
    return "\n".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for label, value, more in items
    )


def _before(changed: bool, value: str) -> str:
    return f"baseline: {value}" if changed else "the plan is the baseline"


def plan_section(plan: Plan, stages: Sequence[Stage]) -> str:
    """Returns the table of the plan's techniques with what each saves and costs; empty if nothing was asked for."""
    if plan.vram_bytes is None and not plan.decisions:
        return ""
    if not plan.decisions:
        return _section("plan", "The plan", "<p>Nothing needs to change.</p>")
    rows = [("baseline", "", "", format_size(plan.baseline.total_bytes), _ms(plan.baseline.step_ns))]
    before_bytes, before_ns = plan.baseline.total_bytes, plan.baseline.step_ns
    for stage in stages:
        saved, added = before_bytes - stage.total_bytes, stage.step_ns - before_ns
        rows.append(
            (
                _techniques(plan, stage.kinds),
                _signed(format_size(-saved), saved <= 0),
                _signed(_ms(added), added >= 0),
                format_size(stage.total_bytes),
                _ms(stage.step_ns),
            )
        )
        before_bytes, before_ns = stage.total_bytes, stage.step_ns
    table = _table(("technique", "memory", "step time", "total after it", "step time after it"), rows, numbers=4)
    lead = (
        "Each row adds a technique to those above it. The step was rehearsed for each row, so the differences are what "
        "a technique saves and costs at its place in this order; in another order they would be different. Memory is "
        "the peak of the whole process, and times are predicted."
    )
    return _section("plan", "The plan, and the price of each technique", f"<p>{lead}</p>{table}{_ways_out(plan)}")


def _techniques(plan: Plan, kinds: Sequence[str]) -> str:
    """Returns the decisions of some techniques as HTML."""
    parts = []
    for kind in kinds:
        decisions = [decision for decision in plan.decisions if decision.kind == kind]
        lines = [f"<li>{escape(decision.describe())}</li>" for decision in decisions]
        shown, rest = "".join(lines[:_MOST_LISTED]), "".join(lines[_MOST_LISTED:])
        more = f"<details><summary>{len(lines) - _MOST_LISTED} more</summary><ul class=plain>{rest}</ul></details>"
        fidelity = decisions[0].fidelity.name.lower()
        parts.append(
            f'<strong>{escape(kind)}</strong> <span class="fine">{fidelity}</span>'
            f'<ul class="plain fine">{shown}</ul>{more if rest else ""}'
        )
    return "".join(parts)


def _ways_out(plan: Plan) -> str:
    """Returns sentences that say what would make the plan fit; empty if it fits or nothing helps."""
    step = None if plan.shortfall is None else plan.shortfall.next_step
    if step is None:
        return ""
    cost = f"{format_size(step.total_bytes)} in total and {step.slowdown:.2f}x the baseline's step time"
    return f"<p>To make it fit: {escape(step.relax)}. The plan then takes {cost}.</p>"


def peak_section(plan: Plan) -> str:
    """Returns the table of memory by category at the peak."""
    changed, before, after = bool(plan.decisions), plan.baseline.breakdown, plan.peak.breakdown
    rows = []
    for category in [str(category) for category in reversed(STACK) if category in {*before, *after}]:
        rows.append((category, _size(before.get(category, 0)), *([_size(after.get(category, 0))] if changed else [])))
    totals = [
        (label, *(format_size(getattr(footprint, field)) for footprint in _footprints(plan)))
        for label, field in (
            ("allocated, as blocks", "allocated_bytes"),
            ("reserved by the allocator", "reserved_bytes"),
            ("total of the process", "total_bytes"),
        )
    ]
    moments = [
        f"{name}: {footprint.phase}{f' of {footprint.module}' if footprint.module else ''}, at {footprint.op}"
        for name, footprint in zip(("Baseline", "Plan"), _footprints(plan), strict=False)
    ]
    heads = ("category", "baseline", "plan")[: 2 + changed]
    table = _table(heads, [*rows, *totals], numbers=1 + changed, totals=3)
    lead = (
        "The table shows the moment at which the allocated blocks are largest. Allocator slack is the memory that "
        f"the allocator holds at its own peak beyond the tensors. {escape('. '.join(moments))}."
    )
    return _section("peak", "Memory at the peak", f"<p>{lead}</p>{table}")


def run_section(run: RunFacts | None) -> str:
    """Returns the tables of the whole run: its moments, and changes that would help; empty if no run was planned."""
    if run is None:
        return ""
    rows = [(escape(moment.name), format_size(moment.tensor_bytes), _size(moment.new_bytes)) for moment in run.moments]
    body = f"<p>{escape(run_sentence(run))}</p>"
    body += _table(("moment", "its tensors, at most", "takes from the card"), rows, numbers=2)
    if run.changes:
        changes = [
            (escape(change.change), format_size(change.total_bytes), f"{change.relative_time:.2f} x")
            for change in run.changes
        ]
        body += "<p>The same run with a change, without a limit of memory:</p>"
        body += _table(("change", "total", "time"), changes, numbers=2)
    return _section("run", "Memory of the whole run", body)


def _footprints(plan: Plan) -> list[Footprint]:
    return [plan.baseline, plan.peak] if plan.decisions else [plan.baseline]


def tradeoff_section(tradeoff: Tradeoff | None, drawing: str) -> str:
    """Returns the trade-off between memory and step time as picture and table; empty if none was computed.

    Args:
        drawing: the picture as an SVG element.
    """
    if tradeoff is None:
        return ""
    rows = []
    for plan in tradeoff.points:
        ratio = f"{plan.peak.step_ns / max(tradeoff.baseline.step_ns, 1):.2f}"
        what = "; ".join(decision.describe() for decision in plan.decisions) or "baseline"
        mark = "<strong>this plan</strong>: " if plan is tradeoff.chosen else ""
        size = format_size(plan.peak.total_bytes)
        rows.append((f"{mark}{escape(what)}", size, _ms(plan.peak.step_ns), ratio))
    table = _table(("plan", "memory", "step time", "x baseline"), rows, numbers=3)
    more = (
        "" if tradeoff.complete else " The time ran out: faster plans of the same size, and smaller plans, may exist."
    )
    lead = f"Certified plans from the fastest to the smallest: every plan that needs less memory is slower.{more}"
    return _section("tradeoff", "Memory against step time", f'<p>{lead}</p><div class="front">{drawing}</div>{table}')


def notes_list(notes: Iterable[str]) -> str:
    """Returns the notes of the plan as a list; empty if there are none."""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<ul>{items}</ul>" if items else ""


def _section(name: str, title: str, body: str) -> str:
    return f'<section aria-labelledby="{name}-title">\n<h2 id="{name}-title">{escape(title)}</h2>\n{body}\n</section>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int, totals: int = 0) -> str:
    """Returns a table whose first column is HTML, and whose last columns are numbers.

    Args:
        numbers: how many of the last columns are numbers.
        totals: how many of the last rows are totals.
    """
    rows = list(rows)
    first = len(heads) - numbers
    head = "".join(
        f'<th scope="col"{" class=number" if column >= first else ""}>{escape(text)}</th>'
        for column, text in enumerate(heads)
    )
    lines = []
    for number, row in enumerate(rows):
        cells = "".join(
            f'<td class="number" data-label="{escape(heads[column])}">{escape(text)}</td>'
            if column >= first
            else f'<th scope="row" class="wide">{text}</th>'
            for column, text in enumerate(row)
        )
        is_total = number >= len(rows) - totals
        lines.append(f'<tr class="total">{cells}</tr>' if is_total else f"<tr>{cells}</tr>")
    return f'<table class="cards"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _ms(time_ns: int) -> str:
    return f"{time_ns / 1e6:,.1f} ms"


def _size(size_bytes: int) -> str:
    return format_size(size_bytes) if size_bytes else "-"


def _signed(text: str, is_plus: bool) -> str:
    """Writes a difference with its sign."""
    return f"+{text}" if is_plus else text
