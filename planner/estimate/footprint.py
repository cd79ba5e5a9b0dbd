"""From a recording to what the card has to hold: fixed costs, the allocator, the breakdown at the peak."""

from __future__ import annotations

import dataclasses

import numpy as np

from planner.allocator.replay import AllocatorOutcome, replay
from planner.allocator.settings import AllocatorSettings
from planner.estimate import roofline
from planner.estimate.allocation_stream import allocation_stream
from planner.plan_types.plan import Footprint
from planner.profiles.device import SEGMENT_ADDRESSES, DeviceProfile
from planner.recording.step_graph import Category, StepGraph, Storage

ALLOCATOR_GRANULARITY_BYTES = 512
"""CUDA's caching allocator rounds every size up to this (kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp)."""


def granularity_bytes(card: DeviceProfile) -> int:
    return ALLOCATOR_GRANULARITY_BYTES if card.allocator else 1


def with_whole_batch(graph: StepGraph, batch_bytes: int) -> StepGraph:
    """Add the samples that were not rehearsed: the step is given the whole batch, and it stays on the card."""
    present = sum(storage.size_bytes for storage in graph.storages if storage.category is Category.INPUT)
    if present >= batch_bytes:
        return graph
    rest = Storage(size_bytes=batch_bytes - present, lives=[(0, graph.ticks)], category=Category.INPUT, op=None)
    return dataclasses.replace(graph, storages=[*graph.storages, rest])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """A footprint, and whether the step got through under the cap."""

    footprint: Footprint
    fits: bool
    curve_bytes: int
    """Largest number of bytes that tensors hold, each rounded to the allocator's granularity."""


def measure(graph: StepGraph, card: DeviceProfile, *, vram_bytes: int | None, micro_batches: int) -> Measured:
    """Footprint of a plain recording on a card.

    Args:
        graph: with workspaces.
        vram_bytes: budget about the total; the allocator is given what the context leaves of it. None: no limit.
        micro_batches: of the real step; the recording may hold fewer.
    """
    granularity = granularity_bytes(card)
    live = graph.live_bytes(granularity_bytes=granularity)
    curve_bytes = int(live.max())
    tick, allocated, reserved, fits = int(live.argmax()), curve_bytes, curve_bytes, True
    capacity = None if vram_bytes is None else vram_bytes - card.context_bytes
    if card.allocator:
        ids, sizes, ticks = allocation_stream(graph)
        outcome = replayed((ids, sizes), card, capacity)
        if outcome.out_of_memory_event is not None:
            fits = False
            outcome = replayed((ids, sizes), card, None)
        allocated, reserved = outcome.peak_allocated_bytes, outcome.peak_reserved_bytes
        tick = int(ticks[outcome.peak_allocated_event])
    elif capacity is not None:
        fits = curve_bytes <= capacity
    op = graph.op_at(tick)
    footprint = Footprint(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        total_bytes=reserved + card.context_bytes,
        phase=str(op.phase) if op else "",
        module=op.module if op else "",
        op=op.name if op else "",
        breakdown=_breakdown(graph, tick, granularity, reserved, card),
        step_ns=sum(roofline.op_times_ns(graph, card, micro_batches)),
        flops=roofline.step_flops(graph, micro_batches),
    )
    return Measured(footprint=footprint, fits=fits, curve_bytes=curve_bytes)


def smallest_capacity_bytes(graph: StepGraph, card: DeviceProfile, *, within_bytes: int = 1 << 20) -> int:
    """A total in which the step gets through, and at most `within_bytes` above the smallest one.

    At its limit the allocator frees cache. What it reserves at most under a limit is as good a limit: no allocation was
    between the two, so all of them are answered alike.
    """
    if not card.allocator:
        return int(graph.live_bytes().max()) + card.context_bytes
    ids, sizes, _ = allocation_stream(graph)
    outcome = replayed((ids, sizes), card, None)
    low, high = outcome.peak_allocated_bytes - 1, outcome.peak_reserved_bytes
    while high - low > within_bytes:
        middle = (low + high) // 2
        outcome = replayed((ids, sizes), card, middle)
        if outcome.out_of_memory_event is None:
            high = outcome.peak_reserved_bytes
        else:
            low = middle
    return high + card.context_bytes


def replayed(
    stream: tuple[np.ndarray, np.ndarray], card: DeviceProfile, capacity_bytes: int | None
) -> AllocatorOutcome:
    """The worst of the orders in which the card's driver may place segments: out of memory, or the largest."""
    outcomes = [
        replay(stream, AllocatorSettings(), capacity_bytes, descending=descending)
        for descending in SEGMENT_ADDRESSES[card.segment_addresses]
    ]
    return max(outcomes, key=lambda found: (found.out_of_memory_event is not None, found.peak_reserved_bytes))


def _breakdown(graph: StepGraph, tick: int, granularity: int, reserved: int, card: DeviceProfile) -> dict[str, int]:
    """Bytes by category at a tick; what the allocator holds beyond them is its slack."""
    totals: dict[str, int] = {}
    for storage, spans in zip(graph.storages, graph.spans(), strict=True):
        if any(start <= tick < stop for start, stop in spans):
            rounded = -(-storage.size_bytes // granularity) * granularity
            totals[storage.category] = totals.get(storage.category, 0) + rounded
    totals[Category.SLACK] = reserved - sum(totals.values())
    totals[Category.CONTEXT] = card.context_bytes
    return {str(category): totals[category] for category in Category if totals.get(category)}
