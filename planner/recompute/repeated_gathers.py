"""Finds the gathers that a step of FSDP2 repeats: a unit that stays gathered between forward and backward needs none.

FSDP2 gathers the parameters of a unit before its forward, frees them after it, and gathers them again before its
backward (`reshard_after_forward`). The planner records a step in which every unit does so. A unit that stays gathered
changes the memory in two ways, whatever the other units do: its parameters are alive between forward and backward, and
the buffers of the second gather do not exist. So each unit is one more unit of the checkpoint problem. If the search
selects it, the unit is gathered again.

The time is not additive, because gathers overlap with computation. The difference between the step in which all units
are gathered again and the step in which none is, is divided among the units in proportion to the bytes that they
gather.

Source: torch/distributed/fsdp/_fully_shard, `FSDPParamGroup.unshard` and `foreach_all_gather`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Sequence

from planner.plan_types.categories import Category
from planner.recording.step_graph import Op, StepGraph

_COPY_IN, _COPY_OUT = "fsdp.all_gather_copy_in.default", "fsdp.split_with_sizes_copy.default"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepeatedGathers:
    """The gathers of one unit that a step repeats."""

    unit: str
    """Path of the unit."""
    gaps: tuple[tuple[int, int, int], ...]
    """(storage, first tick, tick after the last) of each time for which gathered parameters are freed in between."""
    buffers: frozenset[int]
    """Storages of the buffers of the repeated gathers."""
    ops: frozenset[int]
    """Indices of the ops of the repeated gathers."""
    sent_bytes: int
    """Size of all that is gathered again."""


def repeated_gathers(graph: StepGraph, units: Sequence[str]) -> tuple[RepeatedGathers, ...]:
    """Returns the repeated gathers of each unit that has some, in the order of `units`.

    Args:
        graph: a what-if recording of a step in which FSDP2 frees the parameters of these units after their forward.
        units: paths of the units.
    """
    if not units:
        return ()
    touching: dict[int, list[int]] = defaultdict(list)  # by buffer: indices of the ops that use it
    for index, op in enumerate(graph.ops):
        for storage in {*op.inputs, *op.outputs, *op.written}:
            if graph.storages[storage].category is Category.COMMUNICATION:
                touching[storage].append(index)
    gaps: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    buffers: dict[str, set[int]] = defaultdict(set)
    seen: set[tuple[int, str]] = set()  # micro-batches and units that have been gathered
    copied_in: dict[int, Op] = {}  # by buffer: the op that copies the shards into it
    for op in graph.ops:
        if op.name == _COPY_IN:
            copied_in.update(dict.fromkeys(op.outputs, op))
        if op.name != _COPY_OUT:
            continue
        buffer = next((storage for storage in op.inputs if storage in copied_in), None)
        if buffer is None:
            continue
        used = {s for s in copied_in[buffer].inputs if graph.storages[s].category is Category.COMMUNICATION}
        read = {s for used_by in used for index in touching[used_by] for s in graph.ops[index].inputs}
        names = [graph.storages[storage].name for storage in read]
        unit = next((unit for unit in units if any(name.startswith(f"{unit}.") for name in names)), None)
        if unit is None:
            continue
        if (op.micro_batch, unit) not in seen:
            seen.add((op.micro_batch, unit))
            continue
        # A parameter that is not divided along its first dimension is copied once more, from a buffer of its own.
        more = {storage for storage in op.written if graph.storages[storage].category is Category.COMMUNICATION}
        copies = [graph.ops[index] for buffer in more for index in touching[buffer]]
        buffers[unit] |= used | more
        for storage in sorted({storage for copy in (op, *copies) for storage in (*copy.inputs, *copy.outputs)}):
            if graph.storages[storage].category is Category.UNSHARDED:
                gaps[unit] += _gap_before(graph, storage, op.tick)
    found = []
    for unit in units:
        if unit not in gaps:
            continue
        ops = frozenset(index for buffer in buffers[unit] for index in touching[buffer])
        collectives = (graph.ops[index].collective for index in ops)
        found.append(
            RepeatedGathers(
                unit=unit,
                gaps=tuple(sorted(set(gaps[unit]))),
                buffers=frozenset(buffers[unit]),
                ops=ops,
                sent_bytes=sum(collective.size_bytes for collective in collectives if collective is not None),
            )
        )
    return tuple(found)


def gathered_once(graph: StepGraph, gathers: Sequence[RepeatedGathers]) -> StepGraph:
    """Returns the recording as if all units stayed gathered between forward and backward."""
    if not gathers:
        return graph
    storages, ops = list(graph.storages), list(graph.ops)
    for unit in gathers:
        for storage in unit.buffers:
            storages[storage] = dataclasses.replace(storages[storage], lives=[])
        for storage, start, stop in unit.gaps:
            lives = [*storages[storage].lives, (start, stop)]
            storages[storage] = dataclasses.replace(storages[storage], lives=lives)
        for op in unit.ops:
            ops[op] = dataclasses.replace(ops[op], flops=0, moved_bytes=0, host_bytes=0, is_view=True, collective=None)
    return dataclasses.replace(graph, storages=storages, ops=ops)


def _gap_before(graph: StepGraph, storage: int, tick: int) -> list[tuple[int, int, int]]:
    """Returns the time in which a storage is free before the life that contains `tick`; empty if it is not free."""
    lives = sorted(graph.storages[storage].lives)
    for (_, freed), (born, died) in itertools.pairwise(lives):
        if born <= tick < died:
            return [(storage, freed, born)] if freed < born else []
    return []
