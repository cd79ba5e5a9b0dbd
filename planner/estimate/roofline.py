"""Estimates the time of recorded ops on a card with a roofline model. Plans are chosen by ratios of these times.

    time = max(flops / rate(dtype), moved_bytes / bandwidth, host_bytes / host_link) + launch

(Williams, Waterman, Patterson: Roofline: an insightful visual performance model for multicore architectures, CACM
52(4), 2009.) A view takes no time. The time of a convolution on the card is not a maximum but a sum: the time of its
FLOPs, `CONVOLUTION_PASSES` times the time to move its bytes, and `SCRATCH_PASSES` times the time to move its scratch
memory. Small micro-batches cost more per sample, because the time to launch kernels and to read the weights does not
depend on the size of a micro-batch.

Where it stops being exact: overlap of kernels, caches and tile quantization are not modeled, and rates are those of
the datasheet unless the card was calibrated.
"""

from __future__ import annotations

import dataclasses

from planner.estimate.lanes import exposed_ns
from planner.profiles.device import AUTOCAST_DTYPES, DeviceProfile
from planner.recording.step_graph import Op, Phase, StepGraph
from planner.workspaces.cudnn.dispatch import Kernels, is_convolution, kernels_of

CONVOLUTION_PASSES = 2.0
"""A convolution takes the time of its FLOPs, plus this number times the time to move its images and weights once.

Source: published step times of image models (docs/measured.md, "Against published step times"). On both training
tables, the error is smallest with 1.9.
"""
SCRATCH_PASSES = 2.0
"""A convolution writes its scratch memory once and reads it once. Most of it holds copies in another memory format."""


def op_ns(op: Op, card: DeviceProfile) -> int:
    """Returns the time that one op takes when it runs once, in nanoseconds."""
    if op.is_view or op.collective is not None:  # `lanes` has the time of collectives
        return 0
    by_flops_s = op.flops / flops_rate(op, card)
    by_bytes_s = op.moved_bytes / card.memory_bandwidth_bytes_per_s
    if "convolution" in op.name:
        by_scratch_s = op.scratch_bytes / card.memory_bandwidth_bytes_per_s
        on_card_s = by_flops_s + CONVOLUTION_PASSES * by_bytes_s + SCRATCH_PASSES * by_scratch_s
    else:
        on_card_s = max(by_flops_s, by_bytes_s)
    return round(max(on_card_s, op.host_bytes / card.host_link_bytes_per_s) * 1e9) + card.launch_ns


def flops_rate(op: Op, card: DeviceProfile) -> int:
    """Returns the FLOPs per second for the dtype of an op.

    A convolution in fp32 that runs on cuDNN has the rate of TF32 if the recorded step allows it, as PyTorch does by
    default. A matrix product in fp32 has the rate of fp32. PyTorch's own depthwise kernels do not use tensor cores, so
    they have the rate of fp32 in half precision, too.
    """
    rates = card.flops_per_s
    dtype = op.dtype
    if op.kernel is not None and is_convolution(op.name):
        kernels = kernels_of(op.kernel, card.compute_capability)
        if kernels is Kernels.CUDNN and dtype == "fp32" and op.kernel.settings.allow_tf32:
            dtype = "tf32"
        elif kernels is Kernels.DEPTHWISE and dtype in AUTOCAST_DTYPES:
            dtype = "fp32"
    return rates.get(dtype, rates["fp32"])


def transfer_ns(moved_bytes: int, card: DeviceProfile) -> int:
    """Returns the time to read or write `moved_bytes` of the card's memory, in nanoseconds."""
    return round(moved_bytes / card.memory_bandwidth_bytes_per_s * 1e9)


def repetitions(graph: StepGraph, micro_batches: int) -> tuple[int, ...]:
    """Returns the number of micro-batches of the real step that each rehearsed micro-batch stands for.

    A step of many micro-batches is rehearsed with its first and second micro-batch and, if the last micro-batch is
    smaller, also with the last one. The second micro-batch stands for all others that have its size.
    """
    rehearsed = len(graph.micro_batch_sizes)
    if rehearsed == 1 or micro_batches == rehearsed:
        return (1,) * rehearsed
    return (1, micro_batches - rehearsed + 1, *([1] * (rehearsed - 2)))


def op_times_ns(graph: StepGraph, card: DeviceProfile, micro_batches: int) -> list[int]:
    """Returns for each op of the graph the nanoseconds that it takes in one training step.

    An op of a micro-batch that stands for several counts once for each of them. If the graph has several steps, only
    the ops of the last step count, or the mean of the steps that repeat; the time of all other ops is 0.
    """
    runs, period = counts(graph, micro_batches), graph.schedule.period
    return [op_ns(op, card) * count // period for op, count in zip(graph.ops, runs, strict=True)]


def step_ns(graph: StepGraph, card: DeviceProfile, micro_batches: int) -> int:
    """Returns the time of one training step in nanoseconds, with the time for which it waits for other cards."""
    times = op_times_ns(graph, card, micro_batches)
    return sum(times) + exposed_ns(graph, card, times, counts(graph, micro_batches))


def step_flops(graph: StepGraph, micro_batches: int) -> int:
    """Returns the number of floating point operations of one training step, recomputation included."""
    runs = counts(graph, micro_batches)
    return sum(op.flops * count for op, count in zip(graph.ops, runs, strict=True)) // graph.schedule.period


def counts(graph: StepGraph, micro_batches: int) -> list[int]:
    """Returns, for each op of the graph, how often it runs in one training step, or in the steps that repeat.

    The count is taken from the last step that was recorded, or from the last ones that repeat: an op of a forward or
    backward runs once for every micro-batch that it stands for, an op of an optimizer once. Earlier ops get 0.
    """
    repeats, first = repetitions(graph, micro_batches), graph.steps - graph.schedule.period
    return [
        0 if op.phase is Phase.SETUP or not first <= op.step < graph.steps
        else 1 if op.phase is Phase.OPTIMIZER
        else repeats[min(op.micro_batch, len(repeats) - 1)]
        for op in graph.ops
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostCopies:
    """Computes the time to copy tensors to pinned host memory and back. Copies do not overlap with computation."""

    card: DeviceProfile
    repeats: tuple[int, ...]
    """Number of micro-batches that each rehearsed micro-batch stands for, from `repetitions`."""

    def ns(self, size_bytes: int, micro_batch: int) -> int:
        """Returns the time to copy a tensor to the host and back, in nanoseconds.

        Args:
            size_bytes: size of the tensor.
            micro_batch: index of a rehearsed micro-batch; the copies of all micro-batches that it stands for are added.
        """
        one_way_ns = round(size_bytes / self.card.host_link_bytes_per_s * 1e9) + self.card.launch_ns
        return 2 * one_way_ns * self.repeats[min(micro_batch, len(self.repeats) - 1)]
