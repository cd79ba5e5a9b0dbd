"""Compares the recordings of two steps, event by event.

It is used to find out whether a recording that was derived from another one is right. So it compares all that the
search reads: the memory curve, the ops with their kernels, the storages, the saves and the calls of modules.
"""

from __future__ import annotations

from planner.recording.step_graph import Op, Phase, StepGraph


def is_same_step(graph: StepGraph | None, other: StepGraph) -> bool:
    """True if both recordings have the same events, from the first op of the forward to the update.

    Ticks are compared relative to that op, because what comes before it, such as the creation of optimizer state, may
    differ. The numbers of storages are not compared either, but what the storages are. False if `graph` is None.

    Args:
        graph, other: recordings of one step. Both have an `update_tick`.
    """
    return graph is not None and _Step(graph).events() == _Step(other).events()


class _Step:
    """A recording whose ticks are relative to the first op of the forward."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph, self._end = graph, graph.update_tick or 0
        self._ops = [op for op in graph.ops if op.phase is not Phase.SETUP and op.tick < self._end]
        self._start = self._ops[0].tick if self._ops else self._end
        self._storages = [self._storage(index) for index in range(len(graph.storages))]

    def events(self) -> tuple[object, ...]:
        graph, at = self._graph, self._at
        return (
            graph.live_bytes()[self._start : self._end].tolist(),
            [self._op(op) for op in self._ops],
            [
                (
                    None if save.storage is None else self._storages[save.storage],
                    *[at(tick) for tick in (save.pack, save.unpack, save.release, save.again)],
                )
                for save in graph.saves
            ],
            [
                (
                    call.module,
                    at(call.start),
                    at(call.end),
                    call.parent,
                    call.obstacle,
                    call.has_hooks,
                    *[[self._storages[index] for index in indices] for indices in (call.inputs, call.made_inputs)],
                )
                for call in graph.calls
            ],
            graph.module_types,
            sorted(graph.trained),
        )

    def _at(self, tick: int | None) -> int | None:
        """Returns a tick relative to the start of the forward: 0 for earlier ticks, the update's for later ones."""
        return None if tick is None else min(max(tick, self._start), self._end) - self._start

    def _op(self, op: Op) -> tuple[object, ...]:
        forward_op = None if op.forward_op is None else self._at(self._graph.ops[op.forward_op].tick)
        used = [[self._storages[index] for index in indices] for indices in (op.inputs, op.outputs, op.written)]
        rest = op.shapes, op.kernel, op.collective, op.draws_random_numbers, op.micro_batch
        return op.name, op.phase, self._at(op.tick), op.module, op.call, op.dtype, forward_op, used, *rest

    def _storage(self, index: int) -> tuple[object, ...]:
        storage = self._graph.storages[index]
        lives = [(self._at(birth), self._at(death)) for birth, death in storage.lives]
        return storage.size_bytes, storage.category, storage.name, storage.shape, storage.stream, lives
