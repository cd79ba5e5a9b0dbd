"""Reads records of the CUDA caching allocator: snapshots of `torch.cuda.memory._dump_snapshot`, and JSON histories.

Sources: `_snapshot` in pytorch's torch/cuda/memory.py, `THCPModule_memorySnapshot` in torch/csrc/cuda/Module.cpp.

A snapshot is a pickled dict with `segments` (the state at the end), `device_traces` (for each device, the list of its
events in order) and, in newer versions of PyTorch, `allocator_settings`. A JSON history has the same content for one
device, without stack frames: `events` as [action, address, size, stream, operator], `segments_at_end` as [address,
size, pool, stream, is_expandable, [[block size, requested, state], ...]], and `settings`. Both kinds of files may be
compressed with gzip.

Reading a pickle normally can run any function that the file names. A snapshot consists only of dicts, lists, tuples,
strings and numbers, which need no function. So a file that names a class or function is refused, and nothing in it is
called.
"""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import pickle
import zlib
from collections.abc import Mapping
from typing import Any, BinaryIO, NoReturn

from planner.errors import SnapshotError
from planner.snapshot.content import GIVE, as_snapshot, history_of, naming, one_line
from planner.snapshot.history import History

_BROKEN_FILE = (
    *(EOFError, OSError, zlib.error, pickle.UnpicklingError, ValueError, TypeError, KeyError, IndexError),
    *(AttributeError, OverflowError, RecursionError, MemoryError),
)
"""Types of the errors that can be raised while a truncated or forged file is read."""
_GIVE = "give a file that torch.cuda.memory._dump_snapshot wrote"


def load(
    snapshot: str | os.PathLike[str] | Mapping[str, Any], *, device: int | None = None, needs_events: bool = True
) -> History:
    """Reads a pickled snapshot or a JSON history, and returns the history of one device.

    Args:
        snapshot: The file, whose format is recognized by its content; it may be compressed with gzip. Or the value that
            `torch.cuda.memory._snapshot()` returns.
        device: Index of the CUDA device. None means the first device with events.
        needs_events: False to read a snapshot without events, too, which holds only the state at the end. None as
            `device` then means the first device with segments.

    Raises:
        SnapshotError: the file does not exist, is neither a snapshot nor a history, is truncated, names a class or
            function, or has no events of the device.
    """
    data: object
    if isinstance(snapshot, Mapping):
        shown, data = "the snapshot", snapshot
    else:
        shown = f"'{os.fspath(snapshot)}'"
        data = _read(pathlib.Path(snapshot), shown)
    if isinstance(data, Mapping) and {"events", "segments_at_end"} <= data.keys():
        with naming(f"{shown}: the history"):
            data = as_snapshot(data)
    if not isinstance(data, Mapping) or not {"segments", "device_traces"} <= data.keys():
        raise SnapshotError(
            f"{shown} is not a memory snapshot, because its keys segments and device_traces are missing: {GIVE}"
        )
    return history_of(data, device, shown, needs_events=needs_events)


# ---- bytes --------------------------------------------------------------------------------------------------------


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that creates plain values only: it raises `SnapshotError` if the file names a class or function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise SnapshotError(
            f"was not read, because it would load {f'{module}.{name}'[:80]!r}, and a memory snapshot never loads code: "
            "do not trust this file"
        )


class _Limited:
    """A binary file that raises `SnapshotError` after a number of bytes, as for a small file that unpacks to many."""

    def __init__(self, file: BinaryIO | gzip.GzipFile, most_bytes: int) -> None:
        self._file, self._left_bytes, self._most_bytes = file, most_bytes, most_bytes

    def read(self, size: int = -1) -> bytes:
        return self._counted(self._file.read(self._left_bytes + 1 if size < 0 else min(size, self._left_bytes + 1)))

    def readline(self) -> bytes:
        return self._counted(self._file.readline(self._left_bytes + 1))

    def _counted(self, data: bytes) -> bytes:
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise SnapshotError(
                f"unpacks to more than {self._most_bytes:,} bytes, and a snapshot of its size does not: if you trust "
                "this file, unpack it with gunzip first"
            )
        return data


_LEAST_LIMIT_BYTES, _MOST_COMPRESSION = 64 << 20, 200
"""A file may unpack to the larger of this number of bytes and this number of times its size."""


def _read(path: pathlib.Path, shown: str) -> object:
    """Returns the object that a pickle or JSON file holds. `shown` is the name of the file in error messages."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is a device or a pipe" if path.exists() else "does not exist"
        raise SnapshotError(f"{shown} {what}: {GIVE}")
    try:
        with path.open("rb") as file:
            is_compressed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_compressed else path.open("rb") as file:
            limited = _Limited(file, max(_LEAST_LIMIT_BYTES, _MOST_COMPRESSION * path.stat().st_size))
            first = limited.read(1)
            file.seek(0)
            if first == b"\x80":  # Every pickle since protocol 2 starts with it.
                return _PlainUnpickler(limited).load()
            if first == b"{":
                return json.loads(limited.read())
    except SnapshotError as error:
        raise SnapshotError(f"{shown} {error}") from None
    except _BROKEN_FILE as error:
        raise SnapshotError(
            f"{shown} cannot be read ({one_line(error)}): check that the file is complete, or record it again"
        ) from error
    raise SnapshotError(f"{shown} is neither a pickle nor JSON: {GIVE}")
