"""Writes a history as a memory snapshot, for PyTorch's memory visualizer and for `planner.snapshot.load`.

Source of the format: `Snapshot` in the docstring of `_snapshot` in pytorch's torch/cuda/memory.py. The visualizer is
the page pytorch.org/memory_viz, or `python torch/cuda/_memory_viz.py trace_plot FILE -o out.html`.
"""

from __future__ import annotations

import pathlib
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

from planner.allocator.blocks import Segment
from planner.files.writing import write_atomically
from planner.snapshot.history import Frame
from planner.snapshot.simulate import SimulatedHistory

_DEFAULT_POOL = (0, 0)


class Origin(NamedTuple):
    """The place in the program that made a request, and its time."""

    frames: tuple[Frame, ...]
    """Stack trace, innermost frame first."""
    time_us: int
    """Time of the request in microseconds."""
    remark: str = ""
    """Text that the visualizer shows as the user's metadata."""


def write_snapshot(path: pathlib.Path, simulated: SimulatedHistory, origins: Sequence[Origin]) -> None:
    """Writes a pickled memory snapshot of device 0. The file is replaced atomically.

    Args:
        path: The file.
        simulated: The events, and the segments at the end.
        origins: The origin of each request (allocation or free).

    Raises:
        PlanFileError: the file cannot be written.
    """
    write_atomically(path, pickle.dumps(snapshot_data(simulated, origins), protocol=4))


def snapshot_data(simulated: SimulatedHistory, origins: Sequence[Origin]) -> dict[str, Any]:
    """Returns the snapshot as the value that `torch.cuda.memory._snapshot()` returns. See `write_snapshot`."""
    # Frames are shared between entries, as in PyTorch's snapshots: the pickle then holds each of them once.
    known: dict[Frame, dict[str, object]] = {}
    traces: dict[tuple[Frame, ...], list[dict[str, object]]] = {}

    def trace_of(request: int) -> list[dict[str, object]]:
        frames = origins[request].frames
        if frames not in traces:
            traces[frames] = [known.setdefault(frame, frame._asdict()) for frame in frames]
        return traces[frames]

    history = simulated.history
    settings = history.settings
    trace = [
        {
            "action": event.action.value,
            "addr": event.address,
            "size": event.size_bytes,
            "stream": event.stream,
            "pool_id": _DEFAULT_POOL,
            "time_us": origins[request].time_us,
            "frames": trace_of(request),
            "user_metadata": origins[request].remark,
        }
        for event, request in zip(history.events, simulated.requests, strict=True)
    ]
    frames_at = {address: trace_of(request) for address, request in simulated.live.items()}
    return {
        "segments": [
            _segment(segment, frames_at, is_expandable=settings.expandable_segments) for segment in history.segments
        ],
        "device_traces": [trace],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": -1 if settings.max_split_size_bytes is None else settings.max_split_size_bytes,
            "garbage_collection_threshold": 0.0,
            "expandable_segments": settings.expandable_segments,
            "roundup_power2_divisions": {},
        },
        "external_annotations": [],
    }


def _segment(segment: Segment, frames_at: dict[int, list[dict[str, object]]], *, is_expandable: bool) -> dict[str, Any]:
    """Returns a segment in the form of a snapshot. `frames_at` has the stack trace of each allocated block."""
    blocks: list[dict[str, Any]] = []
    address = segment.address
    for block in segment.blocks:
        blocks.append(
            {
                "address": address,
                "size": block.size_bytes,
                "requested_size": block.requested_bytes,
                "state": "active_allocated" if block.is_allocated else "inactive",
                "frames": frames_at[address] if block.is_allocated else [],
            }
        )
        address += block.size_bytes
    allocated = sum(block.size_bytes for block in segment.blocks if block.is_allocated)
    return {
        "device": 0,
        "address": segment.address,
        "total_size": segment.size_bytes,
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(block.requested_bytes for block in segment.blocks),
        "stream": segment.stream,
        "segment_type": "small" if segment.is_small else "large",
        "segment_pool_id": _DEFAULT_POOL,
        "is_expandable": is_expandable,
        "frames": [],
        "blocks": blocks,
    }
