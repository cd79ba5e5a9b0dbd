"""Recorded histories of the caching allocator: converts a snapshot to plain data, streams and files.

A history has the format of tests/allocator/test_allocator_histories.py: `settings`, `segments_at_end`
([address, size, pool, stream, is_expandable, [[block size, requested, state], ...]]) and `events`
([action, address, size, stream, operator]).
"""

from __future__ import annotations

import gzip
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from planner.estimate.allocation_stream import signed_sizes
from planner.estimate.footprint import ALLOCATOR_GRANULARITY_BYTES

History = dict[str, Any]


def history_of(snapshot: Mapping[str, Any]) -> History:
    """Returns the first card's part of `torch.cuda.memory._snapshot()`. Sizes in bytes; operator is '' if unknown."""
    segments = [
        [
            segment["address"],
            segment["total_size"],
            segment["segment_type"],
            segment["stream"],
            bool(segment.get("is_expandable", False)),
            [[block["size"], block["requested_size"], block["state"]] for block in segment["blocks"]],
        ]
        for segment in sorted(snapshot["segments"], key=lambda segment: segment["address"])
    ]
    events = [
        [entry["action"], entry.get("addr", 0), entry["size"], entry["stream"], entry.get("user_metadata", "")]
        for entry in snapshot["device_traces"][0]
        if entry["action"] != "snapshot"
    ]
    settings = {
        name: value
        for name, value in snapshot.get("allocator_settings", {}).items()
        if isinstance(value, (bool, int, float, str, type(None)))
    }
    return {"settings": settings, "segments_at_end": segments, "events": events}


def births_and_deaths(history: History) -> Iterator[tuple[int, int]]:
    """Yields (address, requested bytes) of each allocation and (address, 0) of each free, in order."""
    for action, address, size_bytes, *_ in history["events"]:
        if action == "alloc":
            yield address, size_bytes
        elif action == "free_completed":
            yield address, 0


def signed(history: History) -> list[int]:
    """Returns the stream that can be compared: bytes taken (positive) and freed (negative), rounded."""
    pairs = list(births_and_deaths(history))
    return signed_sizes(
        [address for address, _ in pairs],
        [size_bytes for _, size_bytes in pairs],
        granularity_bytes=ALLOCATOR_GRANULARITY_BYTES,
    )


def numbered(history: History) -> list[tuple[int, int]]:
    """Returns (allocation number, size) and (allocation number, 0), the input of `planner.allocator.replay.replay`."""
    current: dict[int, int] = {}
    result = []
    for place, (address, size_bytes) in enumerate(births_and_deaths(history)):
        if size_bytes:
            current[address] = place
        result.append((current[address], size_bytes))
    return result


def write_history(path: pathlib.Path, history: History) -> None:
    """Write the history as gzipped JSON. The file is complete or does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with gzip.open(partial, "wt", compresslevel=9) as file:
        json.dump(history, file, separators=(",", ":"))
    partial.replace(path)


def append_stream(path: pathlib.Path, case: str, step_ends: list[int], sizes: list[int]) -> None:
    """Append one line of JSON as its own gzip member, so that an interrupted run leaves a readable file.

    Args:
        step_ends: index in `sizes` of the end of the set-up and of each step.
    """
    line = json.dumps({"case": case, "step_ends": step_ends, "sizes": sizes}, separators=(",", ":")) + "\n"
    with path.open("ab") as file:
        file.write(gzip.compress(line.encode(), compresslevel=9))


def read_streams(path: pathlib.Path) -> Iterable[dict[str, Any]]:
    """Returns the entries that `append_stream` wrote. If a case was measured twice, the later entry comes last."""
    with gzip.open(path, "rt") as file:
        yield from map(json.loads, file)
