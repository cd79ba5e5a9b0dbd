"""Time that a step waits for other cards: what their collectives take beyond the computation that they overlap with.

A step has two lanes. In one of them kernels run, in the order in which they were recorded; in the other, collectives.
A collective of S bytes among n cards takes (Hockney's model; Thakur et al., Optimization of collective communication
operations in MPICH, 2005, for rings)

    latency + S (n - 1) / n / rate,  and an all-reduce twice the second term.

FSDP2 overlaps them as follows (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py). The gather of a unit may
start when the one before it has been copied out of its buffer, and the unit computes when its own gather is copied out.
A reduce-scatter starts when its gradients are there; the one after it waits for it. DistributedDataParallel reduces
each bucket when it is full, and the optimizer waits for all. Other collectives, such as those of tensor parallelism,
make the computation wait.

Where it stops being exact: collectives slow down kernels that run at the same time, ranks that differ in their tokens
wait for each other, and the rates are those of datasheets. Nothing was measured on cards.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.profiles.device import DeviceProfile
from planner.recording.step_graph import Collective, Phase, StepGraph

_GATHER, _SCATTER, _REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"
_COPY_OUT = "fsdp.split_with_sizes_copy.default"


def collective_ns(collective: Collective, card: DeviceProfile) -> int:
    """Returns the time of a collective that overlaps with nothing, in nanoseconds; 0 if the card has no links."""
    if card.links is None:
        return 0
    link = card.links.of(collective.span)
    rounds = 2 if "all_reduce" in collective.kind or "allreduce" in collective.kind else 1
    sent_bytes = rounds * collective.size_bytes * (collective.cards - 1) / collective.cards
    return link.latency_ns + round(sent_bytes / link.bytes_per_s * 1e9)


def exposed_ns(graph: StepGraph, card: DeviceProfile, op_times_ns: Sequence[int], counts: Sequence[int]) -> int:
    """Returns the time for which the step waits for collectives, in nanoseconds.

    Args:
        op_times_ns: time of each op; 0 for collectives (`roofline.op_times_ns`).
        counts: for each op, the number of times that it runs in a step.
    """
    if card.links is None or not any(op.collective for op in graph.ops):
        return 0
    computed = sent = copied_out = gathered = scattered = 0
    for op, compute_ns, count in zip(graph.ops, op_times_ns, counts, strict=True):
        if not count:
            continue
        if op.collective is None:
            if op.name == _COPY_OUT:
                computed = copied_out = max(computed, gathered) + compute_ns
            else:
                computed = (max(computed, sent) if op.phase is Phase.OPTIMIZER else computed) + compute_ns
            continue
        took_ns = collective_ns(op.collective, card) * count
        match op.collective.kind:
            case kind if kind == _GATHER and op.phase is not Phase.OPTIMIZER:
                gathered = sent = max(sent, copied_out) + took_ns
            case kind if kind == _SCATTER:
                computed = max(computed, scattered)
                scattered = sent = max(sent, computed) + took_ns
            case kind if kind == _REDUCE and op.phase is not Phase.OPTIMIZER:
                sent = max(sent, computed) + took_ns
            case _:
                computed = sent = max(sent, computed) + took_ns
    return max(computed, sent) - sum(op_times_ns)
