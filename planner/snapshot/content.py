"""Turns the content of a snapshot, as it was read from a file, into a `History`."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from planner.allocator.blocks import Segment, SegmentBlock
from planner.allocator.options import settings_of
from planner.allocator.settings import AllocatorSettings
from planner.errors import SnapshotError, WorkloadError
from planner.plan_types.decision_base import options_in
from planner.plan_types.words import counted
from planner.snapshot.history import Action, Event, Frame, History, Sources

GIVE = "give a file that torch.cuda.memory._dump_snapshot wrote"
"""The request to the user at the end of an error message."""
_ACTIONS = {action.value: action for action in Action}
_WITHOUT_EFFECT = {"snapshot", "workspace_snapshot", "user_defined"}


def as_snapshot(data: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a JSON history to the form of a snapshot, as the events and segments of device 0."""
    names = ("address", "total_size", "segment_type", "stream", "is_expandable", "blocks")
    block_names = ("size", "requested_size", "state")
    segments = [{"device": 0, **dict(zip(names, facts, strict=True))} for facts in data["segments_at_end"]]
    for segment in segments:
        segment["blocks"] = [dict(zip(block_names, facts, strict=True)) for facts in segment["blocks"]]
    trace = [
        {
            "action": action,
            "addr": address,
            "size": size,
            "stream": stream,
            "frames": [{"name": op} for op in ops if op],
        }
        for action, address, size, stream, *ops in data["events"]
    ]
    return {"segments": segments, "device_traces": [trace], "allocator_settings": data.get("settings", {})}


def history_of(data: Mapping[str, Any], wanted: int | None, shown: str, *, needs_events: bool = True) -> History:
    """Returns the history of one device of a snapshot, without segments and events of private pools.

    Args:
        data: The snapshot.
        wanted: Index of the device. None means the first device with events; without `needs_events`, the first one with
            a request that failed, else the first one with events, else the first one with segments.
        shown: Name of the file in error messages.
        needs_events: False if a snapshot without events is allowed.

    Raises:
        SnapshotError: the snapshot does not have the form that PyTorch writes, or lacks events or the wanted device.
    """
    with naming(f"{shown}: device_traces"):
        traces = [
            [entry for entry in trace if _text(entry["action"]) not in _WITHOUT_EFFECT]
            for trace in _few(data["device_traces"], _MOST_DEVICES)
        ]
    with naming(f"{shown}: segments"):
        devices = [number for number, trace in enumerate(traces) if trace]
        if not needs_events:
            failed = [number for number in devices if any(entry["action"] == "oom" for entry in traces[number])]
            devices = list(dict.fromkeys([*failed, *devices, *sorted(_whole(s["device"]) for s in data["segments"])]))
    device, notes = _device(devices, wanted, shown, needs_events=needs_events)
    with naming(f"{shown}: device_traces[{device}]"):
        trace = traces[device] if device < len(traces) else []
        events = [_event(entry) for entry in trace]
        in_private = [_is_private(entry.get("pool_id")) for entry in trace]
    with naming(f"{shown}: segments"):
        recorded = [segment for segment in data["segments"] if segment["device"] == device]
        private = [_segment(segment) for segment in recorded if _is_private(segment.get("segment_pool_id"))]
        here = [segment for segment in recorded if not _is_private(segment.get("segment_pool_id"))]
        segments = sorted(map(_segment, here), key=lambda segment: segment.address)
        kept = _in_default_pool(private, events, in_private)
        block_traces = dict(_block_traces(here))
    if private or len(kept) < len(events):
        notes.append(
            f"{len(private)} segments and {len(events) - len(kept)} events of private pools (CUDA graphs, "
            "torch.cuda.MemPool) are left out, because the simulator has no private pools"
        )
    if lost := sum(event.action is Action.OOM for event in events) - sum(events[i].action is Action.OOM for i in kept):
        notes.append(f"{counted(lost, 'failed request')} of private pools cannot be explained")
    events, trace = [events[index] for index in kept], [trace[index] for index in kept]
    with naming(f"{shown}: allocator_settings"):
        options = data.get("allocator_settings", {})
        settings, more_notes = _settings(options, is_expandable=_is_expandable(options, events, here))
    with naming(f"{shown}: device_traces[{device}]"):
        sources = Sources(
            traces=tuple(_traces(trace)),
            remarks=tuple(_brief(entry.get("user_metadata") or "") for entry in trace),
            device_free_bytes={
                number: _whole(entry["device_free"]) for number, entry in enumerate(trace) if "device_free" in entry
            },
            block_traces=block_traces,
            private_bytes=sum(segment.size_bytes for segment in private),
            variable=_text(options.get("PYTORCH_CUDA_ALLOC_CONF") or ""),
        )
    return History(
        events=tuple(events),
        segments=tuple(segments),
        settings=settings,
        device=device,
        notes=(*notes, *more_notes),
        sources=sources,
    )


def _device(devices: Sequence[int], wanted: int | None, shown: str, *, needs_events: bool) -> tuple[int, list[str]]:
    """Returns the index of the device to read, and a list with a note if other devices could be read, too.

    Args:
        devices: Indices of the devices that can be read, the one to prefer first.
        wanted: Index of the device that the user chose. None means the first of `devices`.
        shown: Name of the file in error messages.
        needs_events: True if only devices with events can be read.
    """
    what = "events" if needs_events else "events or segments"
    if not devices:
        if needs_events:
            raise SnapshotError(
                f"{shown} has no events, so nothing can be replayed: call torch.cuda.memory._record_memory_history() "
                "before the program, and write the snapshot again"
            )
        raise SnapshotError(
            f"{shown} is empty: write it in the process that trains, before memory is released, and after "
            "torch.cuda.memory._record_memory_history()"
        )
    listed = ", ".join(map(str, sorted(devices)))
    if wanted is None:
        note = f"devices {listed} have {what}, and device {devices[0]} is shown: choose another with --device"
        return devices[0], [note] if len(devices) > 1 else []
    if wanted not in devices:
        raise SnapshotError(f"{shown} has no {what} of device {wanted}: choose one of the devices {listed}")
    return wanted, []


def _traces(trace: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Frame, ...]]:
    """Yields the stack trace of each entry. Entries share most of their traces, so each is converted once."""
    known: dict[int, tuple[Frame, ...]] = {}
    for entry in trace:
        frames = entry.get("frames") or ()
        if id(frames) not in known:
            known[id(frames)] = _frames(frames)
        yield known[id(frames)]


def _frames(frames: Sequence[Mapping[str, Any]]) -> tuple[Frame, ...]:
    return tuple(
        Frame(
            _shown(frame.get("name", "")),
            _shown(frame.get("filename", "")),
            line if type(line := frame.get("line")) is int else 0,
        )
        for frame in frames
    )


def _shown(value: object) -> str:
    """Returns a text of the file without control characters, which could change what a terminal shows."""
    return "".join(letter if letter.isprintable() else "?" for letter in _brief(value))


def _block_traces(segments: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, tuple[Frame, ...]]]:
    """Yields the address and the stack trace of each allocated block that has one."""
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] != "inactive" and block.get("frames"):
                yield address, _frames(block["frames"])
            address += block["size"]


def _event(entry: Mapping[str, Any]) -> Event:
    action = _ACTIONS.get(entry["action"])
    if action is None:
        raise ValueError(f"an event has the unknown action {_brief(entry['action'])[:40]!r}")
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
    if segment.size_bytes != _whole(data["total_size"]):
        raise ValueError(
            f"the blocks of the segment at {segment.address:#x} have {segment.size_bytes} bytes together, but its "
            f"total_size is {data['total_size']}"
        )
    return segment


# ---- values -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Turns errors that are raised inside the `with` statement into a `SnapshotError` that begins with `where`.

    `where` names the file and the part of it that is being read. An error means that this part does not have the form
    that PyTorch writes.
    """
    try:
        yield
    except SnapshotError as error:
        raise SnapshotError(f"{where}: {error}") from None
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(f"{where} cannot be interpreted ({one_line(error)}): {GIVE}") from error


def one_line(error: Exception) -> str:
    """Returns the type and the message of an error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def _whole(value: object, *, least: int = 0) -> int:
    """Returns the value if it is an integer of at least `least`, else raises `ValueError`."""
    if type(value) is not int or value < least:
        raise ValueError(
            f"an address or size of an event is {_brief(value)[:40]!r}, but must be an integer of at least {least}"
        )
    if value > _MOST_ADDRESS:
        raise ValueError(f"an address or size of an event has more than 64 bits: {_brief(value)[:40]}")
    return value


def _stream(value: object) -> int:
    """Returns the value if it is an integer, as the number of a stream must be, else raises `ValueError`."""
    if type(value) is not int:
        raise ValueError(f"the stream of an event or segment is {_brief(value)[:40]!r}, but must be an integer")
    return value


def _brief(value: object) -> str:
    """Returns a text for a value of the file. The text of a small tuple that contains itself often may be endless."""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 128 else "a number of too many digits"
    return str(value) if value is None or isinstance(value, float) else f"a value of type {type(value).__name__}"


def _text(value: object) -> str:
    """Returns the value if it is a text, else raises `ValueError`."""
    if not isinstance(value, str):
        raise ValueError(f"{_brief(value)} is given where a string is expected")
    return value


def _few(values: Any, most: int) -> Any:
    """Returns a list if it has at most `most` items, else raises `ValueError`."""
    if not isinstance(values, (list, tuple)) or len(values) > most:
        raise ValueError(f"a list of at most {most} items is expected")
    return values


_MOST_DEVICES, _MOST_ADDRESS = 1024, 2**64


# ---- private pools ------------------------------------------------------------------------------------------------


def _is_private(pool_id: Sequence[int] | None) -> bool:
    """True if the id belongs to a private pool. The default pool has the id (0, 0), or None in older versions."""
    return pool_id is not None and tuple(pool_id) != (0, 0)


def _in_default_pool(private: Sequence[Segment], events: Sequence[Event], in_private: Sequence[bool]) -> list[int]:
    """Returns the indices of the events of the default pool, without those of private pools.

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
    for index in reversed(range(len(events))):
        event, is_private = events[index], in_private[index]
        nearest = bisect.bisect_right(ranges, event.address, key=lambda addresses: addresses[0]) - 1
        is_inside = nearest >= 0 and event.address < ranges[nearest][1]
        if is_inside and event.action is Action.SEGMENT_ALLOC:
            del ranges[nearest]
        if not is_private and not is_inside:
            kept.append(index)
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
    written = options_in(_text(options.get("PYTORCH_CUDA_ALLOC_CONF") or ""))
    if written.get("backend") == "cudaMallocAsync":
        raise SnapshotError(
            "the program used backend:cudaMallocAsync, which is not simulated: record it with backend:native"
        )
    divisions = tuple(
        steps for _, steps in sorted((int(k), v) for k, v in options.get("roundup_power2_divisions", {}).items())
    )
    split_bytes, threshold = options.get("max_split_size", -1), float(options.get("garbage_collection_threshold", 0.0))
    text_only = ("max_non_split_rounding_mb", "large_segment_size_mb")
    try:
        defaults = settings_of(",".join(f"{name}:{written[name]}" for name in text_only if name in written))
    except WorkloadError as error:
        raise SnapshotError(f"the recorded options of the allocator cannot be read: {error}") from error
    settings = AllocatorSettings(
        expandable_segments=is_expandable,
        max_split_size_bytes=split_bytes if split_bytes >= 0 else None,
        max_non_split_rounding_bytes=defaults.max_non_split_rounding_bytes,
        large_segment_bytes=defaults.large_segment_bytes,
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
