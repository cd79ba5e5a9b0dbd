"""Compares published memory of training convolutional networks with predictions. Nothing is fitted.

    python -m benchmarks.published.convolutional [WORD ...] [--keep FILE]

With words, only the rows whose setting or module contains one of them are rehearsed. With `--keep`, predictions are
added to a file of JSON lines, and those that it has are not made again. Each module of this folder says where its
figures come from, what is not the same as in the source, and what is not known.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
from collections.abc import Iterable

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.published.convolutional import autobatch, segmentation, video
from benchmarks.published.convolutional.rows import Predicted, Row, graph_of, predicted
from planner.assemble import versions

ROWS = (*video.ROWS, *segmentation.ROWS, *autobatch.ROWS)
LOW = -0.02


def key(row: Row) -> str:
    return f"{row.source.rpartition('.')[2]}: {row.setting}: {row.published:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="rehearse only rows that contain one of the words")
    parser.add_argument("--keep", type=pathlib.Path, help="file of JSON lines with predictions that were made before")
    options = parser.parse_args()
    kept = {}
    if options.keep is not None and options.keep.exists():
        kept = {line["row"]: Predicted(**line["predicted"]) for line in map(json.loads, options.keep.open())}
    chosen = [row for row in ROWS if not options.words or any(word in key(row) for word in options.words)]
    for row in track([row for row in chosen if key(row) not in kept], console=Console(stderr=True)):
        kept[key(row)] = made = predicted(row, graph_of(row))
        line = {"row": key(row), "predicted": {"without": made.without, "total": made.total}}
        print(json.dumps(line), flush=True) if options.keep is None else _append(options.keep, json.dumps(line))
    console = Console(width=150)
    console.print(", ".join(f"{name} {version}" for name, version in versions().items()))
    console.print(table((row, kept[key(row)]) for row in chosen))


def _append(path: pathlib.Path, line: str) -> None:
    with path.open("a") as file:
        file.write(f"{line}\n")


def table(rows: Iterable[tuple[Row, Predicted]]) -> Table:
    result = Table("setting", "published", "without", "predicted", "error without", "error")
    errors = []
    for row, found in rows:
        error = found.total / row.published - 1
        errors.append(error)
        numbers = (row.published, found.without, found.total)
        result.add_row(
            row.setting, *(f"{number:,.1f}" for number in numbers), f"{found.without / row.published - 1:+.2%}", f"{error:+.2%}"
        )
    result.caption = f"median {statistics.median(map(abs, errors)):.2%}, worst {max(map(abs, errors)):.2%}"
    return result


if __name__ == "__main__":
    main()
