"""The history of a caching allocator as plain values: its events, where they come from, and the segments at the end."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import NamedTuple

from planner.allocator.blocks import Segment
from planner.allocator.settings import AllocatorSettings


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


class Frame(NamedTuple):
    """One line of the stack trace of an event."""

    name: str
    """Name of the function; in a record without stack traces, name of the op."""
    filename: str = ""
    line: int = 0


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
class Sources:
    """The content of a record in addition to sizes and addresses. Fields that a record lacks are empty."""

    traces: tuple[tuple[Frame, ...], ...] = ()
    """For each event its stack trace, innermost frame first."""
    remarks: tuple[str, ...] = ()
    """For each event the user's metadata."""
    device_free_bytes: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """For the index of each request that failed: memory of the card that was free after the failure."""
    block_traces: Mapping[int, tuple[Frame, ...]] = dataclasses.field(default_factory=dict)
    """For the address of each block that is allocated at the end: the stack trace of its allocation."""
    private_bytes: int = 0
    """Memory of private pools (CUDA graphs, torch.cuda.MemPool) at the end."""
    variable: str = ""
    """Text of PYTORCH_CUDA_ALLOC_CONF in the recorded process."""


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
    sources: Sources = dataclasses.field(default_factory=lambda: Sources(), compare=False, repr=False)
    """Where the events come from, as far as the record says it."""
