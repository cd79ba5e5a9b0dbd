"""Writes the page of the documentation with the results of the zoo."""

from __future__ import annotations

import collections
import datetime
import platform
from collections.abc import Sequence

from benchmarks.zoo import libraries
from benchmarks.zoo.case import (
    ASSUMED,
    ERROR,
    EXACT,
    FITS,
    NO_PLAN,
    NOT_BUILT,
    REFUSED,
    SKIPPED,
    SLOW,
    WRONG,
    Verdict,
)

_COLUMNS = (EXACT, ASSUMED, REFUSED, WRONG, ERROR, SLOW, NOT_BUILT)
_SHOWN = 230
"""Maximum number of characters of a reason."""
INTRODUCTION = """# Models of other libraries

`python -m benchmarks.zoo` builds a small version of each model below with random weights, trains two plain steps on the
CPU, and compares them with a rehearsal. A model is *exact* if the rehearsed bytes equal the real bytes in both steps:
those of parameters and buffers, of gradients, of optimizer state, and of all tensors at the peak. The real peak is read
from PyTorch's CPU allocator. The rehearsal that gives the peak is for a CPU, because GPU kernels allocate other
tensors. The step is also rehearsed for a GPU; of that rehearsal, only parameters, gradients and optimizer state are
compared.

Some of the models, chosen at random with a seed, were also planned. Their budget was parameters, optimizer state, and
60 % of what the baseline's peak adds to these.

A model is *not buildable* if it cannot be made small by the names of its settings, if it needs inputs that the
benchmark does not know or a package that is not installed, or if its plain step fails. Such models say nothing about
the planner.
"""


def text(verdicts: Sequence[Verdict]) -> str:
    """Returns the page: totals by library, then each model that is not exact, with the reason."""
    versions = ", ".join(f"{name} {version}" for name, version in libraries.versions())
    date = f"{datetime.date.today():%d %B %Y}".lstrip("0")
    parts = [
        INTRODUCTION,
        f"Results of {date} with Python {platform.python_version()}, {versions}:\n",
        _totals(verdicts),
        *_listed(verdicts),
    ]
    return "\n".join(parts)


def _totals(verdicts: Sequence[Verdict]) -> str:
    rows = ["| library | models | " + " | ".join(_COLUMNS) + " |", "|---" * (len(_COLUMNS) + 2) + "|"]
    for library in [*dict.fromkeys(verdict.library for verdict in verdicts), None]:
        chosen = [verdict for verdict in verdicts if library in (None, verdict.library)]
        counts = collections.Counter(verdict.result for verdict in chosen)
        cells = [str(counts[result] or "") for result in _COLUMNS]
        rows.append(f"| {library or 'all'} | {len(chosen)} | " + " | ".join(cells) + " |")
    plans = collections.Counter(verdict.plan for verdict in verdicts if verdict.plan)
    planned = (
        f"Of {sum(plans.values())} models that were planned, a plan fits for {plans[FITS]}, and no plan fits for "
        f"{plans[NO_PLAN]}. Planning was refused for {plans[REFUSED]}, and ended with an error of the "
        f"planner for {plans[ERROR]}."
    )
    return "\n".join([*rows, "", planned, ""])


def _listed(verdicts: Sequence[Verdict]) -> list[str]:
    sections = []
    for result in (ERROR, WRONG, REFUSED, ASSUMED, SLOW, NOT_BUILT, SKIPPED):
        chosen = [verdict for verdict in verdicts if verdict.result == result]
        if chosen:
            rows = [f"| {verdict.library}: {verdict.name} | {_reason(verdict.note)} |" for verdict in chosen]
            sections.append(
                "\n".join([f"## {result[0].upper()}{result[1:]}\n", "| model | reason |", "|---|---|", *rows, ""])
            )
    refused = [verdict for verdict in verdicts if verdict.plan in (REFUSED, ERROR)]
    if refused:
        rows = [f"| {v.library}: {v.name} | {v.plan} | {_reason(v.plan_note)} |" for v in refused]
        sections.append("\n".join(["## Not planned\n", "| model | how | reason |", "|---|---|---|", *rows, ""]))
    return sections


def _reason(note: str) -> str:
    """Returns a note as one cell of a table."""
    short = note if len(note) <= _SHOWN else f"{note[:_SHOWN].rsplit(' ', 1)[0]} ..."
    for special in "|*_[":
        short = short.replace(special, f"\\{special}")
    return short.replace("<", "&lt;")
