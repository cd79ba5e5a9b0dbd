"""Compares published memory of trainings on several cards with a rehearsal of one rank.

    python -m benchmarks.published.several_cards [WORD ...]

With words, only the rows whose setting contains one of them are rehearsed. Nothing is fitted. Each module of this
folder says where its figures come from, what is not the same as in the source, and what is not known.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from benchmarks.published.several_cards import accelerate_guide, fms_acceleration, lightning_guides, zero_recipe
from benchmarks.published.several_cards.rows import MB, Row, outcome
from planner.allocator.replay import AllocatorOutcome
from planner.assemble import versions

ROWS = (*zero_recipe.ROWS, *lightning_guides.ROWS, *accelerate_guide.ROWS, *fms_acceleration.ROWS)


def main() -> None:
    console = Console(width=120)
    console.print(", ".join(f"{name} {version}" for name, version in versions().items()))
    table = Table("setting", "cards", "measure", "published", "predicted", "error")
    outcomes: dict[object, AllocatorOutcome] = {}
    for row in (row for row in ROWS if _is_chosen(row)):
        if row.program not in outcomes:
            outcomes[row.program] = outcome(row)
        predicted = row.predicted(outcomes[row.program])
        unit = "MB" if row.unit_bytes == MB else "MiB"
        error = f"{predicted / row.published - 1:+.1%}"
        cells = (row.setting, str(row.cards), row.measure, f"{row.published:,.0f} {unit}", f"{predicted:,.1f}", error)
        print(*cells, sep=", ", file=sys.stderr)
        table.add_row(*cells)
    console.print(table)


def _is_chosen(row: Row) -> bool:
    words = sys.argv[1:]
    return not words or any(word in row.setting for word in words)


if __name__ == "__main__":
    main()
