"""Estimates the host time of recomputed segments, which the times of kernels do not include.

To recompute a segment, the host records its ops during the forward (`rewrite/portable/replay_tape.py`) and runs them
again in backward. Both take longer than to launch the ops. If the kernels are shorter than that, they wait for the
host, and the step becomes longer.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from planner.estimate import roofline
from planner.plan_types.decision_base import Decision
from planner.plan_types.decisions import micro_batches_of
from planner.plan_types.recompute_decisions import Checkpoint, Replay
from planner.profiles.device import DeviceProfile
from planner.recording.module_calls import WITHOUT_GRADIENTS, ops_in
from planner.recording.step_graph import Phase, StepGraph

RECORDED_LAUNCHES = 10
"""Time that the host takes to launch an op and to record it on a tape, as a multiple of the time to launch it."""
REPLAYED_LAUNCHES = 5
"""The same multiple for an op that runs again in a replay. `python -m benchmarks.tape` measures both multiples."""


def recorded_ns(op_ns: int, launch_ns: int) -> int:
    """Returns the time of an op that is recorded, in ns: the longer of the times of card and host."""
    return max(op_ns, RECORDED_LAUNCHES * launch_ns)


def replayed_ns(op_ns: int, launch_ns: int) -> int:
    """Returns the time of an op that runs again in a replay, in ns: the longer of the times of card and host."""
    return max(op_ns, REPLAYED_LAUNCHES * launch_ns)


def host_ns(graph: StepGraph, card: DeviceProfile, decisions: Iterable[Decision]) -> int:
    """Returns the time in ns by which the host lengthens a step, in which segments are recorded and run again.

    Args:
        graph: a recording of the step with these decisions.
        decisions: the decisions of the step; without recomputed segments the result is 0.
    """
    decisions = tuple(decisions)
    segments = {
        module: of_module
        for decision in decisions
        if isinstance(decision, Replay)
        for module, of_module in decision.by_module.items()
    }
    if not segments:
        return 0
    runs = roofline.counts(graph, micro_batches_of(decisions))
    longer_ns = 0
    for index, call in enumerate(graph.calls):
        if call.module in segments and call.obstacle != WITHOUT_GRADIENTS:
            ops = ops_in(graph, index)
            for start, stop, *_ in segments[call.module]:
                for op in ops[start:stop]:
                    alone_ns = roofline.op_ns(graph.ops[op], card)
                    longer_ns += runs[op] * (recorded_ns(alone_ns, card.launch_ns) - alone_ns)
    whole = {module for decision in decisions if isinstance(decision, Checkpoint) for module in decision.modules}
    for again, count in zip(graph.ops, runs, strict=True):
        if again.phase is Phase.RECOMPUTE and not again.is_view and _is_in(again.module, segments, whole):
            alone_ns = roofline.op_ns(again, card)
            longer_ns += count * (replayed_ns(alone_ns, card.launch_ns) - alone_ns)
    return longer_ns // graph.schedule.period


def _is_in(module: str, segments: Container[str], whole: Container[str]) -> bool:
    """True if the nearest recomputed module around the op's module is recomputed in segments, and not as a whole."""
    while module not in segments and module not in whole and module:
        module = module.rpartition(".")[0]
    return module in segments
