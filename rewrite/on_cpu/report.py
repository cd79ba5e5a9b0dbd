"""Print a verification on the CPU: what was compared, and what was not."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.plan_types.sizes import format_size
from planner.rewrite.on_cpu.run import CpuStep
from planner.rewrite.on_cpu.verification import NOT_MEASURED, SAME_PLAN, CpuVerification


def render_cpu_verification(verification: CpuVerification) -> RenderableType:
    """Return everything that the command prints for `--verify` on a machine without a CUDA card, below the plan."""
    ran = verification.ran
    parts: list[RenderableType] = [Text(), Text("no CUDA card here: trained by the plan on the CPU"), Text()]
    parts += [_table(ran.steps), Text()]
    parts += [Text(f"step {number}: {step.why}") for number, step in enumerate(ran.steps, 1) if step.why]
    parts.append(Text(_unpredicted(ran.steps)))
    parts.append(Text(f"training was not compared: {SAME_PLAN}" if ran.parity is None else str(ran.parity)))
    parts += [Text(f"note: {note}", style="dim") for note in ran.notes]
    parts.append(Text(f"not measured: {NOT_MEASURED}"))
    if verification.kept:
        return Group(*parts, Text("everything that was compared on the CPU agrees", style="bold green"))
    return Group(*parts, Text("what was compared on the CPU does NOT agree", style="bold red"))


def _table(steps: tuple[CpuStep, ...]) -> Table:
    title = "bytes of tensors at each step's peak, rehearsed for the CPU and measured"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for name in ("predicted", "measured", "difference"):
        table.add_column(name, justify="right")
    for number, step in enumerate(steps, 1):
        difference = step.measured_bytes - step.predicted_bytes
        size = format_size(step.measured_bytes)
        table.add_row(
            f"step {number}, {size}", f"{step.predicted_bytes:,}", f"{step.measured_bytes:,}", f"{difference:+,}"
        )
    return table


def _unpredicted(steps: tuple[CpuStep, ...]) -> str:
    kernels, outside = max(step.kernel_bytes for step in steps), max(step.outside_bytes for step in steps)
    return (
        f"not predicted: up to {format_size(kernels)} of temporaries inside CPU kernels, and up to "
        f"{format_size(outside)} outside of ops (states of random generators, Python numbers)"
    )
