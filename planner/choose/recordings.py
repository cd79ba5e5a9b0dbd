"""What-if recordings on demand. Each is recorded once, in a child process; small recordings predict larger ones.

A split into many micro-batches needs no recording of its own: recordings with two micro-batches of two sizes are
extrapolated to the size asked for. A configuration with another optimizer needs no recording of the whole step either:
a recording of its update alone is grafted onto the step, unless the update is part of the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from planner.plan_types.decision_base import Decision, Role, has_role, without_roles
from planner.recording.extrapolate import BASE_SIZES, extrapolate
from planner.recording.graft_optimizer import can_be_grafted, graft_update
from planner.recording.step_graph import StepGraph
from planner.space.micro_batches import MicroBatching
from planner.virtual_gpu.forked_process import Child

Start = Callable[[tuple[Decision, ...], tuple[int, ...]], Child]
"""Starts a what-if rehearsal under these decisions with these micro-batch sizes."""

StartUpdate = Callable[[tuple[Decision, ...]], Child]
"""Starts a rehearsal of the update alone under these decisions."""

_Key = tuple[tuple[Decision, ...], tuple[int, ...]]
"""Decisions and micro-batch sizes. Without sizes, the recording is that of the update alone."""


class Recordings:
    """What-if recordings of a workload, by configuration and split."""

    def __init__(self, start: Start, start_update: StartUpdate, finish: Callable[[StepGraph], StepGraph]) -> None:
        """
        Args:
            finish: adds the workspaces of kernels, which a recording does not contain.
        """
        self._start, self._start_update = start, start_update
        self._finish = finish
        self._finished: dict[_Key, StepGraph] = {}
        self._recorded: dict[_Key, StepGraph] = {}
        self._running: dict[_Key, Child] = {}
        self._irregular: set[tuple[Decision, ...]] = set()
        """Configurations whose recordings cannot be extrapolated."""

    def prefetch(self, config: tuple[Decision, ...], splits: Iterable[MicroBatching]) -> None:
        """Start the recordings that `of()` will need for these splits."""
        splits = tuple(splits)
        if any(split.micro_batches == 1 for split in splits):
            self._prefetch((config, (max(s.size for s in splits if s.micro_batches == 1),)))
        if any(split.micro_batches > 1 and split.size >= BASE_SIZES[0] for split in splits):
            for size in BASE_SIZES:
                self._prefetch(_accumulated(config, size))
        elif any(split.micro_batches > 1 for split in splits):
            self._prefetch(_accumulated(config, 1))

    def of(self, config: tuple[Decision, ...], split: MicroBatching) -> StepGraph:
        """The recording for a split: the whole batch, two unequal parts, or two equal parts that represent all."""
        if split.micro_batches == 1:
            return self._get((config, (split.size,)))
        if split.last is not None:
            return self._get(_accumulated(config, split.size, split.last))
        if split.size >= BASE_SIZES[0] and config not in self._irregular:
            two, three = (self._get(_accumulated(config, size)) for size in BASE_SIZES)
            predicted = extrapolate(two, three, split.size)
            if predicted is not None:
                return predicted
            self._irregular.add(config)
        return self._get(_accumulated(config, split.size))

    def close(self) -> None:
        """End the recordings that are still running."""
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


def _accumulated(config: tuple[Decision, ...], size: int, last: int | None = None) -> _Key:
    """Returns the key of a recording with two micro-batches. Later micro-batches repeat the second one."""
    return (*config, *MicroBatching(micro_batches=2, size=size).decisions()), (size, last or size)


def _parts(key: _Key) -> tuple[_Key, _Key | None]:
    """The two recordings of a configuration: the step with the baseline's optimizer, and the update that replaces it.

    The second is None if the update does not differ from the baseline's, or is part of the backward.
    """
    decisions, sizes = key
    if not has_role(decisions, Role.OPTIMIZER) or any(decision.steps_in_backward for decision in decisions):
        return key, None
    step = without_roles(decisions, Role.OPTIMIZER), sizes
    return step, (without_roles(decisions, Role.MICRO_BATCHING, Role.LOSS), ())
