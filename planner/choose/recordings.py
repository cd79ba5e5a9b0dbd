"""Recordings on demand: each is made once, two children at a time; small ones predict the others.

Another optimizer needs no recording of the whole step, only one of its update, unless that is part of the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from planner.plan_types.decisions import Accumulation, ChunkedLoss, Decision, Optimizer, OptimizerKernel, StepInBackward
from planner.recording.extrapolate import BASE_SIZES, extrapolate
from planner.recording.graft_optimizer import can_be_grafted, graft_update
from planner.recording.step_graph import StepGraph
from planner.space.micro_batches import MicroBatching
from planner.virtual_gpu.forked_process import Child

Start = Callable[[tuple[Decision, ...], tuple[int, ...]], Child]
"""Begin a what-if rehearsal under these decisions with these micro-batch sizes."""

StartUpdate = Callable[[tuple[Decision, ...]], Child]
"""Begin to rehearse the update alone under these decisions."""

_Key = tuple[tuple[Decision, ...], tuple[int, ...]]
"""Decisions and micro-batch sizes; no sizes: the update alone."""


_UPDATES = (Optimizer, OptimizerKernel)
"""Decisions that change nothing but the update."""


class Recordings:
    """What-if recordings of a workload under outer choices, by choice and split."""

    def __init__(self, start: Start, start_update: StartUpdate, finish: Callable[[StepGraph], StepGraph]) -> None:
        self._start, self._start_update = start, start_update
        self._finish = finish
        """Adds what a recording cannot show (workspaces)."""
        self._finished: dict[_Key, StepGraph] = {}
        self._recorded: dict[_Key, StepGraph] = {}
        self._running: dict[_Key, Child] = {}
        self._irregular: set[tuple[Decision, ...]] = set()

    def prefetch(self, choice: tuple[Decision, ...], splits: Iterable[MicroBatching]) -> None:
        """Begin the recordings that `of` will need for these splits."""
        splits = tuple(splits)
        if any(split.micro_batches == 1 for split in splits):
            self._prefetch((choice, (max(s.size for s in splits if s.micro_batches == 1),)))
        if any(split.micro_batches > 1 and split.size >= BASE_SIZES[0] for split in splits):
            for size in BASE_SIZES:
                self._prefetch(_accumulated(choice, size))
        elif any(split.micro_batches > 1 for split in splits):
            self._prefetch(_accumulated(choice, 1))

    def of(self, choice: tuple[Decision, ...], split: MicroBatching) -> StepGraph:
        """The recording for a split: of the whole batch, of its two unlike parts, or of two that stand for all."""
        if split.micro_batches == 1:
            return self._get((choice, (split.size,)))
        if split.last is not None:
            return self._get(_accumulated(choice, split.size, split.last))
        if split.size >= BASE_SIZES[0] and choice not in self._irregular:
            two, three = (self._get(_accumulated(choice, size)) for size in BASE_SIZES)
            predicted = extrapolate(two, three, split.size)
            if predicted is not None:
                return predicted
            self._irregular.add(choice)
        return self._get(_accumulated(choice, split.size))

    def close(self) -> None:
        """End children whose recordings nobody asked for."""
        for child in self._running.values():
            child.end()
        self._running.clear()

    def _prefetch(self, key: _Key) -> None:
        step, update = _parts(key)
        if step in self._recorded and not can_be_grafted(self._recorded[step]):
            step, update = key, None
        for part in (step, update):
            if part is not None:
                self._begin(part)

    def _get(self, key: _Key) -> StepGraph:
        if key not in self._finished:
            step, update = _parts(key)
            graph = self._result(step)
            if update is not None:
                graph = graft_update(graph, self._result(update)) if can_be_grafted(graph) else self._result(key)
            self._finished[key] = self._finish(graph)
        return self._finished[key]

    def _begin(self, part: _Key) -> None:
        if part not in self._recorded and part not in self._running:
            self._running[part] = self._start(*part) if part[1] else self._start_update(part[0])

    def _result(self, part: _Key) -> StepGraph:
        if part not in self._recorded:
            self._begin(part)
            self._recorded[part] = self._running.pop(part).result()
        return self._recorded[part]


def _accumulated(choice: tuple[Decision, ...], size: int, last: int | None = None) -> _Key:
    return (*choice, Accumulation(micro_batch_size=size, micro_batches=2)), (size, last or size)


def _parts(key: _Key) -> tuple[_Key, _Key | None]:
    """What to record: the step with the optimizer as it is, and the update that takes the place of its own."""
    decisions, sizes = key
    kinds = {type(decision) for decision in decisions}
    if kinds.isdisjoint(_UPDATES) or StepInBackward in kinds:
        return key, None
    as_it_is = tuple(decision for decision in decisions if not isinstance(decision, _UPDATES))
    return (as_it_is, sizes), (tuple(d for d in decisions if not isinstance(d, (Accumulation, ChunkedLoss))), ())
