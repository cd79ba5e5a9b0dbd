"""Judge whether rewritten steps train what plain loops train.

    python -m benchmarks.parity [--only NAME ...] [--pairs N | all] [--shard i/n] [--json FILE] [--list]

Each case is trained by a plain hand-written loop, by `rewrite.apply` and by the file of `rewrite.emit`, for 3 to 5
batches and with each technique that the planner offers for it. Losses, parameters, buffers, optimizer state and numbers
among the attributes of modules are compared: to the bit, or but for rounding in double precision where a technique
changes the order of sums. After `undo` the last batch is trained by the plain loop. The exit code is 1 if a training
differs without an error, or fails with an error that is not the planner's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import pathlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.parity.case import Case
from benchmarks.parity.judge import (
    BROKEN,
    DIFFERENT,
    EQUAL,
    ERROR,
    KNOWN,
    LATE,
    LEFT_OUT,
    NOT_OFFERED,
    OUTCOMES,
    PLAIN_FAILS,
    REFUSED,
    ROUNDED,
    WARNED,
    Outcome,
    judged,
    repeats,
)
from benchmarks.parity.models import adapters, cases
from benchmarks.parity.techniques import SINGLE, offer, pairs
from planner.assemble import versions
from planner.errors import PlannerError

NO_PLAN = "no plan"
"""Technique of an outcome that says why the planner refuses a case."""


def outcomes(case: Case, n_pairs: int | None, only: str | None = None) -> Iterator[Outcome]:
    """Yields the outcomes of a case: each offered technique, then pairs of those that passed alone.

    Args:
        n_pairs: number of pairs; None for all.
        only: prefix of the techniques to judge; None for all.
    """
    if (broken := repeats(case)) is not None:
        yield broken
        return
    try:
        offered = offer(case)
    except PlannerError as why:
        yield Outcome(case.name, NO_PLAN, "live", REFUSED, note=str(why).splitlines()[0][:230])
        return
    except Exception as why:  # whatever it is, the table lists it as an error of the planner
        yield Outcome(case.name, NO_PLAN, "live", ERROR, note=f"{type(why).__name__}: {str(why).splitlines()[:1]}")
        return
    passed = []
    for technique in offered.techniques:
        if only is None or technique.name.startswith(only):
            found = list(judged(case, offered, technique))
            yield from found
            if found[0].result in (EQUAL, ROUNDED):
                passed.append(technique)
    absent = set(SINGLE) - {technique.name for technique in offered.techniques}
    yield from (Outcome(case.name, name, way, NOT_OFFERED) for name in absent for way in ("live", "emitted"))
    for pair in pairs(passed, case.name, n_pairs):
        yield from judged(case, offered, pair)


def table_of(found: Sequence[Outcome]) -> Table:
    """Returns the numbers of trainings by technique and outcome, as live / emitted."""
    shown = [result for result in OUTCOMES if any(outcome.result == result for outcome in found)]
    table = Table("technique (live / emitted)", *shown)
    names = [*dict.fromkeys(["plain", NO_PLAN, *SINGLE, *("pairs" for _ in "p")])]
    counts = Counter((_row(outcome), outcome.way, outcome.result) for outcome in found)
    for name in names:
        if any(key[0] == name for key in counts):
            table.add_row(name, *(_cell(counts, [name], result) for result in shown))
    table.add_section()
    table.add_row("all", *(_cell(counts, names, result) for result in shown))
    return table


def _row(outcome: Outcome) -> str:
    return "pairs" if " + " in outcome.technique else outcome.technique


def _cell(counts: Counter, names: Sequence[str], result: str) -> str:
    live, emitted = (sum(counts[name, way, result] for name in names) for way in ("live", "emitted"))
    return f"{live} / {emitted}" if live or emitted else ""


def listed(console: Console, found: Sequence[Outcome], *results: str) -> None:
    """Print the outcomes with these results, one a line."""
    for outcome in found:
        if outcome.result in results:
            size = f" {outcome.size:.1e}" if outcome.size else ""
            console.print(
                f"{outcome.result}: {outcome.case} | {outcome.technique} | {outcome.way}{size} | {outcome.note}",
                markup=False, highlight=False, soft_wrap=True,
            )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="text in the names of the cases to judge")
    parser.add_argument("--technique", help="prefix of the single techniques to judge")
    parser.add_argument("--pairs", default="3", help="pairs of techniques for each case, or 'all' (default: 3)")
    parser.add_argument("--shard", default="1/1", help="i/n: every n-th case, from the i-th on")
    parser.add_argument("--json", type=pathlib.Path, help="file for all outcomes")
    parser.add_argument("--refusals", action="store_true", help="also list what was refused")
    parser.add_argument("--list", action="store_true", help="list the cases")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("planner").setLevel(logging.WARNING)
    console = Console(width=170)
    first, step = map(int, options.shard.split("/"))
    chosen = [c for c in cases() if not options.only or any(text in c.name for text in options.only)][first - 1 :: step]
    if options.list:
        console.print("\n".join(case.name for case in chosen), markup=False)
        return 0
    found: list[Outcome] = []
    began = time.process_time()
    for case in chosen:
        new = list(outcomes(case, None if options.pairs == "all" else int(options.pairs), options.technique))
        listed(console, new, BROKEN, DIFFERENT, ERROR, LATE, KNOWN, WARNED, PLAIN_FAILS)
        if options.refusals:
            listed(console, new, REFUSED, LEFT_OUT)
        found += new
        if options.json is not None:
            options.json.write_text(json.dumps([dataclasses.asdict(outcome) for outcome in found], indent=1))
    rounded = max((outcome.size for outcome in found if outcome.result == ROUNDED), default=0.0)
    console.print(table_of(found))
    for reason in adapters.SKIPPED:
        console.print(f"skipped: {reason}")
    console.print(
        f"{len(chosen)} cases, {sum(o.result != NOT_OFFERED for o in found)} outcomes, largest rounding "
        f"{rounded:.1e}, {time.process_time() - began:.0f} CPU s; "
        + ", ".join(f"{name} {version}" for name, version in versions().items())
    )
    return int(any(outcome.failed for outcome in found))


if __name__ == "__main__":
    sys.exit(main())
