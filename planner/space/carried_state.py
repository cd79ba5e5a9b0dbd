"""Finds state that one forward leaves behind and the next one uses, in a recording of two training steps.

With accumulation every micro-batch runs a forward, and so changes such state: a queue of earlier samples, a moving
average of weights, a counter that warms up the loss. Training would then differ from that with whole batches.

A tensor counts as such state if a forward of the first step made or wrote it, and if values flow from it into the
backward of the second step. Writes that read only the tensor itself (a count of batches that nothing else reads) do not
count. Neither do caches: tensors that depend on neither the batch nor a trained parameter, and that the second step
does not change.

A tensor also counts if the second forward computes its new value from the old one and from the batch or a trained
parameter, even if no backward uses it: running statistics and averages of weights, which only evaluation reads.

Numbers and containers of Python count if the second step changed them (`module_state.plain_state`), and if its forward
ran other ops than the forward of the first step, or ops with other numbers as arguments.
If the same ops ran with other numbers, there is such state even if it was not found. It may lie in an object that a
helper function changes, in an iterator, or in a generator of random numbers.

State that first matters in a later step is not found, nor are numbers that an op reads from its caller's memory.
"""

from __future__ import annotations

import math

from planner.recording.op_schema import WRITE_STATISTICS
from planner.recording.step_graph import Category, Op, Phase, StepGraph

_OVERWRITE = ("aten.zero_.", "aten.fill_.", "aten.copy_.", "aten.normal_.", "aten.uniform_.", "aten.bernoulli_.")
"""Ops that overwrite what they write to without reading it."""
_IDEMPOTENT = ("aten.clamp_", "aten.clamp_min_", "aten.clamp_max_", "aten.relu_.", "aten.abs_.", "aten.renorm_.",
               "aten.masked_fill_.", "aten.embedding_renorm_.")  # fmt: skip
"""Ops that change nothing if they run a second time. Forwards use them to constrain trained parameters."""
_READ_SHAPES = ("_like.", ".new_", "sym_size", "sym_numel")
"""Parts of the names of ops that read only shapes of their arguments."""
_OF_RANKS = (Category.UNSHARDED, Category.COMMUNICATION)
"""Memory that FSDP2 and DistributedDataParallel keep between the steps. The forwards overwrite it."""
_ITEM_BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}


def carried_state(graph: StepGraph) -> str | None:
    """Returns a description of the state that a forward changes and the next one uses; None if none was found.

    The description goes into a note, as in 'the forward changes ..., which the next forward uses'.

    Args:
        graph: a recording of two steps, each with one forward.
    """
    if graph.steps < 2:
        return None
    left = _left_behind(graph)
    storage = _reaching_backward(graph, left)
    if storage is None:
        storage = _updated_further(graph, left)
    if storage is not None:
        op = left[storage]
        line = f" at {op.source}" if op.source else ""
        return f"a tensor (the result of {op.name.split('.')[1]}{line})"
    if not graph.forwards_differ:
        return None
    # Other ops may come from a cache that the first forward fills. The same ops with other numbers come from state.
    return graph.changed_state or (None if graph.ops_differ else "numbers outside of the model")


def _left_behind(graph: StepGraph) -> dict[int, Op]:
    """Returns the storages in which the forward of the first step leaves values, with the op that made or wrote each.

    Storages of the batch and caches are left out.
    """
    trained, inputs = _trained(graph), _inputs(graph)
    derived, left, again = trained | inputs, {}, set[int]()
    is_rank, in_model = any(op.collective for op in graph.ops), set[tuple[int, int]]()
    for index, op in enumerate(graph.ops):
        if op.phase is not Phase.FORWARD or op.is_view:
            continue
        if op.call is not None:
            in_model.add((op.step, op.micro_batch))
        elif is_rank and (op.step, op.micro_batch) not in in_model:
            continue  # DistributedDataParallel sends buffers and makes its buckets before the model runs
        written = _written(op)
        if op.step:
            again |= written
            continue
        made = {s for s in op.outputs if graph.storages[s].op == index}
        if not derived.isdisjoint(op.inputs) and not any(part in op.name for part in _READ_SHAPES):
            derived |= made | written
        for storage in made | written:
            if not (storage in trained and op.name.startswith(_IDEMPOTENT)):
                left[storage] = op
    return {
        storage: op
        for storage, op in left.items()
        if storage not in inputs
        and graph.storages[storage].category not in _OF_RANKS
        and (storage in derived or storage in again or _dies(graph, storage))
    }


def _reaching_backward(graph: StepGraph, left: dict[int, Op]) -> int | None:
    """Returns a storage in `left` from which values flow into the backward of the second step; None if there is none.

    Values flow from the tensors that an op reads to those that it writes.
    """
    origin = {storage: storage for storage in left}
    for op in graph.ops:
        if op.step == 0 or op.phase not in (Phase.FORWARD, Phase.BACKWARD):
            continue
        written = _written(op)
        if op.phase is Phase.FORWARD and op.name.startswith(_OVERWRITE):
            for storage in written:
                if _covers(graph, op, storage):
                    origin.pop(storage, None)
        read = op.inputs[:-2] if op.name in WRITE_STATISTICS else op.inputs
        found = next((origin[s] for s in read if s in origin and not (s in written and len(set(read)) == 1)), None)
        if found is None:
            continue
        if op.phase is Phase.BACKWARD:
            if "batch_norm" in op.name:  # takes running statistics, and uses them in evaluation mode only
                continue
            return found
        if not any(part in op.name for part in _READ_SHAPES):
            for storage in {*op.outputs, *written}:
                origin.setdefault(storage, found)
    return None


def _updated_further(graph: StepGraph, left: dict[int, Op]) -> int | None:
    """Returns a storage in `left` that the second forward updates with the batch or a trained parameter.

    The storage is updated in place, or it is freed after a new storage was computed from it. Returns None if there is
    no such storage.
    """
    trained = _trained(graph)
    origins = {storage: {storage} for storage in left}
    derived = trained | _inputs(graph)
    for op in graph.ops:
        if op.step == 0 or op.phase is not Phase.FORWARD or any(part in op.name for part in _READ_SHAPES):
            continue
        changed = {*op.outputs, *op.written}
        if op.name in WRITE_STATISTICS:
            changed |= set(op.inputs[-2:])
        read = set(op.inputs)
        if op.name.startswith(_OVERWRITE):
            read -= {storage for storage in op.written if _covers(graph, op, storage)}
            for storage in set(op.written) - read:
                origins.pop(storage, None)
        before = set().union(*(origins.get(storage, ()) for storage in read))
        for storage in changed - trained:
            if before:
                origins[storage] = origins.get(storage, set()) | before
            if not derived.isdisjoint(read):
                derived.add(storage)
    for storage, earlier in origins.items():
        if storage not in derived or storage in trained or _dies(graph, storage):
            continue
        for source in earlier:
            if source == storage or _dies(graph, source):
                return source
    return None


def _trained(graph: StepGraph) -> set[int]:
    updated = {s for op in graph.ops if op.phase is Phase.OPTIMIZER for s in _written(op)}
    return {s for s in updated if graph.storages[s].category is Category.PARAMETER}


def _inputs(graph: StepGraph) -> set[int]:
    return {s for s, storage in enumerate(graph.storages) if storage.category is Category.INPUT}


def _written(op: Op) -> set[int]:
    """Returns the storages that the op changes in place, except running statistics of a norm."""
    return set() if op.name in WRITE_STATISTICS else set(op.written)


def _covers(graph: StepGraph, op: Op, storage: int) -> bool:
    """True if the op writes the whole storage, and not only a part of it."""
    numel = math.prod(op.shapes[0]) if op.shapes else 0
    return bool(numel) and graph.storages[storage].size_bytes == numel * _ITEM_BYTES.get(op.dtype, 8)


def _dies(graph: StepGraph, storage: int) -> bool:
    """True if the storage is freed before the recording ends."""
    lives = graph.storages[storage].lives
    return bool(lives) and lives[-1][1] < graph.ticks
