"""Computes the memory that a recorded step takes on a card, with the allocator's slack and what is outside of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
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
from planner.profiles.device import SEGMENT_ADDRESSES, DeviceProfile
from planner.progress import Watch
from planner.recording.step_graph import Category, StepGraph, Storage
from planner.workspaces.registry import Trials

ALLOCATOR_GRANULARITY_BYTES = 512
"""Multiple to which CUDA's caching allocator rounds sizes up (kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp)."""


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
        step = AllocatingStep(graph, card, fastest=fastest)
        outcome = step.replay(capacity, settings)
        retries = outcome.retries
        if outcome.out_of_memory_event is not None:
            # The report says how much memory the step would need: replay it to its end, without a limit.
            fits = False
            unlimited = step if fastest else dataclasses.replace(step, fastest=True)
            outcome = unlimited.replay(None, without_limit(settings))
        if outcome.taken:
            curve_bytes = least_bytes
            slower = tuple(graph.storages[index].op or 0 for index in storages_of_blocks(graph, outcome.taken))
            graph = with_taken(graph, outcome.taken)
        searched = outcome.searched
        graph = with_largest(graph, searched)
        allocated, reserved = outcome.peak_allocated_bytes, outcome.peak_reserved_bytes
        tick = step.tick_of_peak(outcome)
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
    return AllocatingStep(graph, card, fastest=fastest).runs_within(vram_bytes, decisions)


@dataclasses.dataclass(frozen=True)
class AllocatingStep:
    """A recorded step on a card with a caching allocator, whose allocations can be replayed under several limits."""

    graph: StepGraph
    card: DeviceProfile
    fastest: bool = dataclasses.field(default=False, kw_only=True)
    """True if each convolution must run its first algorithm. Otherwise it takes the one that fits."""
    watch: Watch = dataclasses.field(default_factory=Watch, kw_only=True, compare=False)
    """Is checked before each replay."""

    @functools.cached_property
    def _stream(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return allocation_stream(self.graph)

    @functools.cached_property
    def _last_round(self) -> Round | None:
        return last_round(self.graph, self._stream)

    @functools.cached_property
    def _streams(self) -> dict[int, int]:
        return streams_of_blocks(self.graph)

    @functools.cached_property
    def _trials(self) -> dict[int, Trials]:
        return trials_of_blocks(self.graph, fastest=self.fastest)

    @property
    def has_repeated_steps(self) -> bool:
        """True if the recording has steps that all later steps repeat (`last_round`)."""
        return self._last_round is not None

    @property
    def searches_algorithms(self) -> bool:
        """True if convolutions try out their algorithms in free memory."""
        return any(trials.search for trials in self._trials.values())

    @functools.cached_property
    def least_bytes(self) -> int:
        """Lower bound in bytes on the memory that the allocator reserves: the peak of the memory curve.

        Each convolution counts with the smallest workspace that it may use.
        """
        is_fixed = self.fastest or not self._trials
        graph = self.graph if is_fixed else with_least_workspaces(self.graph)
        return int(graph.live_bytes(granularity_bytes=granularity_bytes(self.card)).max())

    def tick_of_peak(self, outcome: AllocatorOutcome) -> int:
        """Returns the tick of the recording at which the allocated bytes peaked in a replay."""
        return int(self._stream[2][outcome.peak_allocated_event])

    def runs_within(self, vram_bytes: int, decisions: Iterable[Decision]) -> bool:
        """Returns True if the step runs in a total of `vram_bytes` with the allocator's options of these decisions."""
        outcome = self.replay(vram_bytes - self.card.outside_bytes, settings_on(self.card, decisions))
        return outcome.out_of_memory_event is None

    def replay(
        self, capacity_bytes: int | None, settings: AllocatorSettings, *, repeats: bool = True, tries: bool = True
    ) -> AllocatorOutcome:
        """Replays the allocations, and returns the worst outcome over all orders of addresses (`replayed`).

        Args:
            capacity_bytes: maximum number of bytes that the allocator may reserve; None for no limit.
            settings: options of the allocator.
            repeats: True to repeat the last steps as a longer run does, False to run each recorded step once.
            tries: False to give each convolution its first workspace, without trying out other algorithms.

        Raises:
            TimeIsUp: the time of the watch is up.
        """
        self.watch.check()
        ids, sizes, _ = self._stream
        trials = self._trials if tries else {}
        again = self._last_round if repeats else None
        return replayed((ids, sizes), self.card, capacity_bytes, settings, self._streams, trials, again)


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
