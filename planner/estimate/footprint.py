"""Computes the memory that a recorded step takes on a card, with the allocator's slack and what is outside of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from planner.allocator.options import settings_of, without_limit
from planner.allocator.replay import AllocatorOutcome, Round, replay
from planner.allocator.settings import PYTORCH_DEFAULTS, AllocatorSettings
from planner.estimate import roofline, tape_time
from planner.estimate.add_workspaces import with_least_workspaces
from planner.estimate.allocation_stream import (
    allocation_stream,
    last_round,
    storages_of_blocks,
    streams_of_blocks,
    trials_of_blocks,
    with_largest,
    with_taken,
)
from planner.plan_types.decision_base import Decision, allocator_conf, micro_batches_of
from planner.plan_types.plan import Footprint
from planner.plan_types.sizes import MIB
from planner.profiles.device import SEGMENT_ADDRESSES, DeviceProfile
from planner.recording.step_graph import Category, StepGraph, Storage
from planner.workspaces.registry import Trials

ALLOCATOR_GRANULARITY_BYTES = 512
"""Multiple to which CUDA's caching allocator rounds sizes up (kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp)."""

_TOLERANCE_BYTES = 2 * MIB
"""A plan is not predicted to fail by this number of bytes or fewer, the size of a small segment of the allocator."""


def granularity_bytes(card: DeviceProfile) -> int:
    """Returns the multiple in bytes to which sizes are rounded up; 1 for a card without a caching allocator."""
    return ALLOCATOR_GRANULARITY_BYTES if card.allocator else 1


def with_whole_batch(graph: StepGraph, batch_bytes: int) -> StepGraph:
    """Returns the recording with `batch_bytes` of inputs.

    A rehearsal may use fewer samples than the batch has, but the whole batch is on the card during the step.
    """
    present = sum(storage.size_bytes for storage in graph.storages if storage.category is Category.INPUT)
    if present >= batch_bytes:
        return graph
    rest = Storage(size_bytes=batch_bytes - present, lives=[(0, graph.ticks)], category=Category.INPUT, op=None)
    return dataclasses.replace(graph, storages=[*graph.storages, rest])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """The footprint of a step, and whether the step fits a budget."""

    footprint: Footprint
    fits: bool
    """True if the step runs under the budget without running out of memory."""
    curve_bytes: int
    """Peak of the memory curve: the largest sum of all live storages, each rounded to the allocator's granularity."""
    peak_tick: int
    """The tick of the recording at which the allocated bytes peak."""
    retries: int
    """Number of requests for which the allocator had to release its cache under the budget, which makes a step wait."""
    least_bytes: int
    """Peak of the memory curve if each convolution runs with the algorithm that needs the smallest workspace."""
    slower: tuple[int, ...] = ()
    """Indices of the ops that run a slower algorithm under the budget, because the workspace of the first one does not
    fit."""
    searched: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Bytes of the blocks in which algorithms were tried out, by block of `allocation_stream`."""


def measure(
    graph: StepGraph,
    card: DeviceProfile,
    *,
    vram_bytes: int | None,
    decisions: Iterable[Decision] = (),
    fastest: bool = False,
) -> Measured:
    """Computes the footprint of a recording on a card.

    Where the workspace of a convolution does not fit in the budget, the convolution takes a slower algorithm, as in
    PyTorch (`planner.allocator.trials`). The memory curve then has the smallest workspaces, which is what the step
    needs at least.

    If the step does not fit in the budget, the result has the footprint that the step would have without a budget.

    Args:
        graph: A recording to which workspaces have been added (`with_workspaces`).
        vram_bytes: Budget for the total. The allocator gets this budget minus the CUDA context and NCCL's memory.
            None means no limit.
        decisions: The decisions of the step. They say how many micro-batches it has, of which the recording may hold
            fewer, and which options of the allocator are set.
        fastest: True if each convolution must run its first algorithm, so that the step does not fit if a workspace
            does not.
    """
    settings, micro_batches = settings_on(card, decisions), micro_batches_of(decisions)
    granularity = granularity_bytes(card)
    slower: tuple[int, ...] = ()
    searched: Mapping[int, int] = {}
    live = graph.live_bytes(granularity_bytes=granularity)
    curve_bytes = int(live.max())
    least_bytes = int(with_least_workspaces(graph).live_bytes(granularity_bytes=granularity).max())
    tick, allocated, reserved, fits, retries = int(live.argmax()), curve_bytes, curve_bytes, True, 0
    capacity = None if vram_bytes is None else vram_bytes - card.outside_bytes
    if card.allocator:
        ids, sizes, ticks = stream = allocation_stream(graph)
        again, streams = last_round(graph, stream), streams_of_blocks(graph)
        trials = trials_of_blocks(graph, fastest=fastest)
        outcome = replayed((ids, sizes), card, capacity, settings, streams, trials, again)
        retries = outcome.retries
        if outcome.out_of_memory_event is not None:
            # The report says how much memory the step would need: replay it to its end, without a limit.
            fits = False
            trials = trials_of_blocks(graph, fastest=True)
            outcome = replayed((ids, sizes), card, None, without_limit(settings), streams, trials, again)
        if outcome.taken:
            curve_bytes = least_bytes
            slower = tuple(graph.storages[index].op or 0 for index in storages_of_blocks(graph, outcome.taken))
            graph = with_taken(graph, outcome.taken)
        searched = outcome.searched
        graph = with_largest(graph, searched)
        allocated, reserved = outcome.peak_allocated_bytes, outcome.peak_reserved_bytes
        tick = int(ticks[outcome.peak_allocated_event])
    elif capacity is not None:
        fits = curve_bytes <= capacity
    by_category = graph.category_bytes(granularity_bytes=granularity)
    op = graph.op_at(tick)
    footprint = Footprint(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        total_bytes=reserved + card.outside_bytes,
        phase=str(op.phase) if op else "",
        module=op.module if op else "",
        op=op.name if op else "",
        breakdown=_breakdown(by_category[:, tick], reserved, card),
        step_ns=roofline.step_ns(graph, card, micro_batches) + tape_time.host_ns(graph, card, decisions),
        flops=roofline.step_flops(graph, micro_batches),
        most=_named(by_category.max(axis=1)),
    )
    return Measured(
        footprint=footprint,
        fits=fits,
        curve_bytes=curve_bytes,
        peak_tick=tick,
        retries=retries,
        least_bytes=least_bytes,
        slower=slower,
        searched=searched,
    )


def smallest_total_bytes(
    graph: StepGraph,
    card: DeviceProfile,
    decisions: Iterable[Decision] = (),
    *,
    within_bytes: int = 1 << 20,
    fastest: bool = False,
    above_bytes: int = 0,
    below_bytes: int | None = None,
) -> int:
    """Returns a total in bytes in which the step runs, at most `within_bytes` above the smallest such total.

    The total is found by bisection over the allocator's limit. When the allocator reaches its limit, it frees cached
    segments, so a step can run in fewer bytes than it reserves without a limit. If a replay fits, the upper end of the
    interval becomes the peak of the bytes that it reserved. This may be well below the tried limit, but with this peak
    as its limit the allocator would answer every request in the same way.

    Args:
        decisions: the decisions of the step, which may set options of the allocator.
        fastest: True if each convolution must run its first algorithm. Otherwise it takes the one that fits.
        above_bytes: a total in which the step is known not to run; 0 if none is known.
        below_bytes: a known total, which is returned unless the step runs in a total that is smaller by `within_bytes`.

    The bisection assumes that a step that runs under one limit also runs under every larger limit. A caching allocator
    does not guarantee this, so an even smaller total may exist. The step runs in the returned total in any case.
    """
    if not card.allocator:
        return int(graph.live_bytes().max()) + card.outside_bytes
    ids, sizes, _ = stream = allocation_stream(graph)
    settings, streams = without_limit(settings_on(card, decisions)), streams_of_blocks(graph)
    trials, again = trials_of_blocks(graph, fastest=fastest), last_round(graph, stream)
    if below_bytes is None:
        outcome = replayed((ids, sizes), card, None, settings, streams, last_round=again)
    else:
        less_bytes = below_bytes - within_bytes - card.outside_bytes
        outcome = replayed((ids, sizes), card, less_bytes, settings, streams, trials, again)
        if outcome.out_of_memory_event is not None:
            return below_bytes
    low, high = outcome.peak_allocated_bytes - 1, outcome.peak_reserved_bytes
    tries_out = any(each.search for each in trials.values())
    if tries_out and below_bytes is None:  # each search empties the cache, which changes what follows
        while replayed((ids, sizes), card, high, settings, streams, trials, again).out_of_memory_event is not None:
            high += max(high // 16, within_bytes)
    if trials and not fastest:
        least = with_least_workspaces(graph).live_bytes(granularity_bytes=granularity_bytes(card))
        low = min(low, int(least.max()) - 1)
    low = max(low, above_bytes - card.outside_bytes)

    def smallest(low: int, high: int, rounds: Round | None) -> int:
        """Returns the limit that is found by bisection, between one that is too small and one that is large enough."""
        while high - low > within_bytes:
            middle = (low + high) // 2
            outcome = replayed((ids, sizes), card, middle, settings, streams, trials, rounds)
            if outcome.out_of_memory_event is None:
                high = outcome.peak_reserved_bytes
            else:
                low = middle
        return high

    found = smallest(low, high, None)  # repeated steps take longer to replay, and need as much in nearly all cases
    if again is not None and found < high:
        outcome = replayed((ids, sizes), card, found, settings, streams, trials, again)
        fits = outcome.out_of_memory_event is None
        found = outcome.peak_reserved_bytes if fits else smallest(found, high, again)
    return found + card.outside_bytes


def smallest_of(
    graph: StepGraph,
    card: DeviceProfile,
    alternatives: Iterable[tuple[Decision, ...]],
    *,
    fastest: bool = False,
    above_bytes: int = 0,
) -> int:
    """Returns the smallest total in bytes in which the step runs with any of the alternatives for its decisions.

    The alternatives differ in the options of the allocator. An alternative is measured only if the step runs with it
    in less than with those before it. The other arguments are those of `smallest_total_bytes`.

    Raises:
        ValueError: there is no alternative.
    """
    smallest: int | None = None
    for decisions in alternatives:
        smallest = smallest_total_bytes(
            graph, card, decisions, fastest=fastest, above_bytes=above_bytes, below_bytes=smallest
        )
    if smallest is None:
        raise ValueError("there is no alternative: give at least one, which may have no decision")
    return smallest


def runs_within(
    graph: StepGraph,
    card: DeviceProfile,
    vram_bytes: int | None,
    decisions: Iterable[Decision] = (),
    *,
    fastest: bool = False,
) -> bool:
    """Returns `measure(...).fits`, without measuring the footprint. The arguments are those of `measure`."""
    if vram_bytes is None:
        return True
    capacity = vram_bytes - card.outside_bytes
    if not card.allocator:
        return int(graph.live_bytes(granularity_bytes=granularity_bytes(card)).max()) <= capacity
    ids, sizes, _ = stream = allocation_stream(graph)
    settings, trials = settings_on(card, decisions), trials_of_blocks(graph, fastest=fastest)
    again, streams = last_round(graph, stream), streams_of_blocks(graph)
    outcome = replayed((ids, sizes), card, capacity, settings, streams, trials, again)
    return outcome.out_of_memory_event is None


def predicted_missing_bytes(
    graph: StepGraph,
    card: DeviceProfile,
    vram_bytes: int,
    alternatives: Sequence[tuple[Decision, ...]],
    fastest: bool,
) -> int:
    """Returns how many bytes a step lacks by a prediction of its allocations; 0 if it lacks at most `_TOLERANCE_BYTES`.

    Args:
        graph: the predicted allocations (`planner.recompute.selected_step`).
        vram_bytes: the budget.
        alternatives, fastest: as in `smallest_of`.
    """
    enough_bytes = vram_bytes + _TOLERANCE_BYTES
    if not card.allocator or any(
        runs_within(graph, card, enough_bytes, decisions, fastest=fastest) for decisions in alternatives
    ):
        return 0
    return smallest_of(graph, card, alternatives, fastest=fastest, above_bytes=enough_bytes) - vram_bytes


def settings_on(card: DeviceProfile, decisions: Iterable[Decision]) -> AllocatorSettings:
    """Returns the settings of the allocator: the options that the user has set, and those of the decisions."""
    return settings_of(allocator_conf(decisions, card.alloc_conf), card_bytes=card.vram_bytes)


def replayed(
    stream: tuple[np.ndarray, np.ndarray],
    card: DeviceProfile,
    capacity_bytes: int | None,
    settings: AllocatorSettings = PYTORCH_DEFAULTS,
    streams: Mapping[int, int] = MappingProxyType({}),
    trials: Mapping[int, Trials] = MappingProxyType({}),
    last_round: Round | None = None,
) -> AllocatorOutcome:
    """Replays allocations for each order of addresses that the card's driver may give to segments.

    Args:
        stream: block ids and sizes in bytes from `allocation_stream`.
        capacity_bytes: maximum number of bytes that the allocator may reserve; None for no limit.
        settings: options of the allocator.
        streams: CUDA streams by block (`streams_of_blocks`).
        trials: what is tried for blocks that do not fit (`trials_of_blocks`).
        last_round: the events that are repeated (`last_round`); None to run each event once.

    Returns:
        The worst outcome: one that runs out of memory, or else the one with the largest peak of reserved bytes.
    """
    outcomes = []
    for descending in SEGMENT_ADDRESSES[card.segment_addresses]:
        outcome = replay(
            stream,
            settings,
            capacity_bytes,
            card_bytes=card.vram_bytes,
            descending=descending,
            streams=streams,
            trials=trials,
            last_round=last_round,
        )
        if outcome.out_of_memory_event is not None:
            return outcome
        outcomes.append(outcome)
    return max(outcomes, key=lambda outcome: outcome.peak_reserved_bytes)


def _breakdown(live: np.ndarray, reserved: int, card: DeviceProfile) -> dict[str, int]:
    """Returns the bytes at a tick by category. Reserved bytes in which nothing is alive are the slack.

    Args:
        live: int64[len(Category)]: bytes of the storages of each category that are alive at the tick.
    """
    others = {
        Category.SLACK: reserved - int(live.sum()),
        Category.CONTEXT: card.context_bytes,
        Category.NCCL: card.nccl_bytes,
    }
    return _named(live) | {str(category): size for category, size in others.items() if size}


def _named(sizes: np.ndarray) -> dict[str, int]:
    """Returns sizes in the order of `Category` by the names of the categories, without zeros."""
    return {str(category): int(size) for category, size in zip(Category, sizes, strict=True) if size}
