"""Answers of cuDNN that are kept in the user's cache folder, so that each question is asked once."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import pathlib
import re
from collections.abc import Mapping

from planner.errors import PlanFileError
from planner.files import cache, reading
from planner.files.writing import write_atomically
from planner.workspaces.cudnn.convolution import Sizes, sizes_of, written

_MOST_ANSWERS = 20_000
"""Maximum number of answers that a file keeps, about 2 MB. The oldest are dropped."""
_MOST_BYTES = 8 << 20
"""Maximum size of a file of answers in bytes. The planner did not write a larger one."""
_VERSION = re.compile(r"[0-9]{1,4} [0-9]{1,4} [0-9]{1,4}")
_MOST_FILES = 24
"""Maximum number of files that the folder keeps. The oldest are removed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Remembered:
    """The answers of one libcudnn for the cards of one compute capability."""

    folder: pathlib.Path | None
    """Folder of the file; None if nothing is kept (`files.cache.folder`). `child` loads a library from this folder."""
    name: str
    """Name of the file."""
    version: tuple[int, int, int] | None = None
    """Version of cuDNN; None if nothing is kept."""
    workspaces: Mapping[str, Sizes] = dataclasses.field(default_factory=dict)
    """Bytes by the text of a convolution, empty for those that the library cannot compute."""

    @classmethod
    def of(cls, path: pathlib.Path, capability: tuple[int, int]) -> Remembered:
        """Returns what is kept of a library. Another file at the same path has other answers.

        Raises:
            OSError: there is no library at `path`.
        """
        about = path.stat()
        identity = hashlib.sha256(f"{path.resolve()} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:16]
        name = f"{identity}-{capability[0]}.{capability[1]}.sizes"
        folder = cache.folder("cudnn")
        if folder is None:
            return cls(None, name)
        try:
            first, *lines = reading.text(folder / name, most_bytes=_MOST_BYTES).splitlines()
            if _VERSION.fullmatch(first) is None:
                raise ValueError(f"{first[:40]!r} is not a version")
            major, minor, patch = map(int, first.split())
            answers = (line.rpartition(" ") for line in lines)
            return cls(folder, name, (major, minor, patch), {text: sizes_of(sizes) for text, _, sizes in answers})
        except (OSError, ValueError):  # there is none yet, or it is damaged or not a file: it is written anew
            return cls(folder, name)

    def with_answers(self, version: tuple[int, int, int], found: Mapping[str, Sizes]) -> Remembered:
        """Returns these answers and new ones, and keeps them. The file is replaced as a whole."""
        together = {**(self.workspaces if version == self.version else {}), **found}
        result = dataclasses.replace(self, version=version, workspaces=together)
        if self.folder is not None:
            kept = list(together.items())[-_MOST_ANSWERS:]
            lines = (" ".join(map(str, version)), *(f"{text} {written(sizes)}" for text, sizes in kept))
            # If the disk is full, or another process removed the file, this process still has the answers.
            with contextlib.suppress(PlanFileError, OSError):
                write_atomically(self.folder / self.name, "\n".join(lines) + "\n")
                cache.drop_oldest(self.folder, ".sizes", most_files=_MOST_FILES)
        return result
