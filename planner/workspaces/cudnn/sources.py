"""The workspace of a convolution, from the best source that there is.

The sources, best first:

1. a libcudnn of this machine, if it is the version that the planned release of PyTorch runs,
2. the planner's tables for this version,
3. a libcudnn of this machine of another version,
4. the planner's table for the nearest version or card,
5. the same convolution with another number of samples in the table,
6. a formula.

The tables have no deterministic kinds. For these, the workspaces without this setting are the estimate.

The answers of the first two are what cuDNN takes. The others are estimates.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping

from planner.workspaces.cudnn import tables
from planner.workspaces.cudnn.asking import LIBRARY_VARIABLE, CannotAskError, Version, ask, libraries
from planner.workspaces.cudnn.convolution import Convolution, Sizes
from planner.workspaces.cudnn.fallback import estimated_bytes, scaled_workspaces
from planner.workspaces.cudnn.versions import expected, is_of_cuda_build, knows


class Source(enum.Enum):
    """The source of the size of a workspace."""

    LIBRARY = "asked of a libcudnn on this machine"
    TABLE = "from the planner's tables"
    SCALED = "scaled from another batch size in the planner's tables"
    FORMULA = "by a formula"


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The workspace of one convolution."""

    sizes: Sizes
    """Bytes of the workspaces of the algorithms that PyTorch tries, at least one (see `convolution.Sizes`)."""
    source: Source
    version: Version | None
    """The version of cuDNN that takes this workspace; None for a formula."""
    is_exact: bool
    """True if the planned release of PyTorch runs this version of cuDNN, and the card has this capability."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the workspace that PyTorch takes where there is enough memory."""
        return self.sizes[0]


_Situation = tuple[tuple[int, int], str, str | None]
_ANSWERS: dict[_Situation, dict[Convolution, Answer]] = collections.defaultdict(dict)
"""Answers of this process by compute capability, version of PyTorch, and the choice of a library."""
_SILENT: dict[pathlib.Path, str] = {}
"""The libraries that did not answer, each with the reason."""


def workspaces(
    convolutions: Iterable[Convolution], capability: tuple[int, int], torch_version: str
) -> dict[Convolution, Answer]:
    """Returns the workspaces of convolutions on a card of this compute capability.

    Questions that were not asked before start a process that loads libcudnn, if there is one. So ask about all
    convolutions of a step at once.

    Args:
        torch_version: a version as in `torch.__version__`.
    """
    wanted = list(dict.fromkeys(convolutions))
    known = _ANSWERS[capability, torch_version, os.environ.get(LIBRARY_VARIABLE)]
    missing = [each for each in wanted if each not in known]
    if missing:
        known.update(_found(missing, capability, torch_version))
    return {each: known[each] for each in wanted}


def reasons() -> tuple[str, ...]:
    """Returns why libraries of this machine did not answer."""
    return tuple(_SILENT.values())


def _found(
    convolutions: list[Convolution], capability: tuple[int, int], torch_version: str
) -> dict[Convolution, Answer]:
    """Returns new answers for convolutions, each from the best source that has one."""
    found: dict[Convolution, Answer] = {}
    asked = list(_asked(convolutions, capability, torch_version))
    sources = [
        *(answers for answers, is_exact in asked if is_exact),
        _from_table(convolutions, capability, torch_version, exact=True),
        *(answers for answers, is_exact in asked if not is_exact),
        _from_table(convolutions, capability, torch_version, exact=False),
        _scaled(convolutions, capability, torch_version),
        {each: Answer(_estimated(each, capability), Source.FORMULA, None, False) for each in convolutions},
    ]
    for answers in reversed(sources):
        found.update(answers)
    return found


def _asked(
    convolutions: list[Convolution], capability: tuple[int, int], torch_version: str
) -> Iterator[tuple[dict[Convolution, Answer], bool]]:
    """Yields the answers of the libraries of this machine, and whether they are of the version that PyTorch runs."""
    pinned = expected(torch_version, capability)
    for path in libraries():
        if path in _SILENT:
            continue
        try:
            answers = ask(path, capability, convolutions)
        except CannotAskError as error:
            _SILENT[path] = str(error)
            continue
        if knows(answers.version, capability):
            is_exact = is_of_cuda_build(torch_version) or (pinned.is_pinned and answers.version == pinned.version)
            yield _answers(answers.workspaces, Source.LIBRARY, answers.version, is_exact=is_exact), is_exact


def _from_table(
    convolutions: list[Convolution], capability: tuple[int, int], torch_version: str, *, exact: bool
) -> dict[Convolution, Answer]:
    """Returns the answers of the table for the version of cuDNN that PyTorch runs, or for the nearest one.

    Args:
        exact: True for nothing but the answers that are exact.
    """
    found: dict[Convolution, Answer] = {}
    for table, of_table in _tables(convolutions, capability, torch_version):
        is_exact = expected(torch_version, capability).is_pinned and capability in table.capabilities
        if exact and not is_exact:
            continue
        nearest = table.nearest(capability)
        if not exact:
            others = {each: table.workspaces(_not_deterministic(each), nearest) for each in of_table}
            found |= _answers(others, Source.TABLE, table.version, is_exact=False)
        sizes = {each: table.workspaces(each, nearest) for each in of_table}
        found |= _answers(sizes, Source.TABLE, table.version, is_exact=is_exact)
    return found


def _not_deterministic(convolution: Convolution) -> Convolution:
    return Convolution(dataclasses.replace(convolution.kind, deterministic=False), convolution.shape)


def _scaled(
    convolutions: list[Convolution], capability: tuple[int, int], torch_version: str
) -> dict[Convolution, Answer]:
    """Returns answers for those convolutions that the table has with another number of samples."""
    found: dict[Convolution, Answer] = {}
    for table, of_table in _tables(convolutions, capability, torch_version):
        nearest = table.nearest(capability)
        sizes = {each: scaled_workspaces(each, table, nearest) for each in of_table}
        found |= _answers(sizes, Source.SCALED, table.version, is_exact=False)
    return found


def _tables(
    convolutions: list[Convolution], capability: tuple[int, int], torch_version: str
) -> Iterator[tuple[tables.Table, list[Convolution]]]:
    """Yields the tables of the version of cuDNN that PyTorch runs, or of the nearest one, with their convolutions."""
    version = expected(torch_version, capability).version
    for benchmark in (False, True):
        of_table = [each for each in convolutions if each.kind.benchmark is benchmark]
        if of_table and version in tables.versions(benchmark=benchmark):
            yield tables.load(version, benchmark=benchmark), of_table


def _answers(
    workspaces: Mapping[Convolution, Sizes], source: Source, version: Version, *, is_exact: bool
) -> dict[Convolution, Answer]:
    """Returns an answer for each convolution whose workspaces are known."""
    known = ((each, sizes) for each, sizes in workspaces.items() if sizes)
    return {each: Answer(sizes, source, version, is_exact) for each, sizes in known}


def _estimated(convolution: Convolution, capability: tuple[int, int]) -> Sizes:
    """Returns the workspaces by the formula. The last algorithm that PyTorch tries takes none, as in all tables."""
    size = estimated_bytes(convolution, capability)
    return (size, 0) if size else (0,)
