"""Finds the category of every storage of a recording, and the calls that must not be run twice."""

from __future__ import annotations

import math

from planner.recording.step_graph import Call, Category, Phase, StepGraph, Storage


def note_obstacles(
    calls: list[Call],
    writes: list[tuple[int, int, int | None]],
    buffers: dict[int, tuple[str, bool]],
    storages: list[Storage],
) -> None:
    """Records an obstacle for every call with an in-place write that makes a second run give a different result.

    Such a call writes to tensors that it did not make, or one of its inputs is overwritten later.

    Args:
        calls: all module calls. The function sets their `obstacle`.
        writes: (tick, storage, call) of every in-place write in the forward.
        buffers: for each storage of a buffer: path of the module that owns it, and True if that module is a norm.
        storages: all storages.
    """
    born = [min((birth for birth, _ in storage.lives), default=0) for storage in storages]
    for tick, storage, call in writes:
        if storages[storage].category in (Category.UNSHARDED, Category.COMMUNICATION):
            continue  # FSDP2 gathers parameters into them; a recompute finds them gathered
        owner, is_norm = buffers.get(storage, ("", False))
        while call is not None and not is_norm:  # a recompute does not update the running statistics of a norm
            if born[storage] < calls[call].start and calls[call].obstacle is None:
                target = f"buffer of '{owner}'" if storage in buffers else "tensor that it did not make"
                calls[call].obstacle = f"it overwrites a {target}"
            call = calls[call].parent
        if storage in buffers:
            continue
        for other in calls:  # a recompute would read the new value of the input
            if (
                other.start < tick
                and storage in other.inputs
                and other.obstacle is None
                and born[storage] < other.start
            ):
                other.obstacle = "one of its inputs is overwritten later"


def classify(graph: StepGraph) -> None:
    """Sets the category of storages that the recorded steps made: activations, logits and loss, or temporaries.

    Other categories are set while the recording runs.
    """
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
        # A backward that builds a graph of itself (create_graph) saves tensors for the next one.
        following = op.micro_batch + (op.phase is Phase.BACKWARD)
        outlives_forward = spans[storage][-1][1] > backward_begins.get((op.step, following), math.inf)
        if record.op in loss_ops:
            record.category = Category.LOGITS
        elif op.phase is Phase.RECOMPUTE or (op.phase is not Phase.OPTIMIZER and outlives_forward):
            record.category = Category.ACTIVATION
        elif op.collective is not None:  # of tensor parallelism; FSDP2's collectives write to memory that exists
            record.category = Category.COMMUNICATION
    for index in loss_ops:
        for storage in graph.ops[index].inputs:
            if graph.storages[storage].category in (Category.ACTIVATION, Category.TEMPORARY):
                graph.storages[storage].category = Category.LOGITS


def _loss_ops(graph: StepGraph) -> set[int]:
    """Returns the ops that compute the loss, and their backward ops.

    The loss is computed by the ops that the model runs itself after the call of its last submodule, and by the ops that
    the training step runs outside of the model.
    """
    roots = {index for index, call in enumerate(graph.calls) if call.parent is None}
    last_child_ends = {call.parent: call.end for call in graph.calls if call.parent in roots}
    loss_ops: set[int] = set()
    for index, op in enumerate(graph.ops):
        if op.phase is Phase.FORWARD:
            if op.call is None or (op.call in roots and op.tick > last_child_ends.get(op.call, math.inf)):
                loss_ops.add(index)
        elif op.phase is Phase.BACKWARD and op.forward_op in loss_ops:
            loss_ops.add(index)
    return loss_ops
