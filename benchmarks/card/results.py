"""Files of rows that grow during a run, so that the next run does not measure the same rows again."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

Row = dict[str, Any]


def append(path: pathlib.Path, row: Row) -> None:
    """Append one line and flush it to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def rows(path: pathlib.Path) -> list[Row]:
    """Returns all rows. An incomplete last line is removed from the file."""
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def done(found: list[Row], key: str) -> set[str]:
    """Returns the names of the rows without an error."""
    return {row[key] for row in found if row.get("error") is None}


def still_to_do(wanted: list[str], found: list[Row], key: str) -> list[str]:
    """Returns the names that have no row yet, in order, and then those that failed before and may fail again."""
    finished, seen = done(found, key), {row[key] for row in found}
    return [name for name in wanted if name not in seen] + [
        name for name in wanted if name in seen and name not in finished
    ]
