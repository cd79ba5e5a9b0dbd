"""Simulates the memory of replays: which storages are alive while the ops of a segment run again.

A replay runs some ops of the segment in their order. `rewrite/portable/replay_tape.py` frees each storage after its
last use by these ops, and the simulation does the same.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from planner.recording.op_schema import WRITE_STATISTICS
from planner.recording.step_graph import StepGraph


@dataclasses.dataclass(frozen=True)
class Stage:
    """The ops of one part of a segment that a replay runs."""

    ops: Sequence[int]
    """Indices of the ops."""
    to_keep: Collection[int]
    """Storages that are not freed after their last use, because a later stage or backward reads them."""
    is_held: bool = False
    """True if the storages that are alive at the end of this stage are held for a later replay. Later stages do not
    free them."""


@dataclasses.dataclass(frozen=True)
class SegmentReplay:
    """One replay of a segment."""

    at: int
    """Tick of the recording at which it runs."""
    stages: Sequence[Stage]
    """The stages that run, in their order."""
    inputs: Collection[int]
    """Storages that an earlier replay held for this one. Each of them is freed after its last use."""


@dataclasses.dataclass(slots=True)
class Block:
    """A storage that is alive in a replay. The events of a replay, allocations and frees, are numbered from 0 on."""

    storage: int
    """Index of the storage in the recording. For running statistics, this block is a copy of it."""
    start: int
    """Number of the event that allocates it. The inputs of a replay are taken to be allocated first."""
    stop: int | None = None
    """Number of the event that frees it; None if it is alive after the replay."""


class ReplayMemory:
    """Simulates the memory of replays.

    Args:
        graph: a what-if recording with segments (`planner.recompute.segments.with_segments`).
        sizes: bytes of each storage.
    """

    def __init__(self, graph: StepGraph, sizes: Sequence[int]) -> None:
        self._graph, self._sizes = graph, sizes
        self._born: dict[int, list[int]] = defaultdict(list)
        made = [(s.lives[0][0], s.op, index) for index, s in enumerate(graph.storages) if s.op is not None and s.lives]
        for _, op, index in sorted(made):
            self._born[op].append(index)
        self.statistics = {
            number: tuple(storage for storage in op.inputs[-2:] if graph.storages[storage].op is None)
            for number, op in enumerate(graph.ops)
            if op.name in WRITE_STATISTICS
        }
        """Storages of the running statistics that a norm updates, by op. A replay updates copies of them, so that they
        are not updated twice."""

    def peak_bytes(self, replay: SegmentReplay) -> int:
        """Returns the largest number of bytes that a replay has alive at once."""
        sizes, alive, highest = self._sizes, 0, 0
        for born, copied, freed in self._changes(replay):
            for storage in born:
                alive += sizes[storage]
            highest = max(highest, alive + sum(sizes[storage] for storage in copied) if copied else alive)
            for storage in freed:
                alive -= sizes[storage]
        return highest

    def blocks(self, replay: SegmentReplay) -> list[Block]:
        """Returns the storages that are alive in a replay, in the order of their allocations."""
        blocks: list[Block] = []
        alive: dict[int, Block] = {}
        position = 0
        for born, copied, freed in self._changes(replay):
            for storage in born:
                alive[storage] = Block(storage, position)
                blocks.append(alive[storage])
                position += 1
            if copied:
                blocks += (Block(storage, position, position + 1) for storage in copied)
                position += 1
            for storage in freed:
                alive.pop(storage).stop = position
                position += 1
        return blocks

    def _changes(self, replay: SegmentReplay) -> Iterator[tuple[Collection[int], Collection[int], Collection[int]]]:
        """Yields (allocated, copied, freed): storages that are allocated, copied, and then freed with their copies.

        The first item has the inputs as allocated. After it, there is one item for each op, and at the beginning of
        each later stage one with the storages that this stage does not need.
        """
        values = set(replay.inputs)
        for number, stage in enumerate(replay.stages):
            touched = {op: (*self._graph.ops[op].inputs, *self._graph.ops[op].outputs) for op in stage.ops}
            last_use = {storage: op for op in stage.ops for storage in touched[op]}
            unused = {storage for storage in values if storage not in last_use and storage not in stage.to_keep}
            values -= unused
            yield (tuple(values), (), ()) if number == 0 else ((), (), unused)
            for op in stage.ops:
                born = [storage for storage in self._born[op] if storage not in values]
                values.update(born)
                freed = [
                    storage
                    for storage in {*touched[op], *born} & values
                    if last_use.get(storage, op) == op and storage not in stage.to_keep
                ]
                values.difference_update(freed)
                yield born, self.statistics.get(op, ()), freed
            if stage.is_held:
                values = set()
