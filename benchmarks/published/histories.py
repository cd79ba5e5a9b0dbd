"""Replays public histories of the caching allocator to their last event, and shows which of them hold several steps.

    PLANNER_SHARED_DATA=FOLDER python -m benchmarks.published.histories

FOLDER holds `allocator_traces/*.json.gz`. A history ends with repeated steps if its last allocations and frees, in size
and order, are the ones before them again. The table shows how many events such a step has and how often it is
repeated at the end, whether every address and segment of the whole history is as recorded, and the first difference.
"""

from __future__ import annotations

import os
import pathlib

from rich.console import Console
from rich.table import Table

from planner.snapshot import Action, load, replay_history

SHORTEST = 60
"""Number of events below which a repetition is not a step."""


def repeated_end(sizes: list[int]) -> tuple[int, int] | None:
    """Returns the length and the number of equal pieces that end `sizes`, or None if there are not two."""
    for length in range(SHORTEST, len(sizes) // 2 + 1):
        piece = sizes[-length:]
        count = 1
        while sizes[len(sizes) - (count + 1) * length : len(sizes) - count * length] == piece:
            count += 1
        if count > 1:
            return length, count
    return None


def main() -> None:
    folder = pathlib.Path(os.environ["PLANNER_SHARED_DATA"]) / "allocator_traces"
    table = Table(title="public histories, replayed to their last event")
    for column in ("history", "events", "starts empty", "pieces that repeat at the end", "retries", "equal"):
        table.add_column(column, justify="right" if column in ("events", "retries") else "left")
    for path in sorted(folder.glob("*.json.gz")):
        history = load(path)
        changes = [e for e in history.events if e.action in (Action.ALLOC, Action.FREE_COMPLETED)]
        end = repeated_end([e.size_bytes if e.action is Action.ALLOC else -e.size_bytes for e in changes])
        result = replay_history(history)
        table.add_row(
            path.name.removesuffix(".json.gz"),
            f"{len(changes):,}",
            "yes" if result.starts_empty else "no",
            "-" if end is None else f"{end[1]} of {end[0]:,} events",
            str(result.retries),
            "yes" if result.is_equal else f"no: {(*result.addresses, *result.driver)[:1]}",
        )
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
