"""The moment that is explained: the last request that failed, or the peak of a run in which none failed.

`moment_of` says what was allocated, reserved and free, and why the free memory could not be used.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from planner.allocator.blocks import Segment
from planner.allocator.settings import (
    LARGEST_SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
    round_size,
    segment_size,
)
from planner.snapshot.explain.program import Program
from planner.snapshot.history import Action, Frame, History
from planner.snapshot.result import ReplayResult


@dataclasses.dataclass(frozen=True, kw_only=True)
class FreeMemory:
    """Free memory that the request could not use, for one reason."""

    reason: str
    total_bytes: int
    largest_bytes: int
    """Size of the largest free block."""
    blocks: int
    """Number of free blocks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moment:
    """The state of the allocator at the moment that is explained."""

    event: int | None
    """Index of the event; None in a snapshot without events, whose moment is the end."""
    failed: bool
    """True if a request failed at this moment."""
    asked_bytes: int
    """Size of the request that failed, after rounding; 0 if none failed."""
    stream: int
    frames: tuple[Frame, ...]
    """Stack trace of the request, innermost frame first; empty if it was not recorded."""
    allocated_bytes: int
    """Total size of the allocated blocks."""
    requested_bytes: int
    """Bytes of `allocated_bytes` that the program asked for. The rest is rounding."""
    reserved_bytes: int
    """Memory that the allocator held, without private pools."""
    retries: int
    """Number of requests of the record that found the card full, so that all unused segments were released. They
    include those that failed; 0 if the record could not be replayed."""
    peak_reserved_bytes: int
    """Most memory that the allocator held at any moment of the record."""
    private_bytes: int
    """Memory of private pools at the end of the record."""
    device_free_bytes: int | None
    """Memory of the card that was free; None if the record does not have it."""
    limit_bytes: int | None
    """Most memory that the allocator could hold, without private pools; None if no limit is known."""
    limit_source: str
    """The source of the limit."""
    free: tuple[FreeMemory, ...]
    """Free memory of the allocator by the reason why the request could not use it."""
    waiting_bytes: int
    """Bytes of blocks that the program has freed, but that another stream still used. They count as allocated."""

    @property
    def missing_bytes(self) -> int | None:
        """Bytes by which allocated memory and the request together exceed the limit; negative if they do not.

        None without a limit, or if no request failed.
        """
        if self.limit_bytes is None or not self.failed:
            return None
        return self.allocated_bytes + self.asked_bytes - self.limit_bytes


def failed_event(history: History) -> int | None:
    """Returns the index of the last request that failed; None if none failed."""
    return next((i for i in reversed(range(len(history.events))) if history.events[i].action is Action.OOM), None)


def peak_event(program: Program) -> int:
    """Returns the index of the event after which most bytes were requested; -1 if it is the start of the record."""
    return max(program.levels(), key=lambda level: level[1], default=(-1, 0))[0]


def moment_of(
    history: History, program: Program, replayed: ReplayResult | None, event: int | None, limit: int | None
) -> Moment:
    """Returns the state of the allocator right after an event.

    Args:
        history: The record.
        program: What the recorded program did.
        replayed: The replay of the record, which has looked at the event; None if it could not be replayed.
        event: Index of the event; None for the end of the record.
        limit: Memory in bytes that the user says the allocator could hold; None to take it from the record.
    """
    at = None if event is None or event < 0 else history.events[event]
    at = None if at is None or at.action is not Action.OOM else at
    segments = _segments(history, replayed, event)
    blocks = program.alive_at(-1 if event is None else event)
    requested_bytes = sum(block.requested_bytes for block in blocks)
    if segments is not None:
        reserved_bytes = sum(segment.size_bytes for segment in segments)
        live = [block for segment in segments for block in segment.blocks if block.is_allocated]
        allocated_bytes = sum(block.size_bytes for block in live)
        requested_bytes = sum(block.requested_bytes for block in live)
    else:
        assert event is not None
        reserved_bytes = reserved_levels(history)[event + 1]
        allocated_bytes = sum(round_size(block.requested_bytes, history.settings) for block in blocks)
    device_free = None if event is None else history.sources.device_free_bytes.get(event)
    asked_bytes = 0 if at is None else at.size_bytes
    limit_bytes, source = limit, "given"
    if limit_bytes is None:
        limit_bytes, source = _limit(history, asked_bytes, reserved_bytes, device_free)
        if at is None and (replayed is None or not replayed.retries):
            limit_bytes, source = None, ""
    return Moment(
        event=event,
        failed=at is not None,
        asked_bytes=asked_bytes,
        stream=0 if at is None else at.stream,
        frames=_frames(history, event),
        allocated_bytes=allocated_bytes,
        requested_bytes=requested_bytes,
        reserved_bytes=reserved_bytes,
        retries=0 if replayed is None else replayed.retries,
        peak_reserved_bytes=max(*reserved_levels(history), reserved_bytes),
        private_bytes=history.sources.private_bytes,
        device_free_bytes=device_free,
        limit_bytes=limit_bytes,
        limit_source=source,
        free=tuple(_free(segments or (), asked_bytes, 0 if at is None else at.stream, history.settings)),
        waiting_bytes=_waiting_bytes(history, event),
    )


def _segments(history: History, replayed: ReplayResult | None, event: int | None) -> tuple[Segment, ...] | None:
    """Returns the segments right after an event; None if the record could not be replayed."""
    if event is None:
        return history.segments
    if replayed is None:
        return None
    return replayed.start if event < 0 else replayed.looked_at


def _frames(history: History, event: int | None) -> tuple[Frame, ...]:
    traces = history.sources.traces
    return traces[event] if event is not None and 0 <= event < len(traces) else ()


def reserved_levels(history: History) -> list[int]:
    """Returns the memory that was reserved before the first event, and after each event, according to the record."""
    changes = [_CHANGE.get(event.action, 0) * event.size_bytes for event in history.events]
    at_end = sum(segment.size_bytes for segment in history.segments)
    return list(itertools.accumulate(changes, initial=at_end - sum(changes)))


_CHANGE = {Action.SEGMENT_ALLOC: 1, Action.SEGMENT_MAP: 1, Action.SEGMENT_FREE: -1, Action.SEGMENT_UNMAP: -1}
"""The sign with which the size of an event changes the reserved memory."""


def new_memory_bytes(asked_bytes: int, settings: AllocatorSettings) -> int:
    """Returns the most memory in bytes that a request takes from the driver if no free block serves it."""
    if not settings.expandable_segments:
        return segment_size(asked_bytes, settings)
    page_bytes = SMALL_SEGMENT_BYTES if asked_bytes <= LARGEST_SMALL_BYTES else settings.large_segment_bytes
    return -(-asked_bytes // page_bytes) * page_bytes


def _limit(history: History, asked_bytes: int, reserved_bytes: int, device_free: int | None) -> tuple[int | None, str]:
    """Returns the most memory that the allocator could hold, and where it is known from."""
    peak_bytes = max(reserved_levels(history))
    new_bytes = new_memory_bytes(asked_bytes, history.settings)
    if device_free is not None and device_free < new_bytes:
        return reserved_bytes + device_free, "reserved memory, and what the card had free"
    return max(peak_bytes, reserved_bytes), "the most that was ever reserved"


def _waiting_bytes(history: History, event: int | None) -> int:
    """Returns the bytes of blocks that were freed, but not yet reusable, right after an event."""
    waiting: dict[int, int] = {}
    for at in history.events[: 0 if event is None else event + 1]:
        if at.action is Action.FREE_REQUESTED:
            waiting[at.address] = at.size_bytes
        elif at.action is Action.FREE_COMPLETED:
            waiting.pop(at.address, None)
    return sum(waiting.values())


def _free(
    segments: Sequence[Segment], asked_bytes: int, stream: int, settings: AllocatorSettings
) -> Iterable[FreeMemory]:
    """Yields the free memory of the allocator, by the reason why a request could not use it."""
    found: dict[str, list[int]] = {}
    for segment in segments:
        for block in segment.blocks:
            if not block.is_allocated:
                reason = _reason(segment, block.size_bytes, asked_bytes, stream, settings)
                found.setdefault(reason, []).append(block.size_bytes)
    for reason, sizes in sorted(found.items(), key=lambda item: -sum(item[1])):
        yield FreeMemory(reason=reason, total_bytes=sum(sizes), largest_bytes=max(sizes), blocks=len(sizes))


def _reason(segment: Segment, size_bytes: int, asked_bytes: int, stream: int, settings: AllocatorSettings) -> str:
    is_small = asked_bytes <= LARGEST_SMALL_BYTES
    if not asked_bytes:
        return "in segments that hold tensors" if len(segment.blocks) > 1 else "in segments without any tensor"
    if segment.stream != stream:
        return f"belongs to stream {segment.stream}, and the request is on stream {stream}"
    if segment.is_small != is_small:
        return (
            "in the pool for large requests, and the request is small"
            if is_small
            else "in the pool for small requests, which serves at most 1 MiB"
        )
    if size_bytes < asked_bytes:
        return "in pieces that are too small, in segments that also hold tensors"
    if settings.max_split_size_bytes is not None:
        return "in blocks that max_split_size_mb forbids to split"
    return "in blocks that are long enough"
