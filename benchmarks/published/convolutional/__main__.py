"""Compares published memory of training convolutional networks with predictions. Nothing is fitted.

    python -m benchmarks.published.convolutional [WORD ...] [--keep FILE]

With words, only the rows whose setting or module contains one of them are rehearsed. With `--keep`, predictions are
added to a file of JSON lines, and rows that are in the file already are not rehearsed again. Each module of this folder
says where its figures come from, how the rehearsal differs from the source, and what is not known. `PLANNER_CUDNN`
chooses the libcudnn that is asked for workspaces.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.progress import track

from benchmarks.published.convolutional import autobatch, segmentation, video
from benchmarks.published.convolutional.rows import Predicted, Row, graph_of, predicted
from planner.assemble import versions

ROWS = (*video.ROWS, *segmentation.ROWS, *autobatch.ROWS)
LOW = -0.02
"""Error, as a share of the published figure, below which a prediction is counted as low."""
Found = Sequence[tuple[Row, Predicted]]


def key(row: Row) -> str:
    """Returns the name of a row in a file of predictions."""
    return f"{row.source.rpartition('.')[2]}: {row.setting}: {row.published:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="rehearse only rows that contain one of the words")
    parser.add_argument("--keep", type=pathlib.Path, help="file of JSON lines with predictions that were made before")
    options = parser.parse_args()
    kept: dict[str, Predicted] = {}
    if options.keep is not None and options.keep.exists():
        kept = {line["row"]: Predicted(**line["predicted"]) for line in map(json.loads, options.keep.open())}
    chosen = [row for row in ROWS if not options.words or any(word in key(row) for word in options.words)]
    for row in track([row for row in chosen if key(row) not in kept], console=Console(stderr=True)):
        kept[key(row)] = made = predicted(row, graph_of(row))
        if options.keep is not None:
            with options.keep.open("a") as file:
                file.write(json.dumps({"row": key(row), "predicted": dataclasses.asdict(made)}) + "\n")
    print(", ".join(f"{name} {version}" for name, version in versions().items()))
    found = [(row, kept[key(row)]) for row in chosen]
    for source in dict.fromkeys(row.source for row in chosen):
        print("", *table([each for each in found if each[0].source == source]), sep="\n")
    print("", *summary(found), sep="\n")


def table(found: Found) -> Iterable[str]:
    """Yields the lines of a table with one row for each published figure."""
    yield "| setting | published | tensors | off by | with workspaces | off by |"
    yield "|---|---:|---:|---:|---:|---:|"
    for row, made in found:
        digits = max(0, -round(_exponent(row.digit)))
        cells = [f"{row.published:,.{digits}f}"]
        for size_bytes in (made.without_bytes, made.total_bytes):
            cells += [
                f"{size_bytes / row.unit_bytes:,.{digits + (row.digit == 0.1)}f}",
                f"{error(row, size_bytes):+.2%}",
            ]
        yield f"| {row.setting} | {' | '.join(cells)} |"


def _exponent(digit: float) -> int:
    return int(f"{digit:e}".partition("e")[2])


def error(row: Row, size_bytes: int) -> float:
    """Returns the error of a prediction as a share of the published figure."""
    return size_bytes / row.unit_bytes / row.published - 1


def summary(found: Found) -> Iterable[str]:
    """Yields the lines of a table with the errors of each source, and of all rows whose settings are known."""
    yield "| rows | number | prediction | median | lowest | highest | more than 2 % low | largest shortfall |"
    yield "|---|---:|---|---:|---:|---:|---:|---:|"
    groups = {
        source.rpartition(".")[2]: [each for each in found if each[0].source == source] for source in _sources(found)
    }
    groups["all with known settings"] = [each for each in found if not each[0].doubt]
    for name, rows in groups.items():
        for column in ("without_bytes", "total_bytes"):
            sizes = [(row, getattr(made, column)) for row, made in rows]
            errors = [error(row, size) for row, size in sizes]
            if errors:
                short = max(row.published * row.unit_bytes - size for row, size in sizes) / (1 << 20)
                kind = "tensors" if column == "without_bytes" else "with workspaces"
                numbers = (f"{statistics.median(map(abs, errors)):.2%}", f"{min(errors):+.2%}", f"{max(errors):+.2%}")
                low = sum(each < LOW for each in errors)
                yield f"| {name} | {len(errors)} | {kind} | {' | '.join(numbers)} | {low} | {short:,.0f} MiB |"


def _sources(found: Found) -> Iterable[str]:
    return dict.fromkeys(row.source for row, _ in found)


if __name__ == "__main__":
    main()
