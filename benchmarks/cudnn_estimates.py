"""Compares the estimates of cuDNN's workspaces (`planner/workspaces/cudnn/fallback.py`) with the tables.

    python -m benchmarks.cudnn_estimates

An error is a share of the bytes of the convolution's image, weight and result. For an estimate from another batch size,
the convolution itself is left out of the table.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from planner.workspaces.cudnn import tables
from planner.workspaces.cudnn.convolution import Convolution, Kind, Shape
from planner.workspaces.cudnn.fallback import CLOSE, estimated_bytes, scaled_workspaces


def errors(table: tables.Table) -> Iterator[tuple[tuple[str, str], float]]:
    """Yields the error of each estimate, with the kind of the estimate and the kind of the numbers."""
    for capability in table.capabilities:
        for text in table.lines:
            for kind in map(Kind.of, table.kinds):
                convolution = Convolution(kind, Shape.of(text))
                if not (sizes := table.workspaces(convolution, capability)):
                    continue
                size = sizes[0]
                shape = convolution.shape
                whole = sum(convolution.nbytes(sizes) for sizes in (shape.x, shape.w, shape.y))
                numbers = f"{kind.dtype}{', TF32' * kind.tf32}{', channels_last' * kind.channels_last}"
                yield ("formula", numbers), abs(estimated_bytes(convolution, capability) - size) / whole
                if scaled := scaled_workspaces(convolution, table, capability):
                    yield ("other batch size", numbers), abs(scaled[0] - size) / whole


def main() -> None:
    result = Table(title="errors of estimated workspaces")
    for column in ("cuDNN", "estimate", "numbers", "workspaces", "within 2 %", "3 of 4 within", "9 of 10 within"):
        result.add_column(column, justify="left" if column in ("cuDNN", "estimate", "numbers") else "right")
    for table in map(tables.read, sorted(tables.FOLDER.glob("*[0-9].xz"))):
        found: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
        for (estimate, numbers), error in errors(table):
            found[estimate, numbers].append(error)
            found[estimate, "all"].append(error)
        for (estimate, numbers), several in sorted(found.items()):
            several.sort()
            shares = (sum(error <= CLOSE for error in several) / len(several), *(
                several[int(len(several) * share)] for share in (0.75, 0.9)
            ))  # fmt: skip
            name = ".".join(map(str, table.version))
            result.add_row(name, estimate, numbers, f"{len(several):,}", *(f"{share:.1%}" for share in shares))
    Console(width=150).print(result)


if __name__ == "__main__":
    main()
