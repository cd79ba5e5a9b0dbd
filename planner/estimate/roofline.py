"""Time of recorded ops on a card: a roofline with a launch cost. Only ratios of these times are used to choose.

An op takes `max(flops / rate(dtype), moved_bytes / bandwidth)` and a launch, copies over the host's link at least
`host_bytes / link`, views nothing (Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009). Convolutions take their
FLOPs and a multiple of their bytes, added up. Small micro-batches pay more per sample because the launch cost and the
reading of the weights do not shrink with them. Overlap of kernels, caches and tile quantisation are not modelled.
"""

from __future__ import annotations

import dataclasses

from planner.profiles.device import DeviceProfile
from planner.recording.step_graph import Op, Phase, StepGraph

CONVOLUTION_PASSES = 2.0
"""Over its images and weights that a convolution takes the time of, beside that of its FLOPs.

Source: published step times of image models on three cards (docs/measured.md, "Against published step times"): errors
are least at 1.7 over five tables, and at 2.5 over the two of training.
"""


def op_ns(op: Op, card: DeviceProfile) -> int:
    """Time of one op in nanoseconds."""
    if op.is_view:
        return 0
    by_flops_s = op.flops / card.flops_per_s.get(op.dtype, card.flops_per_s["fp32"])
    by_bytes_s = op.moved_bytes / card.memory_bandwidth_bytes_per_s
    is_convolution = "convolution" in op.name
    on_card_s = by_flops_s + CONVOLUTION_PASSES * by_bytes_s if is_convolution else max(by_flops_s, by_bytes_s)
    return round(max(on_card_s, op.host_bytes / card.host_link_bytes_per_s) * 1e9) + card.launch_ns


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
    counts = _counts(graph, micro_batches)
    return [op_ns(op, card) * count for op, count in zip(graph.ops, counts, strict=True)]


def step_flops(graph: StepGraph, micro_batches: int) -> int:
    """Floating point operations of one optimizer step, recomputation included."""
    return sum(op.flops * count for op, count in zip(graph.ops, _counts(graph, micro_batches), strict=True))


def _counts(graph: StepGraph, micro_batches: int) -> list[int]:
    """How often each op is run in an optimizer step that is like the last of the graph; the update is made once."""
    repeats, last = repetitions(graph, micro_batches), graph.steps - 1
    return [
        0 if op.phase is Phase.SETUP or op.step != last
        else 1 if op.phase is Phase.OPTIMIZER
        else repeats[min(op.micro_batch, len(repeats) - 1)]
        for op in graph.ops
    ]  # fmt: skip


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
