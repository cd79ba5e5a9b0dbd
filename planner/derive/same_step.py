"""Compares the recordings of two steps, event by event.

It shows whether a recording that was derived from another one is right. It compares what the search reads of a step
before its update: the memory curve, the ops with their kernels and costs, the storages, the saves and the calls of
modules.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from planner.recording.step_graph import Category, Op, StepGraph, Storage


def is_same_step(graph: StepGraph | None, other: StepGraph) -> bool:
    """True if the last steps of both recordings have the same events, from the first op of the forward to the update.

    Ticks are compared relative to that op, because what comes before it, such as the creation of optimizer state, may
    differ. Storages are compared by size, category, name, shape, stream and lifetime, and not by index. Workspaces are
    ignored, because they are added after the recording. False if `graph` is None.

    Args:
        graph, other: recordings. If one has no `update_tick`, all of its last step is compared.
    """
    if graph is None:
        return False
    pairs = itertools.zip_longest(_Step(graph).events(), _Step(other).events())  # no list of all events
    return all(event == expected for event, expected in pairs)


class _Step:
    """The last step of a recording, with ticks relative to the first op of its forward."""

    def __init__(self, graph: StepGraph) -> None:
        begin, self._end = graph.step_starts[-1], graph.before_update_end
        self._graph = graph
        self._ops = [op for op in graph.ops if begin < op.tick < self._end]
        self._start = self._ops[0].tick if self._ops else self._end
        self._calls = [call for call in graph.calls if call.start > begin]
        self._earlier_calls = len(graph.calls) - len(self._calls)
        self._storages = [self._storage(storage) for storage in graph.storages]

    def events(self) -> Iterator[object]:
        """Yields the bytes alive at each tick, module types and trained parameters, then each op, save and call."""
        yield self._live_bytes()
        yield self._graph.module_types
        yield sorted(self._graph.trained)
        yield from map(self._op, self._ops)
        for save in self._graph.saves:
            storage = None if save.storage is None else self._storages[save.storage]
            yield storage, *[self._at(tick) for tick in (save.pack, save.unpack, save.release, save.again)]
        for call in self._calls:
            used = [[self._storages[index] for index in indices] for indices in (call.inputs, call.made_inputs)]
            times = self._at(call.start), self._at(call.end)
            yield call.module, *times, self._call(call.parent), call.obstacle, call.has_hooks, *used

    def _live_bytes(self) -> list[int]:
        storages = [
            storage if storage.category is not Category.WORKSPACE else dataclasses.replace(storage, lives=[])
            for storage in self._graph.storages
        ]
        return dataclasses.replace(self._graph, storages=storages).live_bytes()[self._start : self._end].tolist()

    def _at(self, tick: int | None) -> int | None:
        """Returns a tick relative to the start of the forward: 0 for earlier ticks, the update's for later ones."""
        return None if tick is None else min(max(tick, self._start), self._end) - self._start

    def _call(self, call: int | None) -> int | None:
        return None if call is None else call - self._earlier_calls

    def _op(self, op: Op) -> tuple[object, ...]:
        forward_op = None if op.forward_op is None else self._at(self._graph.ops[op.forward_op].tick)
        used = [[self._storages[index] for index in indices] for indices in (op.inputs, op.outputs, op.written)]
        costs = op.flops, op.moved_bytes, op.host_bytes
        rest = op.shapes, op.kernel, op.collective, op.draws_random_numbers, op.micro_batch, costs
        return op.name, op.phase, self._at(op.tick), op.module, self._call(op.call), op.dtype, forward_op, used, *rest

    def _storage(self, storage: Storage) -> tuple[object, ...]:
        lives = [(self._at(birth), self._at(death)) for birth, death in storage.lives if death > self._start]
        return storage.size_bytes, storage.category, storage.name, storage.shape, storage.stream, lives
