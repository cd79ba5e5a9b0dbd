"""Files of rows that grow while a run goes on: what one run left, the next one need not measure again."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

Row = dict[str, Any]


def append(path: pathlib.Path, row: Row) -> None:
    """Add one line and make sure that it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def rows(path: pathlib.Path) -> list[Row]:
    """All rows; a last line that was cut short is removed from the file."""
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def done(found: list[Row], key: str) -> set[str]:
    """Names of what was measured without an error."""
    return {row[key] for row in found if row.get("error") is None}


def still_to_do(wanted: list[str], found: list[Row], key: str) -> list[str]:
    """What has no row yet, in order, then what failed before: it may fail again."""
    finished, seen = done(found, key), {row[key] for row in found}
    return [name for name in wanted if name not in seen] + [
        name for name in wanted if name in seen and name not in finished
    ]
