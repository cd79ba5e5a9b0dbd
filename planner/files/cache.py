"""Folders for what the planner keeps between calls."""

from __future__ import annotations

import os
import pathlib
import stat


def folder(name: str) -> pathlib.Path | None:
    """Return the folder `torch-planner/NAME` in XDG_CACHE_HOME, or in ~/.cache. It is created if there is none.

    None if it cannot be written, or if somebody else owns it or everybody can write to it.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = pathlib.Path(base, "torch-planner", name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        facts = path.lstat()
    except OSError:  # a home that cannot be written
        return None
    if not stat.S_ISDIR(facts.st_mode):  # such as a link to a folder with files of the user's
        return None
    is_ours = not hasattr(os, "getuid") or (facts.st_uid == os.getuid() and not facts.st_mode & stat.S_IWOTH)
    return path if is_ours and os.access(path, os.W_OK) else None


def drop_oldest(
    path: pathlib.Path, suffix: str, *, most_files: int | None = None, most_bytes: int | None = None
) -> None:
    """Remove the files of a folder that were changed the longest time ago, if there are too many, or too many bytes.

    Only files whose names end with `suffix` are counted and removed.

    Raises:
        OSError: the folder cannot be read, or a file in it cannot be removed.
    """
    files = [(entry, entry.stat()) for entry in path.iterdir() if entry.suffix == suffix and entry.is_file()]
    files.sort(key=lambda file: file[1].st_mtime_ns, reverse=True)
    total_bytes = 0
    for number, (file, facts) in enumerate(files):
        total_bytes += facts.st_size
        if (most_files is not None and number >= most_files) or (most_bytes is not None and total_bytes > most_bytes):
            file.unlink(missing_ok=True)
