"""Reads regular files up to a size, and JSON and TOML up to a depth.

Devices and pipes are refused, because reading them may never end. Callers turn `OSError` and `ValueError` into their
own error.
"""

from __future__ import annotations

import json
import os
import stat
import tomllib
from typing import Any

MOST_BYTES = 64 << 20
"""Maximum size of a text file that is read as a whole, such as a plan or a config."""
MOST_DEPTH = 60
"""Maximum number of lists and objects inside of one another. Plans and configs have fewer than 12."""


def content(path: str | os.PathLike[str], *, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        OSError: the file cannot be read, is not a regular file, or has more than `most_bytes`.
        ValueError: `path` is not a path, since it has a null character.
    """
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            kind = "a folder" if stat.S_ISDIR(facts.st_mode) else "a device or a pipe"
            raise OSError(0, f"it is {kind}; name a regular file", os.fspath(path))
        if facts.st_size <= most_bytes:
            data = file.read(most_bytes + 1)
            if len(data) <= most_bytes:
                return data
    raise OSError(0, f"it has more than {most_bytes:,} bytes", os.fspath(path))


def text(path: str | os.PathLike[str], *, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a regular file in UTF-8. Raises the errors of `content`, and `ValueError` for other bytes."""
    return content(path, most_bytes=most_bytes).decode("utf-8-sig")


def json_data(path: str | os.PathLike[str]) -> Any:
    """Return the JSON data of a regular file. Raises the errors of `text` and of `parsed_json`."""
    return parsed_json(text(path))


def parsed_json(source: str | bytes) -> Any:
    """Return the data of a JSON text.

    Raises:
        ValueError: the text is not JSON, or is nested more than `MOST_DEPTH` deep.
    """
    try:
        data = json.loads(source)
    except RecursionError:
        raise ValueError(f"it is nested more than {MOST_DEPTH} levels deep") from None
    _refuse_depth(data)
    return data


def parsed_toml(source: str) -> dict[str, Any]:
    """Return the table of a TOML text. Raises `ValueError` as `parsed_json` does."""
    try:
        table = tomllib.loads(source)
    except RecursionError:
        raise ValueError(f"it is nested more than {MOST_DEPTH} levels deep") from None
    _refuse_depth(table)
    return table


def _refuse_depth(data: Any) -> None:
    level, depth = [[data]], 0
    while level := [part for value in level for part in _parts(value)]:
        depth += 1
        if depth > MOST_DEPTH:
            raise ValueError(f"it is nested more than {MOST_DEPTH} levels deep")


def _parts(value: Any) -> list[Any]:
    """Return the lists and objects directly inside of a value."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [part for part in parts if isinstance(part, (dict, list))]
