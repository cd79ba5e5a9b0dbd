"""The tables of cuDNN's workspaces that come with the planner, for common convolutions.

`python -m benchmarks.cudnn_tables` made them by asking cuDNN. Each version of cuDNN has a file of compressed text. Its
first line is JSON and says how it was made, for which compute capabilities, and for which kinds of convolutions. Each
other line has the sizes of a convolution, and for each capability the workspaces of all kinds, separated by commas.

A second file of a version has the workspaces of all algorithms, which PyTorch tries out with
`torch.backends.cudnn.benchmark = True`. It is read only for such a training.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import lzma
import math
import pathlib
from collections.abc import Mapping, Sequence

from planner.workspaces.cudnn.convolution import Convolution, Shape, Sizes, sizes_of
from planner.workspaces.registry import BENCHMARK_LIMIT

Version = tuple[int, int, int]

_SAME_AS: dict[Version, Version] = {(9, 19, 0): (9, 20, 0)}
"""Versions whose answers are those of another version, so that they need no file: all workspaces of a table of 9.19.0
were compared with those of 9.20.0, 22,722 for each compute capability, and none differs. From the tables of all
algorithms, the columns for 8.0 and 9.0 were compared."""
FOLDER = pathlib.Path(str(importlib.resources.files("planner.profiles"))) / "cudnn"


_WORTH_LISTING = 3 / 4
"""An algorithm is listed if its workspace is at most this fraction of the one listed before it."""


def written(workspaces: Sequence[Sizes], *, benchmark: bool = False) -> str:
    """Returns the text for the workspaces of all kinds, for each kind those of the algorithms that PyTorch tries.

    Args:
        benchmark: True if PyTorch tries all algorithms.
    """
    return ",".join(map(_searched_item if benchmark else _item, workspaces))


def _item(sizes: Sizes) -> str:
    """Returns the text for the workspaces of one kind.

    The list of almost every convolution ends with an algorithm without a workspace, which is left out; '!' says that
    there is none. An empty item stands for 0, '-' for none that is known. Of algorithms that need nearly as much as
    the one before them, only the first is kept, because the next one hardly ever fits where it does not.
    """
    if not sizes:
        return "-"
    kept = _thinned(sizes)
    if kept[-1] == 0:
        return ">".join(map(str, kept[:-1]))
    return ">".join(map(str, kept)) + "!"


def _searched_item(sizes: Sizes) -> str:
    """Returns the text for the workspaces of all algorithms of one kind.

    By default, PyTorch compares the times of the first `BENCHMARK_LIMIT` algorithms. Their workspaces come before '|',
    largest first. Of the others, only the larger ones are kept: they decide how much memory is taken while the
    algorithms are tried.
    """
    first = sorted(sizes[:BENCHMARK_LIMIT], reverse=True)
    others = sorted((size for size in sizes[BENCHMARK_LIMIT:] if size > first[0]), reverse=True)
    return _item(tuple(first)) + "|" + ">".join(map(str, _thinned(others))) if sizes else "-"


def _thinned(sizes: Sequence[int]) -> list[int]:
    """Returns the sizes without those that are nearly as large as the one that was kept before them."""
    kept: list[int] = []
    for size in sizes:
        if not kept or (kept[-1] > 0 and size <= _WORTH_LISTING * kept[-1]):
            kept.append(size)
    return kept


def read_item(item: str) -> Sizes:
    """Returns the workspaces of one kind, whose text is an item of what `written` returns."""
    first, is_searched, others = item.partition("|")
    if is_searched:
        known = read_item(first)
        return (*known, *known[-1:] * (BENCHMARK_LIMIT - len(known)), *(sizes_of(others) if others else ()))
    if item == "-" or not item:
        return () if item else (0,)
    return sizes_of(item[:-1]) if item.endswith("!") else (*sizes_of(item), 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """The workspaces of one version of cuDNN."""

    version: Version
    capabilities: tuple[tuple[int, int], ...]
    kinds: Mapping[str, int]
    """Position of each kind by its text."""
    lines: Mapping[str, str]
    """The workspaces by the text of the sizes of a convolution."""
    batches: Mapping[str, list[int]]
    """The numbers of samples by the text of the other sizes."""

    def nearest(self, capability: tuple[int, int]) -> tuple[int, int]:
        """Returns the capability that stands for this one: itself, the one below it, or the lowest."""
        return max((each for each in self.capabilities if each <= capability), default=self.capabilities[0])

    def with_other_batches(self, convolution: Convolution) -> list[Convolution]:
        """Returns the table's convolutions that differ in the number of samples only, the nearest number first."""
        samples, _, rest = convolution.shape.text.partition(",")
        others = sorted(self.batches.get(rest, ()), key=lambda other: abs(math.log(other / int(samples))))
        shapes = (Shape.of(f"{other},{rest}") for other in others if other != int(samples))
        return [Convolution(convolution.kind, shape) for shape in shapes]

    def workspaces(self, convolution: Convolution, capability: tuple[int, int]) -> Sizes:
        """Returns the bytes of the workspaces of a convolution; empty if the table does not have it.

        Args:
            capability: one of `capabilities`.
        """
        line, kind = self.lines.get(convolution.shape.text), self.kinds.get(convolution.kind.text)
        if line is None or kind is None:
            return ()
        return read_item(line.split(" ")[self.capabilities.index(capability)].split(",")[kind])


def name_of(version: Version, *, benchmark: bool) -> str:
    """Returns the name of the file for a version of cuDNN.

    Args:
        benchmark: True for the file with the workspaces of all algorithms.
    """
    return f"{'.'.join(map(str, version))}{'.benchmark' if benchmark else ''}.xz"


def versions(*, benchmark: bool = False) -> tuple[Version, ...]:
    """Returns the versions of cuDNN that have a table, from the oldest to the newest.

    Args:
        benchmark: True for those with a table of all algorithms.
    """
    ending = ".benchmark.xz" if benchmark else ".xz"
    names = [path.name.removesuffix(ending).split(".") for path in FOLDER.glob(f"*{ending}")]
    found = {(int(major), int(minor), int(patch)) for major, minor, patch in (name for name in names if len(name) == 3)}
    return tuple(sorted(found | {version for version, same in _SAME_AS.items() if same in found}))


@functools.lru_cache(maxsize=3)
def load(version: Version, *, benchmark: bool = False) -> Table:
    """Returns the table of a version of cuDNN, which must be one of `versions()`."""
    table = read(FOLDER / name_of(_SAME_AS.get(version, version), benchmark=benchmark))
    return dataclasses.replace(table, version=version)


def read(path: pathlib.Path) -> Table:
    """Returns the table that a file has."""
    first, *lines = lzma.decompress(path.read_bytes()).decode().splitlines()
    header = json.loads(first)
    major, minor, patch = map(int, header["cudnn"].split("."))
    pairs = (text.split(".") for text in header["capabilities"])
    batches: dict[str, list[int]] = {}
    for line in lines:
        samples, _, rest = line.partition(" ")[0].partition(",")
        batches.setdefault(rest, []).append(int(samples))
    return Table(
        version=(major, minor, patch),
        capabilities=tuple((int(first), int(second)) for first, second in pairs),
        kinds={text: place for place, text in enumerate(header["kinds"])},
        lines=dict(line.split(" ", 1) for line in lines),
        batches=batches,
    )
