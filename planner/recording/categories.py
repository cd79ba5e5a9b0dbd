"""What a finished recording means: what every byte is, and which module calls must not be run twice."""

from __future__ import annotations

import math

from planner.recording.step_graph import Call, Category, Phase, StepGraph, Storage


def note_obstacles(
    calls: list[Call],
    writes: list[tuple[int, int, int | None]],
    buffers: dict[int, tuple[str, bool]],
    storages: list[Storage],
) -> None:
    """A call that overwrites what it was given, or state of its own, gives another result the second time."""
    born = [min((birth for birth, _ in storage.lives), default=0) for storage in storages]
    for tick, storage, call in writes:
        owner, is_norm = buffers.get(storage, ("", False))
        while call is not None and not is_norm:  # recomputing a norm leaves its statistics alone
            if born[storage] < calls[call].start and calls[call].obstacle is None:
                what = f"buffer of '{owner}'" if storage in buffers else "tensor it did not make"
                calls[call].obstacle = f"it overwrites a {what}"
            call = calls[call].parent
        if storage in buffers:
            continue
        for other in calls:  # an input overwritten after the call began cannot be recomputed from
            if (
                other.start < tick
                and storage in other.inputs
                and other.obstacle is None
                and born[storage] < other.start
            ):
                other.obstacle = "one of its inputs is overwritten later"


def classify(graph: StepGraph) -> None:
    """Sort what was born in the steps into activations, logits and loss, and temporaries (in place)."""
    loss_ops = _loss_ops(graph)
    backward_begins: dict[tuple[int, int], int] = {}
    for op in graph.ops:
        if op.phase in (Phase.BACKWARD, Phase.RECOMPUTE):
            backward_begins.setdefault((op.step, op.micro_batch), op.tick)
    spans = graph.spans()
    for storage, record in enumerate(graph.storages):
        if record.op is None or record.category is not Category.TEMPORARY:
            continue
        op = graph.ops[record.op]
        outlives_forward = spans[storage][-1][1] > backward_begins.get((op.step, op.micro_batch), math.inf)
        if record.op in loss_ops:
            record.category = Category.LOGITS
        elif op.phase is Phase.RECOMPUTE or (op.phase is Phase.FORWARD and outlives_forward):
            record.category = Category.ACTIVATION
    for index in loss_ops:
        for storage in graph.ops[index].inputs:
            if graph.storages[storage].category in (Category.ACTIVATION, Category.TEMPORARY):
                graph.storages[storage].category = Category.LOGITS


def _loss_ops(graph: StepGraph) -> set[int]:
    """Ops of the loss: what the model does by itself after its last submodule, what follows it, and their backward."""
    roots = {index for index, call in enumerate(graph.calls) if call.parent is None}
    last_child_ends = {call.parent: call.end for call in graph.calls if call.parent in roots}
    found: set[int] = set()
    for index, op in enumerate(graph.ops):
        if op.phase is Phase.FORWARD:
            if op.call is None or (op.call in roots and op.tick > last_child_ends.get(op.call, math.inf)):
                found.add(index)
        elif op.phase is Phase.BACKWARD and op.forward_op in found:
            found.add(index)
    return found
