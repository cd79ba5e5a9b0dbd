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

import bisect
import contextlib
import dataclasses
import enum
import gzip
import json
import os
import pathlib
import pickle
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from planner.allocator.blocks import Segment, SegmentBlock
from planner.allocator.settings import AllocatorSettings
from planner.errors import SnapshotError
from planner.plan_types.sizes import MIB


class Action(enum.Enum):
    """The kinds of events, with the names that PyTorch writes."""

    ALLOC = "alloc"
    FREE_REQUESTED = "free_requested"
    FREE_COMPLETED = "free_completed"
    """A block has become free. It comes right after FREE_REQUESTED, or later if other streams still used the block."""
    SEGMENT_ALLOC = "segment_alloc"
    SEGMENT_FREE = "segment_free"
    SEGMENT_MAP = "segment_map"
    """Memory was mapped to pages of an expandable segment."""
    SEGMENT_UNMAP = "segment_unmap"
    OOM = "oom"


_ACTIONS = {action.value: action for action in Action}
_WITHOUT_EFFECT = {"snapshot", "workspace_snapshot", "user_defined"}
_BROKEN_FILE = (
    *(EOFError, OSError, zlib.error, pickle.UnpicklingError, ValueError, TypeError, KeyError, IndexError),
    *(AttributeError, OverflowError, RecursionError, MemoryError),
)
"""Types of the errors that can be raised while a truncated or forged file is read."""
_GIVE = "give a file that torch.cuda.memory._dump_snapshot wrote"


class Event(NamedTuple):
    """One event that PyTorch recorded: a request, a free, or an exchange of memory with the driver."""

    action: Action
    address: int
    """Address of the block or segment; 0 for a request that failed."""
    size_bytes: int
    """Depends on the action: ALLOC and frees have the requested size, OOM has the rounded size of the failed request,
    and the other actions have the size of the segment or of its mapped pages."""
    stream: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
    """The events of one device's caching allocator, and its state at the end."""

    events: tuple[Event, ...]
    segments: tuple[Segment, ...]
    """Segments at the end, by ascending address. Each contiguous mapped range of an expandable segment is one entry."""
    settings: AllocatorSettings
    device: int = 0
    """Index of the CUDA device."""
    notes: tuple[str, ...] = ()
    """Sentences for the user that name what the record or the simulation leaves out."""


def load(path: str | os.PathLike[str], *, device: int | None = None) -> History:
    """Reads a pickled snapshot or a JSON history, and returns the history of one device.

    Args:
        path: The file. Its format is recognized by its content; it may be compressed with gzip.
        device: Index of the CUDA device. None means the first device with events.

    Raises:
        SnapshotError: the file does not exist, is neither a snapshot nor a history, is truncated, names a class or
            function, or has no events of the device.
    """
    shown = f"'{os.fspath(path)}'"
    data = _read(pathlib.Path(path), shown)
    if isinstance(data, dict) and {"events", "segments_at_end"} <= data.keys():
        with _naming(f"{shown}: the history"):
            data = _as_snapshot(data)
    if not isinstance(data, dict) or not {"segments", "device_traces"} <= data.keys():
        raise SnapshotError(
            f"{shown} is not a memory snapshot, because its keys segments and device_traces are missing: {_GIVE}"
        )
    return _history(data, device, shown)


# ---- bytes --------------------------------------------------------------------------------------------------------


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that creates plain values only: it raises `SnapshotError` if the file names a class or function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise SnapshotError(
            f"was not read, because it would load {f'{module}.{name}'[:80]!r}, and a memory snapshot never loads code: "
            "do not trust this file"
        )


def _read(path: pathlib.Path, shown: str) -> object:
    """Returns the object that a pickle or JSON file holds. `shown` is the name of the file in error messages."""
    if not path.is_file():
        raise SnapshotError(f"{shown} {'is a folder' if path.is_dir() else 'does not exist'}: {_GIVE}")
    try:
        with path.open("rb") as file:
            is_compressed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_compressed else path.open("rb") as file:
            first = file.read(1)
            file.seek(0)
            if first == b"\x80":  # Every pickle since protocol 2 starts with it.
                return _PlainUnpickler(file).load()
            if first == b"{":
                return json.load(file)
    except SnapshotError as error:
        raise SnapshotError(f"{shown} {error}") from None
    except _BROKEN_FILE as error:
        raise SnapshotError(
            f"{shown} cannot be read ({_one_line(error)}): check that the file is complete, or record it again"
        ) from error
    raise SnapshotError(f"{shown} is neither a pickle nor JSON: {_GIVE}")


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Turns errors that are raised inside the `with` statement into a `SnapshotError` that begins with `where`.

    `where` names the file and the part of it that is being read. An error means that this part does not have the form
    that PyTorch writes.
    """
    try:
        yield
    except SnapshotError as error:
        raise SnapshotError(f"{where}: {error}") from None
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(f"{where} cannot be interpreted ({_one_line(error)}): {_GIVE}") from error


def _one_line(error: Exception) -> str:
    """Returns the type and the message of an error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def _whole(value: object, *, least: int = 0) -> int:
    """Returns the value if it is an integer of at least `least`, else raises `ValueError`."""
    if type(value) is not int or value < least:
        raise ValueError(
            f"an address or size of an event is {str(value)[:40]!r}, but must be an integer of at least {least}"
        )
    return value


def _stream(value: object) -> int:
    """Returns the value if it is an integer, as the number of a stream must be, else raises `ValueError`."""
    if type(value) is not int:
        raise ValueError(f"the stream of an event or segment is {str(value)[:40]!r}, but must be an integer")
    return value


# ---- content ------------------------------------------------------------------------------------------------------


def _as_snapshot(data: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a JSON history to the form of a snapshot, as the events and segments of device 0."""
    names = ("address", "total_size", "segment_type", "stream", "is_expandable", "blocks")
    block_names = ("size", "requested_size", "state")
    segments = [{"device": 0, **dict(zip(names, facts, strict=True))} for facts in data["segments_at_end"]]
    for segment in segments:
        segment["blocks"] = [dict(zip(block_names, facts, strict=True)) for facts in segment["blocks"]]
    trace = [
        {"action": action, "addr": address, "size": size, "stream": stream}
        for action, address, size, stream, *_ in data["events"]
    ]
    return {"segments": segments, "device_traces": [trace], "allocator_settings": data.get("settings", {})}


def _history(data: Mapping[str, Any], wanted: int | None, shown: str) -> History:
    """Returns the history of one device of a snapshot, without segments and events of private pools.

    Args:
        data: The snapshot.
        wanted: Index of the device. None means the first device with events.
        shown: Name of the file in error messages.
    """
    with _naming(f"{shown}: device_traces"):
        with_events = [number for number, trace in enumerate(data["device_traces"]) if len(trace) > 0]
    device, notes = _device(with_events, wanted, shown)
    with _naming(f"{shown}: device_traces[{device}]"):
        trace = [entry for entry in data["device_traces"][device] if entry["action"] not in _WITHOUT_EFFECT]
        events = [_event(entry) for entry in trace]
        in_private = [_is_private(entry.get("pool_id")) for entry in trace]
    with _naming(f"{shown}: segments"):
        here = [segment for segment in data["segments"] if segment["device"] == device]
        private = [_segment(segment) for segment in here if _is_private(segment.get("segment_pool_id"))]
        here = [segment for segment in here if not _is_private(segment.get("segment_pool_id"))]
        segments = sorted(map(_segment, here), key=lambda segment: segment.address)
        kept = _in_default_pool(private, events, in_private)
    if private or len(kept) < len(events):
        notes.append(
            f"{len(private)} segments and {len(events) - len(kept)} events of private pools (CUDA graphs, "
            "torch.cuda.MemPool) are left out, because the simulator has no private pools"
        )
    with _naming(f"{shown}: allocator_settings"):
        options = data.get("allocator_settings", {})
        settings, more_notes = _settings(options, is_expandable=_is_expandable(options, kept, here))
    return History(
        events=tuple(kept),
        segments=tuple(segments),
        settings=settings,
        device=device,
        notes=(*notes, *more_notes),
    )


def _device(with_events: Sequence[int], wanted: int | None, shown: str) -> tuple[int, list[str]]:
    """Returns the index of the device to read, and a list with a note if other devices have events, too.

    Args:
        with_events: Indices of the devices that have events.
        wanted: Index of the device that the user chose. None means the first of `with_events`.
        shown: Name of the file in error messages.
    """
    if not with_events:
        raise SnapshotError(
            f"{shown} has no events, so nothing can be replayed: call torch.cuda.memory._record_memory_history() "
            "before the program, and write the snapshot again"
        )
    listed = ", ".join(map(str, with_events))
    if wanted is None:
        note = f"devices {listed} have events, and device {with_events[0]} is shown: choose another with --device"
        return with_events[0], [note] if len(with_events) > 1 else []
    if wanted not in with_events:
        raise SnapshotError(f"{shown} has no events of device {wanted}: choose one of the devices {listed}")
    return wanted, []


def _event(entry: Mapping[str, Any]) -> Event:
    action = _ACTIONS.get(entry["action"])
    if action is None:
        raise ValueError(f"an event has the unknown action {str(entry['action'])[:40]!r}")
    address = 0 if action is Action.OOM else _whole(entry["addr"])
    return Event(action, address, _whole(entry["size"], least=1), _stream(entry["stream"]))


def _segment(data: Mapping[str, Any]) -> Segment:
    blocks = []
    for block in data["blocks"]:
        is_allocated = block["state"] != "inactive"
        requested_bytes = _whole(block.get("requested_size", block["size"])) if is_allocated else 0
        blocks.append(
            SegmentBlock(
                size_bytes=_whole(block["size"], least=1), requested_bytes=requested_bytes, is_allocated=is_allocated
            )
        )
    segment = Segment(
        address=_whole(data["address"]),
        stream=_stream(data["stream"]),
        is_small=data["segment_type"] == "small",
        blocks=tuple(blocks),
    )
    if segment.size_bytes != data["total_size"]:
        raise ValueError(
            f"the blocks of the segment at {segment.address:#x} have {segment.size_bytes} bytes together, but its "
            f"total_size is {data['total_size']}"
        )
    return segment


# ---- private pools ------------------------------------------------------------------------------------------------


def _is_private(pool_id: Sequence[int] | None) -> bool:
    """True if the id belongs to a private pool. The default pool has the id (0, 0), or None in older versions."""
    return pool_id is not None and tuple(pool_id) != (0, 0)


def _in_default_pool(private: Sequence[Segment], events: Sequence[Event], in_private: Sequence[bool]) -> list[Event]:
    """Returns the events of the default pool, without those of private pools.

    Newer versions of PyTorch record the pool of each event. For older versions, an event also counts as private if its
    address is inside a private segment. Events are checked from the last to the first. When the event is reached that
    allocated a private segment, the segment is forgotten: earlier events at its addresses belong to another segment.

    Args:
        private: Segments of private pools at the end.
        events: All events, in order.
        in_private: For each event, True if the record says that it belongs to a private pool.
    """
    ranges = sorted((segment.address, segment.address + segment.size_bytes) for segment in private)
    kept = []
    for event, is_private in zip(reversed(events), reversed(in_private), strict=True):
        nearest = bisect.bisect_right(ranges, event.address, key=lambda addresses: addresses[0]) - 1
        is_inside = nearest >= 0 and event.address < ranges[nearest][1]
        if is_inside and event.action is Action.SEGMENT_ALLOC:
            del ranges[nearest]
        if not is_private and not is_inside:
            kept.append(event)
    return kept[::-1]


# ---- settings -----------------------------------------------------------------------------------------------------


def _is_expandable(options: Mapping[str, Any], events: Sequence[Event], segments: Sequence[Mapping[str, Any]]) -> bool:
    """True if the allocator used expandable segments.

    The events and segments show it. If there are none of either kind, the recorded options decide.
    """
    actions = {event.action for event in events}
    seen = {bool(segment.get("is_expandable", False)) for segment in segments}
    seen |= {True} if actions & {Action.SEGMENT_MAP, Action.SEGMENT_UNMAP} else set()
    seen |= {False} if actions & {Action.SEGMENT_ALLOC, Action.SEGMENT_FREE} else set()
    if len(seen) > 1:
        raise SnapshotError(
            "the record has both expandable segments and segments of fixed size, which the simulator cannot mix: do "
            "not change expandable_segments while the program runs"
        )
    return seen.pop() if seen else bool(options.get("expandable_segments", False))


def _settings(options: Mapping[str, Any], *, is_expandable: bool) -> tuple[AllocatorSettings, list[str]]:
    """Returns the settings of the allocator, and notes for the user about options that cannot be simulated."""
    written = str(options.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    if "backend:cudaMallocAsync" in written.replace(" ", ""):
        raise SnapshotError(
            "the program used backend:cudaMallocAsync, which is not simulated: record it with backend:native"
        )
    divisions = tuple(
        steps for _, steps in sorted((int(k), v) for k, v in options.get("roundup_power2_divisions", {}).items())
    )
    split_bytes, threshold = options.get("max_split_size", -1), float(options.get("garbage_collection_threshold", 0.0))
    defaults = AllocatorSettings()
    settings = AllocatorSettings(
        expandable_segments=is_expandable,
        max_split_size_bytes=split_bytes if split_bytes >= 0 else None,
        max_non_split_rounding_bytes=_option(
            written, "max_non_split_rounding_mb", defaults.max_non_split_rounding_bytes
        ),
        large_segment_bytes=_option(written, "large_segment_size_mb", defaults.large_segment_bytes),
        roundup_power2_divisions=divisions if any(steps > 1 for steps in divisions) else (),
        garbage_collection_threshold=threshold,
    )
    notes = []
    if threshold > 0:
        notes.append(
            "garbage_collection_threshold is not simulated, because it depends on the memory fraction, which a "
            "snapshot does not record"
        )
    if "per_process_memory_fraction" in written:
        notes.append(
            "per_process_memory_fraction is not simulated: give the memory that this fraction allows with --capacity"
        )
    return settings, notes


def _option(written: str, name: str, default_bytes: int) -> int:
    """Reads an option that is given in MiB from the text of PYTORCH_CUDA_ALLOC_CONF, and returns its value in bytes."""
    match = re.search(rf"\b{name}\s*:\s*(\d+)", written)
    return int(match[1]) * MIB if match else default_bytes
