"""Rehearse measured cases again and compare them with the allocations that a card recorded. Needs no card.

    python -m benchmarks.again DIR [--cases NAME ...] [--gpu NAME]

DIR holds fidelity.jsonl and streams.jsonl.gz of an earlier run. Use the torch version that the rows name:
another version may allocate differently.
"""

from __future__ import annotations

import argparse
import pathlib

import torch

from benchmarks.card import results
from benchmarks.card.cases import CASES
from benchmarks.card.comparing import Finding, compare_steps
from benchmarks.card.history import read_streams
from benchmarks.card.predicting import Prediction, predict
from planner.workload.cards import resolve_card

SHOWN = 4
"""Maximum number of ops that are printed for a case."""


def report(row: results.Row, prediction: Prediction, found: Finding | None) -> str:
    """Formats the errors of the new prediction, the matched share of the stream, and the ops that differ most."""
    measured = row["measured"]
    errors = (
        prediction.allocated_bytes / measured["allocated_bytes"] - 1,
        prediction.reserved_bytes / measured["reserved_bytes"] - 1,
    )
    text = f"{row['case']:36s} allocated {errors[0]:+8.3%} reserved {errors[1]:+8.3%}"
    if found is None:
        return text
    lines = [f"{text} stream {found.matched_share:.4%}"]
    for kind, totals in (("missing", found.missing_by_op), ("surplus", found.surplus_by_op)):
        lines += [f"    {kind} {size_bytes:14,d} B  {op}" for op, size_bytes in list(totals.items())[:SHOWN]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--cases", nargs="+", metavar="NAME", choices=list(CASES))
    parser.add_argument("--gpu", help="profile to use instead of the one that the rows name, such as a calibrated file")
    options = parser.parse_args()
    rows = {row["case"]: row for row in results.rows(options.folder / "fidelity.jsonl") if row["error"] is None}
    streams = {entry["case"]: entry for entry in read_streams(options.folder / "streams.jsonl.gz")}
    for name in options.cases or rows:
        row, stream = rows[name], streams[name]
        if row["torch"].split("+")[0] != torch.__version__.split("+")[0]:
            print(f"{name}: recorded with torch {row['torch']}, rehearsed with {torch.__version__}")
        prediction = predict(CASES[name], resolve_card(options.gpu or row["card"], None))
        compared = prediction.whole_batch
        found = compare_steps(stream["sizes"], stream["step_ends"], prediction) if compared else None
        print(report(row, prediction, found), flush=True)


if __name__ == "__main__":
    main()
