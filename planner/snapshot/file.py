"""Records of the CUDA caching allocator as files: what `torch.cuda.memory._dump_snapshot` writes, and JSON.

Sources: `_snapshot` in pytorch's torch/cuda/memory.py, `THCPModule_memorySnapshot` in torch/csrc/cuda/Module.cpp.

A snapshot is a pickled dict: `segments` as they are at the end, `device_traces` (events in order, a list for each
device) and, in newer versions, `allocator_settings`. A history in JSON holds the same of one device, without stack
frames: `events` as [action, address, size, stream, operator], `segments_at_end` as [address, size, pool, stream,
is_expandable, [[block size, requested, state], ...]] and `settings`. Either may be packed with gzip.

A pickle can name any function to be called while it is read. A snapshot is made of dicts, lists, tuples, texts and
numbers, which need none, so every name is refused before it is looked up.
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
    """What the allocator did, as pytorch calls it."""

    ALLOC = "alloc"
    FREE_REQUESTED = "free_requested"
    FREE_COMPLETED = "free_completed"
    """The block can be used again: at once, or when the other streams that used it are done."""
    SEGMENT_ALLOC = "segment_alloc"
    SEGMENT_FREE = "segment_free"
    SEGMENT_MAP = "segment_map"
    """Pages of an expandable segment get memory."""
    SEGMENT_UNMAP = "segment_unmap"
    OOM = "oom"


_ACTIONS = {action.value: action for action in Action}
_WITHOUT_EFFECT = {"snapshot", "workspace_snapshot", "user_defined"}
_BROKEN_FILE = (
    *(EOFError, OSError, zlib.error, pickle.UnpicklingError, ValueError, TypeError, KeyError, IndexError),
    *(AttributeError, OverflowError, RecursionError, MemoryError),
)
"""What reading a cut or made-up file can raise."""
_GIVE = "give a file that torch.cuda.memory._dump_snapshot made"


class Event(NamedTuple):
    """One entry of the record."""

    action: Action
    address: int
    """0 for a request that failed."""
    size_bytes: int
    """Of an allocation: as requested. Of a request that failed: rounded. Of a segment: its own."""
    stream: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
    """What one device's caching allocator did, and what it held at the end."""

    events: tuple[Event, ...]
    segments: tuple[Segment, ...]
    """At the end, by ascending address. Of an expandable segment, each stretch with memory."""
    settings: AllocatorSettings
    device: int = 0
    notes: tuple[str, ...] = ()
    """What the record holds and a replay leaves out, a sentence each."""


def load(path: str | os.PathLike[str], *, device: int | None = None) -> History:
    """Read a snapshot or a history.

    Args:
        path: a pickle or JSON, told apart by its content; either may be packed with gzip.
        device: number of the device; None: the first one with events.

    Raises:
        SnapshotError: for a file that is neither, is cut short, names a class or function, or has no such device.
    """
    shown = f"'{os.fspath(path)}'"
    data = _read(pathlib.Path(path), shown)
    if isinstance(data, dict) and {"events", "segments_at_end"} <= data.keys():
        with _naming(f"{shown}: the history"):
            data = _as_snapshot(data)
    if not isinstance(data, dict) or not {"segments", "device_traces"} <= data.keys():
        raise SnapshotError(f"{shown} is no record of an allocator, segments and device_traces are missing: {_GIVE}")
    return _history(data, device, shown)


# ---- bytes --------------------------------------------------------------------------------------------------------


class _PlainUnpickler(pickle.Unpickler):
    """Refuses every class and function by its name; what is left can only build plain values."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise SnapshotError(
            f"wants to load {f'{module}.{name}'[:80]!r}, a snapshot loads no code: do not trust this file"
        )


def _read(path: pathlib.Path, shown: str) -> object:
    if not path.is_file():
        raise SnapshotError(f"{shown} is {'a folder' if path.is_dir() else 'not there'}: {_GIVE}")
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_packed else path.open("rb") as file:
            first = file.read(1)
            file.seek(0)
            if first == b"\x80":  # every pickle since protocol 2
                return _PlainUnpickler(file).load()
            if first == b"{":
                return json.load(file)
    except SnapshotError as error:
        raise SnapshotError(f"{shown} {error}") from None
    except _BROKEN_FILE as error:
        raise SnapshotError(f"{shown} cannot be read, is it whole? ({_told(error)})") from error
    raise SnapshotError(f"{shown} is neither a pickle nor JSON: {_GIVE}")


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Say which part of the file is not as pytorch writes it."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(f"{where} cannot be understood ({_told(error)}): {_GIVE}") from error


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def _whole(value: object, *, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{str(value)[:40]!r} is no whole number of at least {least}")
    return value


def _stream(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"stream {str(value)[:40]!r} is no whole number")
    return value


# ---- content ------------------------------------------------------------------------------------------------------


def _as_snapshot(data: Mapping[str, Any]) -> dict[str, Any]:
    """A history in the form of a snapshot of device 0."""
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
    with _naming(f"{shown}: device_traces"):
        with_events = [number for number, trace in enumerate(data["device_traces"]) if len(trace) > 0]
    device, notes = _device(with_events, wanted, shown)
    with _naming(f"{shown}: device_traces[{device}]"):
        trace = [entry for entry in data["device_traces"][device] if entry["action"] not in _WITHOUT_EFFECT]
        events = [_event(entry) for entry in trace]
        in_pool = [_is_private(entry.get("pool_id")) for entry in trace]
    with _naming(f"{shown}: segments"):
        here = [segment for segment in data["segments"] if segment["device"] == device]
        private = [_segment(segment) for segment in here if _is_private(segment.get("segment_pool_id"))]
        here = [segment for segment in here if not _is_private(segment.get("segment_pool_id"))]
        segments = sorted(map(_segment, here), key=lambda segment: segment.address)
        kept = _outside(private, events, in_pool)
    if private or len(kept) < len(events):
        notes.append(
            "private pools (CUDA graphs, torch.cuda.MemPool) are not simulated: "
            f"{len(private)} segments and {len(events) - len(kept)} events are left out"
        )
    with _naming(f"{shown}: allocator_settings"):
        told = data.get("allocator_settings", {})
        settings, more_notes = _settings(told, is_expandable=_is_expandable(told, kept, here))
    return History(
        events=tuple(kept),
        segments=tuple(segments),
        settings=settings,
        device=device,
        notes=(*notes, *more_notes),
    )


def _device(with_events: Sequence[int], wanted: int | None, shown: str) -> tuple[int, list[str]]:
    if not with_events:
        raise SnapshotError(
            f"{shown} has no events: call torch.cuda.memory._record_memory_history() before the program"
        )
    listed = ", ".join(map(str, with_events))
    if wanted is None:
        several = [f"devices {listed} have events: this is device {with_events[0]}"] if len(with_events) > 1 else []
        return with_events[0], several
    if wanted not in with_events:
        raise SnapshotError(f"{shown} has no events of device {wanted}: choose one of {listed}")
    return wanted, []


def _event(entry: Mapping[str, Any]) -> Event:
    action = _ACTIONS.get(entry["action"])
    if action is None:
        raise ValueError(f"action {str(entry['action'])[:40]!r} is not known")
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
        raise ValueError(f"the blocks of the segment at {segment.address:#x} do not add up to its size")
    return segment


# ---- private pools ------------------------------------------------------------------------------------------------


def _is_private(pool_id: Sequence[int] | None) -> bool:
    return pool_id is not None and tuple(pool_id) != (0, 0)


def _outside(private: Sequence[Segment], events: Sequence[Event], in_pool: Sequence[bool]) -> list[Event]:
    """The events of the default pool.

    Newer versions name the pool of each event. In older ones an event is private while its address lies in a segment
    that is private at the end; what lay at the address before that segment was made is not.
    """
    stretches = sorted((segment.address, segment.address + segment.size_bytes) for segment in private)
    kept = []
    for event, is_private in zip(reversed(events), reversed(in_pool), strict=True):
        nearest = bisect.bisect_right(stretches, event.address, key=lambda stretch: stretch[0]) - 1
        is_inside = nearest >= 0 and event.address < stretches[nearest][1]
        if is_inside and event.action is Action.SEGMENT_ALLOC:
            del stretches[nearest]
        if not is_private and not is_inside:
            kept.append(event)
    return kept[::-1]


# ---- settings -----------------------------------------------------------------------------------------------------


def _is_expandable(told: Mapping[str, Any], events: Sequence[Event], segments: Sequence[Mapping[str, Any]]) -> bool:
    """Whether segments are expandable: as seen in the record, or as told where it takes none."""
    actions = {event.action for event in events}
    seen = {bool(segment.get("is_expandable", False)) for segment in segments}
    seen |= {True} if actions & {Action.SEGMENT_MAP, Action.SEGMENT_UNMAP} else set()
    seen |= {False} if actions & {Action.SEGMENT_ALLOC, Action.SEGMENT_FREE} else set()
    if len(seen) > 1:
        raise ValueError("segments of fixed size and expandable ones in one record are not simulated")
    return seen.pop() if seen else bool(told.get("expandable_segments", False))


def _settings(told: Mapping[str, Any], *, is_expandable: bool) -> tuple[AllocatorSettings, list[str]]:
    """The settings, and what of them a snapshot does not tell completely."""
    written = str(told.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    if "backend:cudaMallocAsync" in written.replace(" ", ""):
        raise ValueError("the cudaMallocAsync backend is not simulated")
    divisions = tuple(
        steps for _, steps in sorted((int(k), v) for k, v in told.get("roundup_power2_divisions", {}).items())
    )
    split_bytes, threshold = told.get("max_split_size", -1), float(told.get("garbage_collection_threshold", 0.0))
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
        notes.append("garbage collection is not simulated: a snapshot does not tell the memory fraction it depends on")
    if "per_process_memory_fraction" in written:
        notes.append("the memory fraction is not simulated: give what it leaves of the card as --capacity")
    return settings, notes


def _option(written: str, name: str, default_bytes: int) -> int:
    found = re.search(rf"\b{name}\s*:\s*(\d+)", written)
    return int(found[1]) * MIB if found else default_bytes
