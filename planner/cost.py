"""Time of recorded ops on a card: a roofline with a launch cost. Only ratios of these times are used to choose.

`op_ns = max(flops / rate(dtype), moved_bytes / bandwidth, host_bytes / link) + launch_ns`, views take nothing
(Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009). Small micro-batches pay more per sample because the launch
cost and the reading of the weights do not shrink with them. Overlap of kernels, caches and tile quantisation are not
modelled.
"""

from __future__ import annotations

import dataclasses

from planner.step_graph import Op, Phase, StepGraph
from profiles.device import DeviceProfile


def op_ns(op: Op, card: DeviceProfile) -> int:
    """Time of one op in nanoseconds."""
    if op.is_view:
        return 0
    rate = card.flops_per_s.get(op.dtype, card.flops_per_s["fp32"])
    busy = max(
        op.flops / rate,
        op.moved_bytes / card.memory_bandwidth_bytes_per_s,
        op.host_bytes / card.host_link_bytes_per_s,
    )
    return round(busy * 1e9) + card.launch_ns


def transfer_ns(moved_bytes: int, card: DeviceProfile) -> int:
    """Time to read or write so many bytes of the card's memory."""
    return round(moved_bytes / card.memory_bandwidth_bytes_per_s * 1e9)


def repetitions(graph: StepGraph, micro_batches: int) -> tuple[int, ...]:
    """How often each rehearsed micro-batch stands for one of the step's.

    A step of many micro-batches is rehearsed with its first, its second and, if it is smaller, its last one; the
    second stands for all between.
    """
    rehearsed = len(graph.micro_batch_sizes)
    if rehearsed == 1 or micro_batches == rehearsed:
        return (1,) * rehearsed
    return (1, micro_batches - rehearsed + 1, *([1] * (rehearsed - 2)))


def op_times_ns(graph: StepGraph, card: DeviceProfile, micro_batches: int) -> list[int]:
    """Time that each op of the graph stands for in one optimizer step; 0 for ops of other steps than the last."""
    repeats = repetitions(graph, micro_batches)
    last = graph.steps - 1
    times = []
    for op in graph.ops:
        if op.phase is Phase.SETUP or op.step != last:
            times.append(0)
            continue
        count = 1 if op.phase is Phase.OPTIMIZER else repeats[min(op.micro_batch, len(repeats) - 1)]
        times.append(op_ns(op, card) * count)
    return times


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostCopies:
    """Copies from the card to pinned memory of the host and back. Nothing else runs meanwhile."""

    card: DeviceProfile
    repeats: tuple[int, ...]
    """As `repetitions` gives them."""

    def ns(self, size_bytes: int, micro_batch: int) -> int:
        """Time of one there and one back in a micro-batch that was rehearsed, and in those that it stands for."""
        one = round(size_bytes / self.card.host_link_bytes_per_s * 1e9) + self.card.launch_ns
        return 2 * one * self.repeats[min(micro_batch, len(self.repeats) - 1)]


def step_flops(graph: StepGraph, micro_batches: int) -> int:
    """Floating point operations of one optimizer step, recomputation included."""
    repeats = repetitions(graph, micro_batches)
    last = graph.steps - 1
    return sum(
        op.flops * repeats[min(op.micro_batch, len(repeats) - 1)]
        for op in graph.ops
        if op.step == last and op.phase is not Phase.SETUP
    )
