"""Report of one plan: memory and time of baseline and plan, the decisions, and what would help if no plan fits."""

from __future__ import annotations

import pathlib

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner.cli.run_report import run_advice, run_parts
from planner.estimate.largest_tensors import shape_text
from planner.plan_types.decision_base import cards_of
from planner.plan_types.plan import Footprint, ModelFacts, Plan, Shortfall
from planner.plan_types.plan_parts import TRAINING_STEP
from planner.plan_types.plan_summary import as_found, speed_text
from planner.plan_types.sizes import MIB, format_size
from planner.plan_types.words import counted
from planner.recording.step_graph import Category

_TOTALS = (
    ("allocated, as blocks", "allocated_bytes"),
    ("reserved by the allocator", "reserved_bytes"),
    ("total of the process", "total_bytes"),
)
"""The last rows of the memory table: label, and the `Footprint` field that the row shows."""
GENERIC = "generic"
"""Name of the generic card, as in `planner.workload.cards`, which this module cannot import without torch."""


UNCHECKED = "not checked: that training by the plan gives the baseline's results; --verify checks it"
"""Line for a plan for one card with which nothing has been trained yet."""
_UNCHECKED_ON_CARDS = "not checked: that training by the plan gives the baseline's results; --verify is for one card"
"""The same line for a plan for several cards."""


def render(plan: Plan, *, verified: bool = False) -> RenderableType:
    """Returns everything that the command prints for a plan.

    Args:
        verified: True if `--verify` has trained with the plan; its result is printed below.
    """
    parts: list[RenderableType] = [headline(plan), Text(), _table(plan), Text(), *_peaks(plan), *_tensors(plan), Text()]
    if plan.run is not None:
        parts += [*run_parts(plan.run), Text()]
    parts += [*_decisions(plan), Text(), _verdict(plan)]
    if plan.fits and plan.decisions and not verified:
        parts.append(Text(UNCHECKED if cards_of(plan.decisions) == 1 else _UNCHECKED_ON_CARDS))
    if plan.shortfall is not None:
        parts += _shortfall(plan, plan.shortfall)
    if plan.notes:
        parts += [Text(), *(Text(f"note: {note}", style="dim") for note in plan.notes)]
    parts += [Text(), provenance(plan)]
    return Group(*parts)


def headline(plan: Plan) -> Text:
    """Returns the first lines of the report: the model, the batch, the budget if there is one, and the card."""
    workload = plan.workload
    tokens = f" x {counted(workload.seq_len, 'token')}" if workload.seq_len else ""
    text = Text.assemble((plan.model.name, "bold"), f", {_parameters(plan.model)}, ")
    cards = cards_of(plan.decisions)
    where = f" on each of {counted(cards, 'card')}" if cards > 1 else ""
    text.append(f"batch {workload.batch_size}{tokens}{where}, {workload.optimizer}\n")
    if workload.gradients_alive:
        text.append(
            "accumulating loop: gradients of earlier batches are in memory before the step, which adds to them\n"
        )
    if plan.vram_bytes is not None:
        text.append(f"budget: {format_size(plan.vram_bytes)}, fidelity: {plan.fidelity}\n")
    card = plan.card
    if card == GENERIC:
        size = " with that much memory" if plan.vram_bytes is not None else ""
        card = f"a generic Ampere GPU{size}; name yours with --gpu"
    text.append(f"card: {card} ({plan.card_source})")
    if plan.link is not None and plan.cards_per_node is not None:
        machines = -(-cards // plan.cards_per_node)
        text.append(f"\nlink between cards: {plan.link}")
        if machines > 1:
            each = counted(plan.cards_per_node, "card")
            text.append(f" in each of {machines:,} machines with {each}, and a network between them")
        text.append(" (name yours with --link and --cards-per-node)")
    return text


def _parameters(model: ModelFacts) -> str:
    """Describes the parameters, such as '1.2 B parameters in bfloat16, 11.3 M of them trained'."""
    text = f"{_count(model.parameters)} parameters in {model.dtype}"
    if model.adapter is not None:
        text += f", {model.adapter}"
    trained = model.trained_parameters
    return text if trained in (None, model.parameters) else f"{text}, {_count(trained or 0)} of them trained"


def _table(plan: Plan) -> Table:
    """Returns the table of memory by category, of the totals and of the step time, for the baseline and the plan.

    Each of them has two columns: the bytes at its peak, and the largest number of bytes that each category ever has.
    """
    footprints = [plan.baseline, *([plan.peak] if plan.decisions else [])]
    table = Table(title="Memory of one training step", title_justify="left", title_style="bold")
    table.add_column("")
    for name in ("baseline", "with the plan")[: len(footprints)]:
        table.add_column(f"{name},\nat its peak", justify="right")
        table.add_column("\nat most", justify="right", style="dim")
    shown = {name for footprint in footprints for name in (*footprint.breakdown, *footprint.most)}
    for name in (str(category) for category in Category if category in shown):
        table.add_row(name, *(text for f in footprints for text in (_size(f.breakdown.get(name, 0)), _most(f, name))))
    table.add_section()
    for label, field in _TOTALS:
        style = "bold" if field == "total_bytes" else None
        table.add_row(label, *(text for f in footprints for text in (format_size(getattr(f, field)), "")), style=style)
    table.add_section()
    table.add_row("step time (predicted)", *(text for f in footprints for text in (_time(f), "")))
    return table


def _most(footprint: Footprint, category: str) -> str:
    """Returns the largest number of bytes that a category has in the step; empty if it is not known, as for slack."""
    return format_size(footprint.most[category]) if category in footprint.most else ""


def _tensors(plan: Plan) -> list[RenderableType]:
    """Returns the heading and the table of the largest tensors at the peak; empty if the plan lists none."""
    if not plan.tensors:
        return []
    where = "with the plan" if plan.decisions else "of the baseline"
    table = Table(title=f"Largest tensors at the peak {where}", title_justify="left", title_style="bold", box=None)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("shape and dtype", no_wrap=True)
    table.add_column("tensor, module, line", overflow="fold")
    for tensor in plan.tensors:
        count = f"{tensor.count} x " if tensor.count > 1 else ""
        shape = f"{shape_text(tensor.shape, tensor.dtype)} {tensor.dtype}"
        what = f"{tensor.category}: {tensor.name}" if tensor.name else tensor.category
        module = f" of {tensor.module}" if tensor.module and not tensor.name else ""
        line = f", {pathlib.PurePath(tensor.source).name}" if tensor.source else ""
        table.add_row(f"{count}{format_size(tensor.size_bytes)}", shape, f"{what}{module}{line}")
    return [Text(), table]


def _peaks(plan: Plan) -> list[Text]:
    """Returns the lines that say at which op memory peaks, for the baseline and for the plan."""
    lines = [Text(f"peak of the baseline: {_moment(plan.baseline)}")]
    if plan.decisions:
        lines.append(Text(f"peak with the plan: {_moment(plan.peak)}"))
    return lines


def _moment(footprint: Footprint) -> str:
    """Describes the peak by its phase, module and op."""
    module = f" of {footprint.module}" if footprint.module else ""
    return f"{footprint.phase}{module}, at {footprint.op}"


def _decisions(plan: Plan) -> list[RenderableType]:
    """Returns a heading, and one line for each decision of the plan. Without a budget nothing is returned."""
    if plan.vram_bytes is None:
        return []
    if not plan.decisions:
        if plan.fits:
            nothing = "nothing needs to change"
        elif plan.solver.status == "time limit":
            nothing = "the step without changes; no smaller plan was certified in time"
        else:
            nothing = "the step without changes; no smaller plan was found"
        return [Text(f"plan: {nothing}", style="bold")]
    lines: list[RenderableType] = []
    if plan.fits and plan.baseline.total_bytes <= plan.vram_bytes:
        size = f"{format_size(plan.baseline.total_bytes)} of {format_size(plan.vram_bytes)}"
        only = "; the plan only makes the step faster" if plan.peak.step_ns < plan.baseline.step_ns else ""
        lines.append(Text(f"The baseline already fits ({size}){only}."))
    lines.append(Text(_plan_title(plan), style="bold"))
    for decision in plan.decisions:
        item = f"- {decision.describe()} ({decision.fidelity.name.lower()})"
        lines.append(Padding(Text(item), (0, 0, 0, 2)))
    return lines


def _plan_title(plan: Plan) -> str:
    """Returns the heading above the decisions. If no plan fits, it says which plan is shown instead."""
    if plan.shortfall is None:
        return "plan"
    if plan.shortfall.missing_bytes:
        return f"smallest allowed plan {as_found(plan)}"
    return "fastest plan inside the budget"


def _verdict(plan: Plan) -> RenderableType:
    """Returns the lines that say whether the plan fits, and how fast it is compared with the baseline."""
    if plan.vram_bytes is None:
        return Text(f"needs {format_size(plan.baseline.total_bytes)}", style="bold")
    if plan.shortfall is not None:
        if not plan.shortfall.missing_bytes:
            fastest = f"the fastest plan inside the budget takes {plan.slowdown:.2f} x the baseline's step time"
            return Text(f"does not fit: {fastest}, and at most {plan.max_slowdown:g} x is allowed", style="bold red")
        missing = format_size(plan.shortfall.missing_bytes)
        if plan.run is not None and not plan.run.fits:
            return Text(
                f"does not fit: the largest step would, but the whole run needs {missing} more than the budget, in the "
                f"{plan.run.binding}",
                style="bold red",
            )
        smallest = f"the smallest allowed plan {as_found(plan)}"
        return Text(f"does not fit: {smallest} is {missing} over the budget", style="bold red")
    assert plan.limit_bytes is not None and plan.room_bytes is not None, "there is a budget"
    size = f"{format_size(plan.total_bytes)} of {format_size(plan.limit_bytes)}"
    how = "certified by rehearsal" if plan.run is None else "in the simulated run; its steps are certified by rehearsal"
    fits = f"fits: {size}, with {format_size(plan.room_bytes)} to spare, {how}"
    speed = speed_text(plan.slowdown)
    return Group(Text(fits, style="bold green"), Text(f"step time: {speed}, predicted from the card's {_rates(plan)}"))


def _rates(plan: Plan) -> str:
    """Names the source of the card's rates, as the end of 'predicted from the card's ...'."""
    return "measured rates" if plan.card_source.startswith("calibrated") else "datasheet, not measured"


_NO_RELAXATION = "No plan fits with any other technique or fidelity either."


def _shortfall(plan: Plan, shortfall: Shortfall) -> list[RenderableType]:
    """Returns the lines for a budget that no plan fits.

    They name the largest category of memory, and the relaxation of the constraints that makes a plan fit with the least
    slowdown.
    """
    lines: list[RenderableType] = []
    if shortfall.missing_bytes:
        if plan.room_bytes is not None and plan.room_bytes >= 0 and plan.run is None:
            lines.append(Text(f"It would fit with a smaller margin: {format_size(plan.room_bytes)} stay free."))
        if plan.run is None or plan.run.binding == TRAINING_STEP:
            lines.append(Text(f"largest part: {shortfall.binding}, {format_size(shortfall.binding_bytes)}"))
    if plan.run is not None and not plan.run.fits:
        return [*lines, Text(run_advice(plan.run))]
    if shortfall.next_step is None:
        needed_bytes = (plan.usable_bytes or 0) + shortfall.missing_bytes
        if plan.card_bytes is not None and needed_bytes > plan.card_bytes - plan.margin_bytes:
            enough = f" The plan above takes {-(-needed_bytes // MIB):,} MiB, more than the card has."
        else:
            enough = f" A budget of {-(-needed_bytes // MIB):,} MiB would be enough."
        untried = any(relaxation.opens is None for relaxation in shortfall.relaxations)
        help_text = "Nothing that makes a plan fit was found in time." if untried else _NO_RELAXATION
        lines.append(Text(f"{help_text}{enough if shortfall.missing_bytes else ''}"))
    else:
        step = shortfall.next_step
        cost = f"{format_size(step.total_bytes)} in total and {step.slowdown:.2f} x the baseline's step time"
        lines.append(Text(f"To make it fit: {step.relax}. The plan then takes {cost}:"))
        lines += [Text(f"  - {decision.describe()}") for decision in step.decisions]
    if shortfall.relaxations:
        lines += [Text(), _relaxations(shortfall)]
    return lines


def _relaxations(shortfall: Shortfall) -> Table:
    """Returns a table with a row for each relaxation of the constraints: whether a plan then fits, and its figures."""
    table = Table(
        title="What else was tried, and whether a plan then fits",
        title_justify="left",
        title_style="bold",
    )
    for name in ("change", "result", "total", "x baseline", "fidelity"):
        table.add_column(name, justify="right" if name in ("total", "x baseline") else "left")
    for relaxation in shortfall.relaxations:
        step = relaxation.next_step
        if step is None:
            why = relaxation.why if relaxation.opens is None else f"does not fit: {relaxation.why}"
            table.add_row(relaxation.relax, why, "", "", "")
        else:
            size, slowdown = format_size(step.total_bytes), f"{step.slowdown:.2f}"
            table.add_row(relaxation.relax, "fits", size, slowdown, relaxation.fidelity)
    return table


def provenance(plan: Plan) -> Text:
    """Returns the last lines of the report: the solver's result, the planning time and the versions of packages."""
    versions = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    solver = plan.solver
    promised, certified = format_size(solver.promised_bytes), format_size(solver.certified_bytes)
    # After a time limit, 1 is an upper bound that says nothing.
    gap = "not known" if solver.status == "time limit" and solver.gap == 1 else f"{solver.gap:.2%}"
    recalled = f" with {counted(plan.recalled, 'recording')} of earlier calls" if plan.recalled else ""
    return Text(
        f"solver: {solver.status}, gap {gap}, {solver.seconds:.2f} s; "
        f"tensors: promised {promised}, rehearsed {certified}; planned in {plan.seconds:.1f} s{recalled}; {versions}",
        style="dim",
    )


def _count(number: int) -> str:
    """Formats a number of parameters, such as 83.5 M."""
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:,}"


def _size(size_bytes: int) -> str:
    return format_size(size_bytes) if size_bytes else "-"


def _time(footprint: Footprint) -> str:
    return f"{footprint.step_ns / 1e6:,.1f} ms"
