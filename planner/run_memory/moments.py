"""Converts recordings to moments: what the allocator receives in one training step, or in one activity between steps.

If a step of the user's own repeats only after several calls, a moment is such a round of calls (`in_rounds`).

A run is a sequence of moments. Storages that are born in one moment and die in a later one, such as a loss that a
variable holds until the next step replaces it, connect them. Each such storage is in a *slot*. A slot is recognized in
all recordings by the kind of its storage: category, name, op, dtype, and number among those that are alike.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np

from planner.estimate.allocation_stream import allocation_stream
from planner.plan_types.categories import Category
from planner.recording.step_graph import StepGraph, Storage

RELEASE = -1
"""Stands for the number of a block in an event that releases the cache: all segments without an allocated block."""
FIRST_LOCAL = 1 << 32
"""Numbers of blocks from here on belong to blocks that are allocated in the moment; smaller numbers are slots."""


@dataclasses.dataclass(frozen=True, eq=False)
class Events:
    """Requests that the allocator receives in one moment. Two objects are equal only if they are the same object."""

    stream: tuple[tuple[int, int], ...]
    """Number of a block, and its size in bytes to allocate it, or 0 to free it. Freeing an empty slot has no effect.
    `(RELEASE, 0)` releases the cache, as `torch.cuda.empty_cache` does."""
    leaves: tuple[tuple[int, int], ...]
    """Blocks of the moment that it leaves allocated in a slot, as (number of the block, slot)."""

    @property
    def peak_bytes(self) -> int:
        """Maximum of the bytes of the blocks that the moment allocates."""
        sizes = {number: size_bytes for number, size_bytes in self.stream if size_bytes}
        live = itertools.accumulate(size_bytes or -sizes.get(number, 0) for number, size_bytes in self.stream)
        return max(live, default=0)

    def part(self, numbers: set[int]) -> Events:
        """Returns the events of the blocks that the moment allocates with these numbers, and of all slots."""
        return Events(
            tuple(event for event in self.stream if event[0] < FIRST_LOCAL or event[0] in numbers),
            tuple(pair for pair in self.leaves if pair[0] in numbers),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Moment:
    """A training step, or an activity between steps."""

    name: str
    first: tuple[Events, ...]
    """Events if it happens for the first time in the run: optimizers create their state, for example."""
    again: tuple[Events, ...]
    """Events of all later times. The arrival of the batch is separate: where it is placed depends on the batch before,
    and from the same place the step itself is always the same."""
    peak_bytes: int
    """Maximum of the bytes of all storages while it happens, each rounded up to the allocator's granularity."""


class Slots:
    """The numbers of the slots. Moments of one run share them."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}

    def number(self, *kind: object) -> int:
        """Returns the number of the slot of this kind."""
        return self._numbers.setdefault(kind, len(self._numbers))


def moments_of(
    graph: StepGraph, names: Sequence[str], slots: Slots, *, granularity_bytes: int
) -> tuple[tuple[Events, ...], dict[str, Moment]]:
    """Returns the events of the setup, such as loading the weights, and the moments of a recording by name.

    The batch arrives at the beginning of a training step, which is the first moment. The batch before it is freed
    then: a loop such as `for batch in loader` holds a batch until it has the next one.

    Args:
        graph: a plain recording whose steps are the moments, each of them twice in succession or more often.
        names: name of the moment of each step of the recording.
        granularity_bytes: multiple to which the allocator rounds sizes up.

    Raises:
        ValueError: the recording has another number of steps than `names`, or a moment is in it only once.
    """
    if len(graph.step_starts) != len(names) or min(Counter(names).values()) < 2:
        raise ValueError("each moment must be recorded twice or more often")
    inputs = [storage for storage in graph.storages if _is_batch(storage, graph)]
    without_inputs = [storage for storage in graph.storages if not _is_batch(storage, graph)]
    windows = _Windows(dataclasses.replace(graph, storages=without_inputs), names, slots)
    live = graph.live_bytes(granularity_bytes=granularity_bytes)
    moments: dict[str, Moment] = {}
    for name in dict.fromkeys(names):
        numbers = [number for number, other in enumerate(names, start=1) if other == name]
        arrival = (_arrival(inputs, slots),) if inputs and name == names[0] else ()
        first, again = ((*arrival, windows.events(number)) for number in (numbers[0], numbers[-1]))
        peak_bytes = max(int(live[start : stop + 1].max()) for start, stop in map(windows.bounds, numbers))
        moments[name] = Moment(name, first, again, peak_bytes)
    return (windows.events(0),), moments


def in_rounds(graph: StepGraph) -> StepGraph:
    """Returns a recording whose calls of the training step are two moments: those before they repeat, and one round.

    A step of the user's own may repeat only after several calls. A round is as many calls as later calls repeat.
    """
    steps, starts = graph.steps, graph.step_starts
    first, again = starts[0], starts[steps - graph.schedule.period]
    return dataclasses.replace(graph, step_starts=(first, again, *starts[steps:]))


def _is_batch(storage: Storage, graph: StepGraph) -> bool:
    """True if the storage belongs to the batch, which is on the card during the whole recording."""
    starts_early = bool(storage.lives) and storage.lives[0][0] <= graph.step_starts[0]
    return storage.category is Category.INPUT and starts_early and storage.lives[-1][1] >= graph.ticks


def _arrival(inputs: Sequence[Storage], slots: Slots) -> Events:
    """Returns the events with which a batch replaces the one before it."""
    numbers = [slots.number("batch", index) for index in range(len(inputs))]
    arrivals = [(FIRST_LOCAL + index, storage.size_bytes) for index, storage in enumerate(inputs)]
    return Events(
        (*arrivals, *((number, 0) for number in numbers)),
        tuple(zip((block for block, _ in arrivals), numbers, strict=True)),
    )


class _Windows:
    """The events of a recording by window: window 0 is the setup, and window i the i-th step, counted from 1."""

    def __init__(self, graph: StepGraph, names: Sequence[str], slots: Slots) -> None:
        self._graph, self._names, self._slots = graph, names, slots
        releases = [(RELEASE, 0, tick) for tick in graph.cache_releases]
        requests = zip(*(column.tolist() for column in allocation_stream(graph)), strict=True)
        # Each release has a tick of its own.
        events = sorted((*requests, *releases), key=lambda event: event[2]) if releases else [*requests]
        self._stream = [(block, size_bytes) for block, size_bytes, _ in events]
        ticks = [tick for _, _, tick in events]
        self._window = np.searchsorted(np.array(graph.step_starts), ticks, side="left").tolist()
        spans = graph.spans()
        self._storage = [index for index, lives in enumerate(spans) for _ in lives]
        self._born: dict[int, int] = {}
        self._dies: dict[int, int] = {}
        for (block, size_bytes), window in zip(self._stream, self._window, strict=True):
            (self._born if size_bytes else self._dies)[block] = window
        self._slot = self._slots_of_blocks()

    def bounds(self, window: int) -> tuple[int, int]:
        """Returns the last tick before a window, and its last tick."""
        edges = (0, *self._graph.step_starts, self._graph.ticks - 1)
        return edges[window], edges[window + 1]

    def events(self, window: int) -> Events:
        stream = []
        for (block, size_bytes), its_window in zip(self._stream, self._window, strict=True):
            if its_window != window:
                continue
            if block == RELEASE:
                stream.append((RELEASE, 0))
                continue
            is_local = size_bytes or self._born[block] == window
            stream.append((FIRST_LOCAL + block if is_local else self._slot[block], size_bytes))
        leaves = ((FIRST_LOCAL + block, slot) for block, slot in self._slot.items() if self._born[block] == window)
        return Events(tuple(stream), tuple(leaves))

    def _slots_of_blocks(self) -> dict[int, int]:
        """Returns the slot of each block that outlives its window and dies in a later one, now or in the next round.

        Blocks that the last round of a moment leaves allocated are in the slots of those that its first round left.
        """
        left: dict[tuple[int, tuple[object, ...]], list[int]] = {}
        for block in sorted(self._born):
            window = self._born[block]
            if self._dies.get(block) != window:
                left.setdefault((window, self._kind(block)), []).append(block)
        rounds = {name: [n for n, other in enumerate(self._names, start=1) if other == name] for name in self._names}
        slot: dict[int, int] = {}
        for (window, kind), blocks in left.items():
            dying = [block for block in blocks if block in self._dies]
            if window and rounds[self._names[window - 1]][-1] == window:
                first = left.get((rounds[self._names[window - 1]][0], kind), [])
                dying = self._dying(blocks, first)
            for number, block in enumerate(dying):
                slot[block] = self._slots.number(*kind, number)
        return slot

    def _dying(self, blocks: Sequence[int], first: Sequence[int]) -> list[int]:
        """Returns the blocks that die in a later round: all but entries of a growing list, for example.

        Args:
            blocks: what the last round of a moment leaves allocated, of one kind.
            first: what its first round left, of the same kind. It may start with what is made only once.
        """
        if len(blocks) <= sum(block in self._dies for block in first):
            return list(blocks)
        counterparts = dict(zip(reversed(blocks), reversed(first), strict=False))
        stay = {block for block, other in counterparts.items() if other not in self._dies}
        return [block for block in blocks if block in self._dies or block not in stay]

    def _kind(self, block: int) -> tuple[object, ...]:
        storage, window = self._graph.storages[self._storage[block]], self._born[block]
        op = None if storage.op is None else self._graph.ops[storage.op].name
        name = self._names[window - 1] if window else "setup"
        return name, storage.category, storage.name, op, storage.dtype
