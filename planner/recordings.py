"""Recordings on demand: each is made once, two children at a time; small ones predict the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from planner.child import Child
from planner.decisions import Accumulation, Decision
from planner.options import Split
from planner.scaling import BASE_SIZES, extrapolate
from planner.step_graph import StepGraph

Start = Callable[[tuple[Decision, ...], tuple[int, ...]], Child]
"""Begin a what-if rehearsal under these decisions with these micro-batch sizes."""

_Key = tuple[tuple[Decision, ...], tuple[int, ...]]


class Recordings:
    """What-if recordings of a workload under outer choices, by choice and split."""

    def __init__(self, start: Start, finish: Callable[[StepGraph], StepGraph]) -> None:
        self._start = start
        self._finish = finish
        """Adds what a recording cannot show (workspaces)."""
        self._graphs: dict[_Key, StepGraph] = {}
        self._running: dict[_Key, Child] = {}
        self._irregular: set[tuple[Decision, ...]] = set()
        self.made = 0

    def prefetch(self, choice: tuple[Decision, ...], splits: Iterable[Split]) -> None:
        """Begin the recordings that `of` will need for these splits."""
        splits = tuple(splits)
        if any(split.micro_batches == 1 for split in splits):
            self._begin((choice, (max(s.size for s in splits if s.micro_batches == 1),)))
        if any(split.micro_batches > 1 and split.size >= BASE_SIZES[0] for split in splits):
            for size in BASE_SIZES:
                self._begin(self._accumulated(choice, size))

    def of(self, choice: tuple[Decision, ...], split: Split) -> StepGraph:
        """The recording for a split: of the whole batch, or of two micro-batches that stand for all."""
        if split.micro_batches == 1:
            return self._get((choice, (split.size,)))
        if split.size >= BASE_SIZES[0] and choice not in self._irregular:
            two, three = (self._get(self._accumulated(choice, size)) for size in BASE_SIZES)
            predicted = extrapolate(two, three, split.size)
            if predicted is not None:
                return predicted
            self._irregular.add(choice)
        return self._get(self._accumulated(choice, split.size))

    def _accumulated(self, choice: tuple[Decision, ...], size: int) -> _Key:
        return (*choice, Accumulation(micro_batch_size=size, micro_batches=2)), (size, size)

    def _begin(self, key: _Key) -> None:
        if key not in self._graphs and key not in self._running:
            self._running[key] = self._start(*key)
            self.made += 1

    def _get(self, key: _Key) -> StepGraph:
        if key not in self._graphs:
            self._begin(key)
            self._graphs[key] = self._finish(self._running.pop(key).result())
        return self._graphs[key]

    def close(self) -> None:
        """End children whose recordings nobody asked for."""
        for child in self._running.values():
            child.end()
        self._running.clear()
