"""The docstring of an emitted file: the plan, what it is predicted to take, and the command that makes it again."""

from __future__ import annotations

import shlex
import textwrap

from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import WIDTH

MIB = 2**20


def header(plan: Plan, file_name: str) -> str:
    rehearsed = "" if plan.certified else " (not rehearsed)"
    paragraphs = [
        _title(plan),
        f"{_wrapped(_made_by(plan))}\n\n{_command(plan, file_name)}",
        "What it does:\n" + "\n".join(_wrapped(f"- {line}", hang="  ") for line in _decisions(plan)),
        f"Predicted for one step{rehearsed}, at the peak of each, in MiB:\n\n{_table(plan)}",
        _wrapped(_peak(plan)),
        *(["\n".join(_wrapped(f"- {note}", hang="  ") for note in plan.notes)] if plan.notes else []),
    ]
    text = "\n\n".join(paragraphs).replace('"""', "'''")
    return f'{"r" if chr(92) in text else ""}"""{text}\n"""'


def _title(plan: Plan) -> str:
    title = f"One training step of {plan.model.name} ({plan.model.parameters:,} parameters) on {plan.card}"
    if plan.vram_bytes is None:
        return f"{title}."
    verdict = "within" if plan.fits else "that does NOT fit"
    return f"{title}, {verdict} {plan.vram_bytes / MIB:,.0f} MiB."


def _made_by(plan: Plan) -> str:
    return f"Planned with {', '.join(f'{name} {version}' for name, version in plan.versions.items())} by"


def _command(plan: Plan, file_name: str) -> str:
    """As typed: in Python for a live model, in a shell otherwise. Options stay with their values."""
    if plan.model.reference is None:
        call = (
            f"vram={plan.vram_bytes if plan.vram_bytes is None else repr(_size(plan.vram_bytes))}",
            *(["loss_fn=loss_fn"] if plan.workload.has_loss_fn else []),
            f"gpu={plan.card!r}",
            f"fidelity={plan.fidelity!r}",
            f"optimizer={plan.workload.optimizer!r}",
            *([f"force={plan.forced!r}"] if plan.forced else []),
            *([f"forbid={plan.forbidden!r}"] if plan.forbidden else []),
            *([f"max_slowdown={plan.max_slowdown!r}"] if plan.max_slowdown is not None else []),
            *(["gradients_alive=True"] if plan.workload.gradients_alive else []),
        )
        return _filled(["planner.plan(model", "batch", *call], ", ", ",") + ")"
    options = [
        *([("--vram", _size(plan.vram_bytes))] if plan.vram_bytes is not None else []),
        ("--batch-size", str(plan.workload.batch_size)),
        *([("--seq-len", str(plan.workload.seq_len))] if plan.workload.seq_len is not None else []),
        ("--optimizer", plan.workload.optimizer),
        ("--gpu", plan.card),
        ("--fidelity", plan.fidelity),
        *(("--force", kind) for kind in plan.forced),
        *(("--forbid", kind) for kind in plan.forbidden),
        *([("--max-slowdown", f"{plan.max_slowdown!r}")] if plan.max_slowdown is not None else []),
        *([("--gradients-alive",)] if plan.workload.gradients_alive else []),
        ("--emit", file_name),
    ]
    return _filled([shlex.join(words) for words in (("plan", plan.model.reference), *options)], " ", " \\")


def _filled(units: list[str], between: str, at_end: str) -> str:
    """Units joined to indented lines of at most the file's width."""
    lines = ["    " + units[0]]
    for unit in units[1:]:
        if len(lines[-1]) + len(between) + len(unit) + len(at_end) <= WIDTH:
            lines[-1] += between + unit
        else:
            lines[-1] += at_end
            lines.append("        " + unit)
    return "\n".join(lines)


def _size(size_bytes: int) -> str:
    for unit_bytes, unit in ((2**30, "GiB"), (MIB, "MiB")):
        if size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{unit}"
    return str(size_bytes)


def _decisions(plan: Plan) -> list[str]:
    batch = f"a batch of {plan.workload.batch_size} samples"
    return [f"{batch}, optimizer {plan.workload.optimizer}", *(decision.describe() for decision in plan.decisions)]


def _table(plan: Plan) -> str:
    names = list(dict.fromkeys([*plan.baseline.breakdown, *plan.peak.breakdown]))
    rows = [(name, plan.baseline.breakdown.get(name, 0), plan.peak.breakdown.get(name, 0)) for name in names]
    rows += [
        ("total (nvidia-smi)", plan.baseline.total_bytes, plan.peak.total_bytes),
        ("reserved by the allocator", plan.baseline.reserved_bytes, plan.peak.reserved_bytes),
        ("allocated by tensors", plan.baseline.allocated_bytes, plan.peak.allocated_bytes),
    ]
    lines = [f"    {'':<26}{'as given':>12}{'this file':>12}"]
    for name, before, after in rows:
        if name == "total (nvidia-smi)":
            lines.append("    " + "-" * 50)
        lines.append(f"    {name:<26}{before / MIB:>12,.1f}{after / MIB:>12,.1f}")
    lines.append(f"    {'step time':<26}{'1.00x':>12}{f'{plan.slowdown:.2f}x':>12}")
    return "\n".join(lines)


def _peak(plan: Plan) -> str:
    place = f" in {plan.peak.module}" if plan.peak.module else ""
    return f"The peak of this file is in {plan.peak.phase}{place}, at {plan.peak.op}."


def _wrapped(text: str, hang: str = "") -> str:
    return "\n".join(textwrap.wrap(text, WIDTH, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False))
