"""Copy measured rows into the ledger, without the fields that only help to find mistakes.

    python -m benchmarks.ledger DIR/fidelity.jsonl | DIR/promise.jsonl

Rows go to profiles/ledger/CARD.jsonl and profiles/ledger/promise-CARD.jsonl. A case that the ledger already has with
the same versions and date is not added again. Rows with an error, and budgets that no plan fits, are left out and
listed.
"""

from __future__ import annotations

import pathlib
import sys

from benchmarks.card import results

LEDGER = pathlib.Path(__file__).parents[1] / "profiles" / "ledger"
LEFT_OUT = ("by_op", "unknown_ops")
SHOWN_DIFFERENCES = 3


def brief(row: results.Row) -> results.Row:
    """Returns the row without long lists."""
    if "stream" not in row:
        return row
    stream = dict(row["stream"])
    if "differences" in stream:
        stream["differences"] = stream["differences"][:SHOWN_DIFFERENCES]
    return {**{key: value for key, value in row.items() if key not in LEFT_OUT}, "stream": stream}


def identity(row: results.Row) -> tuple:
    """Returns the key that two rows of the same measurement share."""
    return (row.get("pair", row["case"]), *(row[key] for key in ("card", "date", "torch", "driver")))


def why_left_out(row: results.Row) -> str | None:
    """Returns the reason why a row is not copied; None if it is a measurement."""
    if row["error"] is not None:
        return row["error"]
    return None if row.get("fits", True) else "no plan fits"


def take_over(measured: pathlib.Path, ledger: pathlib.Path) -> list[str]:
    """Add the rows to the ledger. Returns a line for each card and for each row that was left out."""
    messages, added = [], {}
    files = (path for path in ledger.glob("*.jsonl") if path.name != "cpu.jsonl")  # see benchmarks.cpu_ledger
    known = {identity(row) for path in files for row in results.rows(path)}
    for row in results.rows(measured):
        name = f"promise-{row['card']}" if "pair" in row and "card" in row else row.get("card")
        if (why := why_left_out(row)) is not None:
            messages.append(f"left out: {row.get('pair', row['case'])}: {why}")
        elif identity(row) not in known:
            known.add(identity(row))
            results.append(ledger / f"{name}.jsonl", brief(row))
            added[name] = added.get(name, 0) + 1
    return [*messages, *(f"{count} rows added to {name}.jsonl" for name, count in added.items())]


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print("\n".join(take_over(pathlib.Path(sys.argv[1]), LEDGER)))


if __name__ == "__main__":
    main()
