"""Print a verification: what was promised, what was measured on the card, and whether the promise was kept."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.plan_types.sizes import format_size
from planner.rewrite.on_gpu.verification import Quantity, Verification
from planner.rewrite.on_gpu.worker import Ran, RanOut


def render_verification(verification: Verification) -> RenderableType:
    """Return everything that the command prints for `--verify`, below the plan."""
    planned = verification.planned
    parts: list[RenderableType] = [Text(), _device(verification), Text()]
    parts += [_table(verification), Text()] if isinstance(planned, Ran) else _ran_out(verification, planned)
    return Group(*parts, *_comparison_with_baseline(verification), _verdict(verification))


def _device(verification: Verification) -> Text:
    text = Text.assemble("measured on ", (verification.planned.device, "bold"))
    if verification.cap_bytes is not None:
        text.append(f", with the allocator capped at {format_size(verification.cap_bytes)}")
    if not verification.same_card:
        text.append(
            f"\nin place of {verification.plan.card}: the cap is that of the planned card, but kernels, CUDA context "
            "and speed are those of this one"
        )
    return text


def _table(verification: Verification) -> Table:
    table = Table(title="promised and measured", title_justify="left", title_style="bold")
    table.add_column("")
    for name in ("promised", "measured", "of promised"):
        table.add_column(name, justify="right")
    table.add_column("")
    for quantity in verification.quantities:
        table.add_row(*_row(quantity))
    return table


def _row(quantity: Quantity) -> tuple[str, ...]:
    verdict = {True: "kept", False: "broken", None: "not promised"}[quantity.kept]
    if quantity.measured is None:
        return quantity.name, _number(quantity, quantity.promised), "-", "-", "not measured"
    share = f"{quantity.measured / quantity.promised:.2%}" if quantity.promised else "-"
    return quantity.name, _number(quantity, quantity.promised), _number(quantity, quantity.measured), share, verdict


def _number(quantity: Quantity, value: float) -> str:
    if quantity.name == "step time":
        return f"{value:,.1f} ms"
    return f"{value:.2f} x" if quantity.name == "slowdown" else format_size(round(value))


def _ran_out(verification: Verification, ran_out: RanOut) -> list[RenderableType]:
    where = f"in step {ran_out.step}" if ran_out.step else "while the model was moved to the card"
    lines = [Text(f"out of memory {where}: {ran_out.message}", style="bold red")]
    if ran_out.place is not None:
        location = ran_out.place
        module = f" of {location['module']}" if location["module"] else ""
        lines.append(Text(f"at {location['op']}, {location['phase']}{module}; memory in use at that moment:"))
        lines += [Text(f"  {name}: {format_size(size)}") for name, size in location["alive"].items()]
        promised = verification.plan.peak.breakdown
        breakdown = ", ".join(f"{name} {format_size(size)}" for name, size in promised.items())
        lines.append(Text(f"  promised at the peak: {breakdown}"))
    return [*lines, Text()]


def _comparison_with_baseline(verification: Verification) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if isinstance(verification.plain, RanOut):
        lines.append(Text("the baseline does not fit this card, so the slowdown was not measured"))
    if verification.parity is not None:
        lines.append(Text(str(verification.parity)))
    elif verification.why_no_parity:
        lines.append(Text(f"training was not compared: {verification.why_no_parity}"))
    return lines


def _verdict(verification: Verification) -> Text:
    if verification.kept:
        return Text("the promise is kept", style="bold green")
    return Text("the promise is BROKEN", style="bold red")
