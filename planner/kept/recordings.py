"""The recordings of one workload, made in child processes or read from the cache folder.

The folder is `torch-planner/recordings` in XDG_CACHE_HOME, or in ~/.cache. A file is compressed MessagePack, which is
plain data, and the types of its fields are checked when it is read. A file is ignored if it is damaged, if it is
too large, or if it holds the recording of a different step. The step is then recorded again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import zlib
from collections.abc import Callable
from typing import Any

import msgspec

from planner.errors import PlanFileError
from planner.files import cache, reading
from planner.files.writing import write_atomically
from planner.kept.identity import identity
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.recording.step_graph import StepGraph
from planner.virtual_gpu.forked_process import Running
from planner.workload.workload import Workload
from planner.workspaces.registry import CudnnSettings, KernelCall, Layout

VARIABLE = "PLANNER_RECORDINGS"
"""Variable of the environment. If it is 'none', no recording is kept or read."""
_MOST_BYTES = 512 << 20
"""Maximum size of all files together. The files that were not used for the longest time are removed."""
_MOST_FILE_BYTES = 64 << 20
"""Maximum size of a file."""
_MOST_UNPACKED_BYTES = 1 << 30
"""Maximum size of a file in bytes, decompressed."""
_SUFFIX = ".recording"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """The call of a kernel (`KernelCall`), with its arguments as plain data."""

    op: int
    """Index of the op in the recording."""
    arguments: dict[str, Any]
    outputs: tuple[Layout, ...]
    settings: CudnnSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Content:
    """The content of a file."""

    name: str
    """Name of the file, which stands for the question."""
    graph: StepGraph
    """The recording, without the calls of kernels."""
    calls: list[_Call]


class KeptRecordings:
    """Starts the rehearsals of one workload, except for those whose recordings were kept."""

    def __init__(self, folder: pathlib.Path | None, identity: str, watch: Watch) -> None:
        """
        Args:
            folder: the folder of the files; None to keep nothing.
            identity: a text that stands for everything on which the recordings depend, apart from the question.
            watch: counts the recordings that were read.
        """
        self._folder, self._identity, self._watch = folder, identity, watch

    @classmethod
    def of(cls, workload: Workload, card: DeviceProfile, watch: Watch) -> KeptRecordings:
        """Returns the `KeptRecordings` of a workload.

        It keeps nothing if `PLANNER_RECORDINGS` is 'none', if the planner does not know everything on which the
        recordings depend, or if the cache folder cannot be used.
        """
        known = None if os.environ.get(VARIABLE) == "none" else identity(workload, card)
        return cls(None if known is None else cache.folder("recordings"), known or "", watch)

    def start(self, start: Callable[[], Running], *question: object) -> Running:
        """Returns the recording that was kept as the answer to a question, or starts the rehearsal that makes it.

        Args:
            start: starts the rehearsal, whose result is a `StepGraph` without workspaces.
            question: which of the workload's recordings it is, as objects whose `repr` says all about them.
        """
        if self._folder is None:
            return start()
        name = hashlib.sha256(repr((self._identity, question)).encode()).hexdigest()[:40]
        path = self._folder / f"{name}{_SUFFIX}"
        graph = _read(path)
        if graph is None:
            return _Keeping(start(), path)
        self._watch.recalled += 1
        return _Kept(graph)


class _Kept:
    """Stands for a rehearsal whose recording was kept."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph

    is_ready = True

    def result(self) -> StepGraph:
        return self._graph

    def end(self) -> None: ...


class _Keeping:
    """A rehearsal whose recording is kept when it has arrived."""

    def __init__(self, running: Running, path: pathlib.Path) -> None:
        self._running, self._path = running, path

    def result(self) -> StepGraph:
        graph = self._running.result()
        _write(self._path, graph)
        return graph

    def end(self) -> None:
        self._running.end()

    @property
    def is_ready(self) -> bool:
        return self._running.is_ready


def _read(path: pathlib.Path) -> StepGraph | None:
    """Returns the recording in a file; None if there is none, or if the file is damaged or of another question."""
    try:
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(reading.content(path, most_bytes=_MOST_FILE_BYTES), _MOST_UNPACKED_BYTES)
        if not unpacking.eof:
            return None
        content = msgspec.msgpack.decode(data, type=_Content)
        if content.name != path.name:
            return None
        for call in content.calls:
            arguments = {name: _from_plain(value) for name, value in call.arguments.items()}
            content.graph.ops[call.op].kernel = KernelCall(arguments, call.outputs, call.settings)
        os.utime(path)  # it was used
    except (OSError, ValueError, LookupError, TypeError, zlib.error, RecursionError, MemoryError):
        return None
    return content.graph


def _write(path: pathlib.Path, graph: StepGraph) -> None:
    try:
        packed = msgspec.msgpack.encode(_content(path.name, graph))
    except (TypeError, OverflowError):  # an argument of a kernel is not plain data: such a recording is not kept
        return
    data = zlib.compress(packed, level=1)
    if len(data) > _MOST_FILE_BYTES:
        return
    # If the disk is full, or another process removed a file, this process still has the recording.
    with contextlib.suppress(PlanFileError, OSError):
        write_atomically(path, data)
        cache.drop_oldest(path.parent, _SUFFIX, most_bytes=_MOST_BYTES)


def _content(name: str, graph: StepGraph) -> _Content:
    """Returns the content of the file with this name. Raises `TypeError` if an argument of a kernel cannot be kept."""
    ops, calls = list(graph.ops), []
    for index, op in enumerate(ops):
        if (call := op.kernel) is not None:
            arguments = {argument: _to_plain(value) for argument, value in call.arguments.items()}
            calls.append(_Call(op=index, arguments=arguments, outputs=call.outputs, settings=call.settings))
            ops[index] = dataclasses.replace(op, kernel=None)
    return _Content(name=name, graph=dataclasses.replace(graph, ops=ops), calls=calls)


def _to_plain(value: Any) -> Any:
    """Returns an argument of a kernel as plain data: a sequence gets its type as its first item."""
    if isinstance(value, (tuple, list)):
        return [type(value).__name__, *map(_to_plain, value)]
    if isinstance(value, Layout):
        return ["Layout", value.shape, value.stride, value.itemsize, value.dtype]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"an argument of type {type(value).__name__} cannot be kept")


def _from_plain(value: Any) -> Any:
    """Returns the argument of a kernel of which `_to_plain` made this. Raises `ValueError` for other data."""
    if not isinstance(value, list):
        return value
    kind, *parts = value
    if kind == "Layout":
        return msgspec.convert(dict(zip(("shape", "stride", "itemsize", "dtype"), parts, strict=True)), Layout)
    if kind not in ("tuple", "list"):
        raise ValueError(f"{kind!r} is not the type of a sequence")
    found = map(_from_plain, parts)
    return tuple(found) if kind == "tuple" else list(found)
