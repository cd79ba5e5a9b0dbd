"""A verification for people: what was promised, what the card showed, and whether that is as promised."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.plan_types.sizes import format_size
from planner.rewrite.on_gpu.verification import Quantity, Verification
from planner.rewrite.on_gpu.worker import Ran, RanOut


def render_verification(found: Verification) -> RenderableType:
    """Everything the command prints for `--verify`, below the plan."""
    parts: list[RenderableType] = [Text(), _where(found), Text()]
    parts += [_table(found), Text()] if isinstance(found.planned, Ran) else _ran_out(found, found.planned)
    return Group(*parts, *_beside_plain(found), _verdict(found))


def _where(found: Verification) -> Text:
    text = Text.assemble("measured on ", (found.planned.device, "bold"))
    if found.cap_bytes is not None:
        text.append(f", the allocator capped at {format_size(found.cap_bytes)}")
    if not found.same_card:
        text.append(
            f"\nit stands for {found.plan.card}: the cap is that card's, but kernels, context and speed are its own"
        )
    return text


def _table(found: Verification) -> Table:
    table = Table(title="the promise on the card", title_justify="left", title_style="bold")
    table.add_column("")
    for name in ("promised", "measured", "of promised"):
        table.add_column(name, justify="right")
    table.add_column("")
    for quantity in found.quantities:
        table.add_row(*_row(quantity))
    return table


def _row(quantity: Quantity) -> tuple[str, ...]:
    said = {True: "kept", False: "broken", None: "told, not promised"}[quantity.kept]
    if quantity.measured is None:
        return quantity.name, _number(quantity, quantity.promised), "-", "-", "not measured"
    share = f"{quantity.measured / quantity.promised:.2%}" if quantity.promised else "-"
    return quantity.name, _number(quantity, quantity.promised), _number(quantity, quantity.measured), share, said


def _number(quantity: Quantity, value: float) -> str:
    if quantity.name == "step time":
        return f"{value:,.1f} ms"
    return f"{value:.2f} x" if quantity.name == "slowdown" else format_size(round(value))


def _ran_out(found: Verification, ran_out: RanOut) -> list[RenderableType]:
    where = f"in step {ran_out.step}" if ran_out.step else "while the model was moved to the card"
    lines = [Text(f"out of memory {where}: {ran_out.message}", style="bold red")]
    if ran_out.place is not None:
        place = ran_out.place
        module = f" of {place['module']}" if place["module"] else ""
        lines.append(Text(f"at {place['op']}, {place['phase']}{module}; alive there, beside what was promised:"))
        promised = found.plan.peak.breakdown
        lines += [Text(f"  {name}: {format_size(size)}") for name, size in place["alive"].items()]
        words = ", ".join(f"{name} {format_size(size)}" for name, size in promised.items())
        lines.append(Text(f"  promised at the peak: {words}"))
    return [*lines, Text()]


def _beside_plain(found: Verification) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if isinstance(found.plain, RanOut):
        lines.append(Text("the step as it is does not fit this card, so that there is no slowdown to measure"))
    if found.parity is not None:
        lines.append(Text(str(found.parity)))
    elif found.why_no_parity:
        lines.append(Text(f"training was not compared: {found.why_no_parity}"))
    return lines


def _verdict(found: Verification) -> Text:
    if found.kept:
        return Text("the promise is kept", style="bold green")
    return Text("the promise is BROKEN", style="bold red")
