"""Check the time model on plans that were trained on cards: errors of slowdowns, and whether the fastest was chosen.

    python -m benchmarks.times [ROWS.jsonl ...]

Reads the rows of `benchmarks.promise` (default: those of the ledger). Slowdown is the plan's step time over the
baseline's; its error is predicted over measured. A choice is judged by the plan's step time over that of the fastest
plan for the same model that was measured on the same card within this budget, whatever budget it was planned for.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.card import results
from benchmarks.ledger import LEDGER

SLOWDOWN_WITHIN = 0.15
"""Maximum median error of the slowdown."""
FASTEST_WITHIN = 0.05
"""Maximum share by which a chosen plan may be slower than the fastest."""


def trained(rows: Sequence[results.Row]) -> list[results.Row]:
    """Returns the last row of each model, budget and card that has a measurement."""
    latest = {(row["pair"], row["card"]): row for row in rows if row.get("measured") is not None}
    return list(latest.values())


def slowdown_errors(rows: Sequence[results.Row]) -> np.ndarray:
    """Returns the errors of the slowdown, for the rows whose baseline fits the card."""
    pairs = [(row["promised"]["slowdown"], row["measured"]["slowdown"]) for row in rows]
    return np.array([abs(promised / measured - 1) for promised, measured in pairs if measured is not None])


def step_errors(rows: Sequence[results.Row]) -> np.ndarray:
    """Returns the errors of the step time, after scaling all predictions by one common factor."""
    ratios = np.array([row["promised"]["step_ms"] / row["measured"]["step_ms"] for row in rows])
    return np.abs(ratios / np.exp(np.median(np.log(ratios))) - 1)


def fastest(row: results.Row, rows: Sequence[results.Row]) -> results.Row:
    """Returns the fastest plan for this model, among those measured inside this row's budget (this row included)."""
    inside = [
        other
        for other in rows
        if (other["case"], other["card"]) == (row["case"], row["card"])
        and other["measured"]["total_bytes"] <= row["vram_bytes"]
    ]
    return min([row, *inside], key=lambda other: other["measured"]["step_ms"])


def missed(row: results.Row, rows: Sequence[results.Row]) -> float:
    """Returns how much slower the chosen plan is than the fastest, as a share of the latter's time."""
    return row["measured"]["step_ms"] / fastest(row, rows)["measured"]["step_ms"] - 1


def by_card(rows: Sequence[results.Row]) -> Table:
    """Returns a table with a row for each card."""
    table = Table(
        "card",
        "profile",
        "trained",
        "error of the slowdown: median, 90 %",
        "of the step time",
        "choices within 5 %",
        "worst choice",
    )
    for card in dict.fromkeys(row["card"] for row in rows):
        of_card = [row for row in rows if row["card"] == card]
        behind = np.array([missed(row, of_card) for row in of_card if row["vram_bytes"] is not None])
        near = int((behind <= FASTEST_WITHIN).sum())
        table.add_row(
            card,
            ", ".join(dict.fromkeys(row["card_source"].split()[0] for row in of_card)),
            str(len(of_card)),
            _spread(slowdown_errors(of_card)),
            _spread(step_errors(of_card)),
            f"{near} of {len(behind)}",
            f"+{behind.max():.1%}" if len(behind) else "-",
        )
    return table


def _spread(errors: np.ndarray) -> str:
    return f"{np.median(errors):.1%}, {np.quantile(errors, 0.9):.1%}" if len(errors) else "-"


def slower_choices(rows: Sequence[results.Row]) -> Table:
    """Returns a table of the choices that were more than `FASTEST_WITHIN` slower than the fastest plan."""
    table = Table("chosen", "slower by", "its plan", "the fastest was planned for", "the fastest plan")
    for row in rows:
        if row["vram_bytes"] is not None and (behind := missed(row, rows)) > FASTEST_WITHIN:
            other = fastest(row, rows)
            plans = ["; ".join(choice["plan"]) or "baseline" for choice in (row, other)]
            table.add_row(row["pair"], f"{behind:.1%}", plans[0], other["budget"], plans[1])
    return table


def main() -> int:
    """Returns 0 if the time model is within its limits on every card that was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=pathlib.Path, nargs="*")
    options = parser.parse_args()
    paths = options.rows or sorted(LEDGER.glob("promise-*.jsonl"))
    rows = trained([row for path in paths for row in results.rows(path)])
    console = Console(width=170)
    if not rows:
        console.print("no plan has been trained on a card yet; docs/gpu.md says how to do it")
        return 0
    console.print(by_card(rows))
    if (slower := slower_choices(rows)).row_count:
        console.print(slower)
    return 0 if holds(rows) else 1


def holds(rows: Sequence[results.Row]) -> bool:
    """True if the slowdowns and the choices are within their limits."""
    errors = slowdown_errors(rows)
    near = all(missed(row, rows) <= FASTEST_WITHIN for row in rows if row["vram_bytes"] is not None)
    return near and (not len(errors) or float(np.median(errors)) <= SLOWDOWN_WITHIN)


if __name__ == "__main__":
    raise SystemExit(main())
