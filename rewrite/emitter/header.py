"""The docstring of an emitted file: the plan, the command that makes the plan again, and the predicted memory."""

from __future__ import annotations

import shlex
import textwrap
from typing import Any

from planner.plan_types.categories import Category
from planner.plan_types.decision_base import Role, cards_of, parts_of_batch, with_roles
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import margin_bytes
from planner.plan_types.words import counted
from planner.profiles.links import CARDS_PER_NODE
from planner.rewrite.emitted_code import WIDTH
from planner.rewrite.emitter.quoted import docstring
from planner.workload.call_convention import Calling

MIB = 2**20


def header(plan: Plan, file_name: str) -> str:
    """Return the docstring of the emitted file, with its quotes. `file_name` is the name of the file."""
    rehearsed = "" if plan.certified else " (predicted by the solver, not rehearsed)"
    paragraphs = [
        _title(plan),
        f"{_wrapped(_made_with(plan))}\n\n{_command(plan, file_name)}",
        "The plan:\n" + "\n".join(_wrapped(f"- {line}", hang="  ") for line in _decisions(plan)),
        f"Memory at the peak of one step, in MiB{rehearsed}:\n\n{_table(plan)}",
        _wrapped(_peak(plan)),
        *(["Notes:\n" + "\n".join(_wrapped(f"- {note}", hang="  ") for note in plan.notes)] if plan.notes else []),
    ]
    return docstring("\n\n".join(paragraphs) + "\n")


def _title(plan: Plan) -> str:
    cards = cards_of(plan.decisions)
    title = f"One training step of {plan.model.name} ({plan.model.parameters:,} parameters) on "
    title += plan.card if cards == 1 else f"{counted(cards, 'card')} {plan.card}"
    if plan.vram_bytes is None:
        return f"{title}."
    budget = f"{plan.vram_bytes / MIB:,.0f} MiB{'' if cards == 1 else ' on each'}"
    return f"{title}, within {budget}." if plan.fits else f"{title}. The plan does NOT fit in {budget}."


def _made_with(plan: Plan) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    return f"Planned with {versions} by a command like this one:"


def _command(plan: Plan, file_name: str) -> str:
    """Return the command that makes the plan again: a call in Python for a live model, else a shell command."""
    is_own = plan.workload.calling == Calling.STEP.name  # the function that MODEL names also returns the optimizers
    margin = _margin(plan)
    if plan.model.reference is None:
        call = (
            f"vram={plan.vram_bytes if plan.vram_bytes is None else repr(_size(plan.vram_bytes))}",
            *([f"margin={margin!r}"] if margin is not None else []),
            *(["loss_fn=loss_fn"] if plan.workload.has_loss_fn else []),
            f"gpu={plan.card!r}",
            *_cards_in_python(plan),
            f"fidelity={plan.fidelity!r}",
            *(["step=step", "optimizer=optimizer"] if is_own else [f"optimizer={plan.workload.optimizer!r}"]),
            *([f"force={plan.forced!r}"] if plan.forced else []),
            *([f"forbid={plan.forbidden!r}"] if plan.forbidden else []),
            *([f"max_slowdown={plan.max_slowdown!r}"] if plan.max_slowdown is not None else []),
            *(["gradients_alive=True"] if plan.workload.gradients_alive else []),
            *([f"alloc_conf={plan.alloc_conf!r}"] if plan.alloc_conf else []),
            *(["cudnn_benchmark=True"] if plan.cudnn_benchmark else []),
        )
        return _filled(["planner.plan(model", "batch", *call], ", ", ",") + ")"
    options = [
        *([("--vram", _size(plan.vram_bytes))] if plan.vram_bytes is not None else []),
        *([] if margin is None else [("--margin", margin)]),
        ("--batch-size", str(plan.workload.batch_size * parts_of_batch(plan.decisions))),
        *([("--seq-len", str(plan.workload.seq_len))] if plan.workload.seq_len is not None else []),
        *([] if is_own else [("--optimizer", plan.workload.optimizer)]),
        *([plan.model.adapter.option] if plan.model.adapter is not None else []),
        *([("--dtype", plan.model.dtype)] if ":" not in plan.model.reference else []),
        ("--gpu", plan.card),
        *_cards_on_command_line(plan),
        ("--fidelity", plan.fidelity),
        *(("--force", kind) for kind in plan.forced),
        *(("--forbid", kind) for kind in plan.forbidden),
        *([("--max-slowdown", f"{plan.max_slowdown!r}")] if plan.max_slowdown is not None else []),
        *([("--accumulating-loop",)] if plan.workload.gradients_alive else []),
        *([("--alloc-conf", plan.alloc_conf)] if plan.alloc_conf else []),
        *([("--cudnn-benchmark",)] if plan.cudnn_benchmark else []),
        ("--emit", file_name),
    ]
    script = [("--", *plan.model.arguments)] if plan.model.arguments else []
    words = (("plan", plan.model.reference), *options, *script)
    return _filled([shlex.join(option) for option in words], " ", " \\")


def _cards_on_command_line(plan: Plan) -> list[tuple[str, ...]]:
    """Return the options about several cards; empty for one card."""
    shard, per_node = _sharding(plan), plan.cards_per_node
    if not shard:
        return []
    names, mesh = shard.get("dimensions", ()), shard["mesh"]
    sizes = ",".join(map("{}={}".format, names, mesh)) if names else "x".join(map(str, mesh))
    return [
        ("--cards", str(cards_of(plan.decisions))),
        *([("--parallelize", shard["function"])] if shard.get("function") else [("--sharding", shard["way"])]),
        *([("--mesh", sizes)] if names or len(mesh) > 1 else []),
        *([("--offload-shards",)] if shard.get("offload") else []),
        *([("--link", plan.link)] if plan.link is not None else []),
        *([("--cards-per-node", str(per_node))] if per_node not in (None, CARDS_PER_NODE) else []),
    ]


def _cards_in_python(plan: Plan) -> list[str]:
    """Return the arguments of `planner.plan` about several cards; empty for one card."""
    shard, per_node = _sharding(plan), plan.cards_per_node
    if not shard:
        return []
    names = shard.get("dimensions", ())
    mesh = dict(zip(names, shard["mesh"], strict=True)) if names else tuple(shard["mesh"])
    return [
        f"cards={cards_of(plan.decisions)}",
        "parallelize=parallelize" if shard["way"] == "own" else f"sharding={shard['way']!r}",
        *([f"mesh={mesh!r}"] if names or len(shard["mesh"]) > 1 else []),
        *(["offload_shards=True"] if shard.get("offload") else []),
        *([f"link={plan.link!r}"] if plan.link is not None else []),
        *([f"cards_per_node={per_node}"] if per_node not in (None, CARDS_PER_NODE) else []),
    ]


def _sharding(plan: Plan) -> dict[str, Any]:
    """Return the decision by which several cards train together as the plan file has it; empty for one card."""
    return next((decision.to_json() for decision in with_roles(plan.decisions, Role.SHARDING)), {})


def _filled(options: list[str], between: str, at_end: str) -> str:
    """Return the options of a command as indented lines, each at most `WIDTH` characters long.

    An option stays on one line with its value. `between` joins options on the same line, and `at_end` is appended to
    each line but the last.
    """
    lines = ["    " + options[0]]
    for option in options[1:]:
        if len(lines[-1]) + len(between) + len(option) + len(at_end) <= WIDTH:
            lines[-1] += between + option
        else:
            lines[-1] += at_end
            lines.append("        " + option)
    return "\n".join(lines)


def _margin(plan: Plan) -> str | None:
    """Return the margin as on the command line; None if it is the default."""
    default_bytes = margin_bytes(None, card_bytes=plan.card_bytes) if plan.card_bytes else 0
    return None if plan.margin_bytes == default_bytes else _size(plan.margin_bytes)


def _size(size_bytes: int) -> str:
    """Return a size in GiB or MiB, such as '6GiB', if that is a whole number; else the number of bytes."""
    for unit_bytes, unit in ((2**30, "GiB"), (MIB, "MiB")):
        if size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{unit}"
    return str(size_bytes)


def _decisions(plan: Plan) -> list[str]:
    number, parts = cards_of(plan.decisions), parts_of_batch(plan.decisions)
    batch, cards = f"a batch of {counted(plan.workload.batch_size, 'sample')}", counted(number, "card")
    if number > 1:
        batch += f" on each of {cards}" if parts == number else f" for each {number // parts} of {cards}"
    return [f"{batch}, optimizer {plan.workload.optimizer}", *(decision.describe() for decision in plan.decisions)]


def _table(plan: Plan) -> str:
    """Return the table that compares memory at the peak of the baseline with that of the plan.

    It has a row for each category of memory, then rows for the totals and the step time.
    """
    names = [str(name) for name in Category if name in plan.baseline.breakdown or name in plan.peak.breakdown]
    rows = [(name, plan.baseline.breakdown.get(name, 0), plan.peak.breakdown.get(name, 0)) for name in names]
    rows += [
        ("total (nvidia-smi)", plan.baseline.total_bytes, plan.peak.total_bytes),
        ("reserved by the allocator", plan.baseline.reserved_bytes, plan.peak.reserved_bytes),
        ("allocated by tensors", plan.baseline.allocated_bytes, plan.peak.allocated_bytes),
    ]
    lines = [f"    {'':<26}{'baseline':>12}{'with the plan':>16}"]
    for name, before, after in rows:
        if name == "total (nvidia-smi)":
            lines.append("    " + "-" * 54)
        lines.append(f"    {name:<26}{before / MIB:>12,.1f}{after / MIB:>16,.1f}")
    lines.append(f"    {'step time':<26}{'1.00x':>12}{f'{plan.slowdown:.2f}x':>16}")
    return "\n".join(lines)


def _peak(plan: Plan) -> str:
    module = f", in module {plan.peak.module}" if plan.peak.module else ""
    return f"With the plan, memory peaks in {plan.peak.phase}{module}, at {plan.peak.op}."


def _wrapped(text: str, hang: str = "") -> str:
    return "\n".join(textwrap.wrap(text, WIDTH, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False))
