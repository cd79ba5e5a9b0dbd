"""The recordings of one workload, made in child processes or read from the cache folder.

The folder is `torch-planner/recordings` in XDG_CACHE_HOME, or in ~/.cache. A file is a compressed pickle. It is read
with an unpickler that knows only the classes of a recording, so that a file can do nothing but fill in their fields. A
file that is damaged or too large is ignored, and the step is recorded again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pathlib
import pickle
import zlib
from collections.abc import Callable
from typing import Any

from planner.errors import PlanFileError
from planner.files import cache, reading
from planner.files.writing import write_atomically
from planner.kept.identity import identity
from planner.plan_types.categories import Category
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.recording.step_graph import Call, Collective, Op, Phase, Save, Schedule, StepGraph, Storage
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
"""Maximum size of a recording in memory, as a pickle."""
_CLASSES: dict[tuple[str, str], type] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        Call, Category, Collective, CudnnSettings, KernelCall, Layout, Op, Phase, Save, Schedule, StepGraph, Storage,
    )
}  # fmt: skip
"""The classes of which a recording consists."""


class _Unpickler(pickle.Unpickler):
    """An unpickler for recordings, which refuses any other class or function."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong to a recording")
        return _CLASSES[module, name]


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
        """Returns what keeps the recordings of a workload; nothing is kept if it is not known on what they depend."""
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
        path = self._folder / f"{name}.recording"
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
    """Returns the recording in a file; None if there is none, or if the file is damaged."""
    try:
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(reading.content(path, most_bytes=_MOST_FILE_BYTES), _MOST_UNPACKED_BYTES)
        if not unpacking.eof:
            return None
        graph = _Unpickler(io.BytesIO(data)).load()
        os.utime(path)  # it was used
    except Exception:  # Damaged bytes can make an unpickler raise anything.
        return None
    return graph if isinstance(graph, StepGraph) else None


def _write(path: pathlib.Path, graph: StepGraph) -> None:
    data = zlib.compress(pickle.dumps(graph, protocol=5), level=1)
    if len(data) > _MOST_FILE_BYTES:
        return
    # If the disk is full, or another process removed a file, this process still has the recording.
    with contextlib.suppress(PlanFileError, OSError):
        write_atomically(path, data)
        cache.drop_oldest(path.parent, most_bytes=_MOST_BYTES)
