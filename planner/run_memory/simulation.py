"""Simulates the caching allocator during a run: a long sequence of moments, most of which repeat.

From the same state, the same moment always leads to the same state. Each such transition is simulated once, so that the
time depends on the number of different transitions, and not on the length of the run. Small and large requests are
served from different pools, and influence each other only if the memory of the card runs out. Without a limit the two
pools are simulated one after the other, which makes the states fewer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from planner.allocator.blocks import Block, Placement
from planner.allocator.caching_allocator import CachingAllocator, OutOfMemory
from planner.allocator.settings import LARGEST_SMALL_BYTES, AllocatorSettings, round_size
from planner.allocator.state import AllocatorState, capture, restore
from planner.profiles.device import SEGMENT_ADDRESSES, DeviceProfile
from planner.run_memory.moments import FIRST_LOCAL, Events

_STEPS_BETWEEN_REPORTS = 256
"""Number of moments after which progress is reported."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """Memory that the allocator reserves during a run."""

    peaks: tuple[int, ...]
    """For each moment, the maximum of the bytes that are reserved while it happens."""
    retries: tuple[int, ...]
    """For each moment, the number of requests for which all free segments were released, which makes it slow."""
    out_of_memory: int | None
    """Number of the moment in which a request did not fit, where the simulation stops; None if all of them fit."""

    @property
    def peak_bytes(self) -> int:
        """Maximum of the bytes that are reserved during the run."""
        return max(self.peaks)

    @property
    def settled(self) -> int:
        """Number of the moment in which `peak_bytes` was first reached."""
        return self.peaks.index(self.peak_bytes)


def simulate(
    run: Sequence[tuple[Events, ...]],
    settings: AllocatorSettings,
    card: DeviceProfile,
    capacity_bytes: int | None,
    *,
    tick: Callable[[int], None] = lambda done: None,
) -> RunOutcome:
    """Returns the outcome of a run, for the order of addresses that the card's driver gives to segments.

    If the order is not known, it is the worst outcome: one that runs out of memory, or the one that reserves most.

    Args:
        run: the setup, followed by the events of all moments.
        capacity_bytes: maximum number of bytes that the allocator may reserve; None for no limit.
        tick: called now and then with the number of moments that were simulated. It may raise to end the simulation.
    """
    outcomes = []
    for descending in SEGMENT_ADDRESSES[card.segment_addresses]:
        outcome = _joined(
            [
                _Pools(settings, card.vram_bytes, None, descending=descending).run(events, tick)
                for events in _small_and_large(run, settings)
            ]
        )
        if capacity_bytes is not None and outcome.peak_bytes > capacity_bytes:
            outcome = _Pools(settings, card.vram_bytes, capacity_bytes, descending=descending).run(run, tick)
        outcomes.append(outcome)
    return max(outcomes, key=lambda outcome: (outcome.out_of_memory is not None, outcome.peak_bytes))


def _small_and_large(
    run: Sequence[tuple[Events, ...]], settings: AllocatorSettings
) -> list[list[tuple[Events, ...]]]:
    """Returns the run with the small requests only, and with the large ones only."""

    def halves(events: Events) -> tuple[Events, Events]:
        sizes = {number: size_bytes for number, size_bytes in events.stream if size_bytes}
        small = {number for number, size in sizes.items() if round_size(size, settings) <= LARGEST_SMALL_BYTES}
        return events.part(small), events.part(set(sizes) - small)

    known = {moment: tuple(zip(*map(halves, moment), strict=True)) for moment in dict.fromkeys(run)}
    return [[known[moment][side] for moment in run] for side in (0, 1)]


def _joined(parts: Sequence[RunOutcome]) -> RunOutcome:
    """Returns the outcome of several pools together, whose memory is never released."""
    return RunOutcome(
        peaks=tuple(map(sum, zip(*(part.peaks for part in parts), strict=True))),
        retries=tuple(map(sum, zip(*(part.retries for part in parts), strict=True))),
        out_of_memory=None,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Transition:
    """What a moment does in a state of the allocator."""

    after: int
    """Number of the state in which it ends."""
    peak_bytes: int
    retries: int
    is_out_of_memory: bool


class _Pools:
    """An allocator during a run, with the transitions that are known."""

    def __init__(
        self, settings: AllocatorSettings, card_bytes: int | None, capacity_bytes: int | None, *, descending: bool
    ) -> None:
        self._settings, self._card_bytes, self._capacity_bytes = settings, card_bytes, capacity_bytes
        self._descending = descending
        self._states: list[AllocatorState] = []
        self._numbers: dict[AllocatorState, int] = {}
        self._transitions: dict[tuple[int, Events], _Transition] = {}
        self._live: tuple[int, CachingAllocator, dict[int, Block]] | None = None
        """Number of a state, and an allocator in this state with the blocks in its slots."""

    def run(self, run: Iterable[tuple[Events, ...]], tick: Callable[[int], None]) -> RunOutcome:
        """Returns the outcome of a run that begins without any segment."""
        place = Placement(descending=self._descending)
        empty = CachingAllocator(self._settings, self._capacity_bytes, place=place, card_bytes=self._card_bytes)
        state = self._number(capture(empty, {}))
        peaks, retries = [], []
        for number, moment in enumerate(run):
            if number % _STEPS_BETWEEN_REPORTS == 0:
                tick(number)
            done: list[_Transition] = []
            for events in moment:
                transition = self._transitions.get((state, events))
                if transition is None:
                    transition = self._transitions[state, events] = self._simulated(state, events)
                done.append(transition)
                state = transition.after
                if transition.is_out_of_memory:
                    break
            peaks.append(max(transition.peak_bytes for transition in done))
            retries.append(sum(transition.retries for transition in done))
            if done[-1].is_out_of_memory:
                return RunOutcome(peaks=tuple(peaks), retries=tuple(retries), out_of_memory=number)
        return RunOutcome(peaks=tuple(peaks), retries=tuple(retries), out_of_memory=None)

    def _number(self, state: AllocatorState) -> int:
        """Returns the number of a state, which is a new one if the state was not seen before."""
        number = self._numbers.setdefault(state, len(self._states))
        if number == len(self._states):
            self._states.append(state)
        return number

    def _simulated(self, state: int, events: Events) -> _Transition:
        """Simulates one moment from a state."""
        if self._live is not None and self._live[0] == state:
            _, allocator, slots = self._live
            allocator.driver.peak_reserved_bytes = allocator.reserved_bytes
        else:
            allocator, slots = restore(
                self._states[state],
                self._settings,
                self._capacity_bytes,
                card_bytes=self._card_bytes,
                descending=self._descending,
            )
        retries_before = allocator.retries
        try:
            _replay(allocator, slots, events)
        except OutOfMemory:
            self._live = None
            retries = allocator.retries - retries_before
            return _Transition(state, allocator.peak_reserved_bytes, retries, is_out_of_memory=True)
        after = self._number(capture(allocator, {block.address: slot for slot, block in slots.items()}))
        self._live = after, allocator, slots
        retries = allocator.retries - retries_before
        return _Transition(after, allocator.peak_reserved_bytes, retries, is_out_of_memory=False)


def _replay(allocator: CachingAllocator, slots: dict[int, Block], events: Events) -> None:
    """Sends the events of a moment to an allocator, and changes the blocks in the slots accordingly.

    Raises:
        OutOfMemory: a request does not fit in the capacity.
    """
    malloc, free = allocator.malloc, allocator.free
    local: dict[int, Block] = {}
    for number, size_bytes in events.stream:
        if size_bytes:
            local[number] = malloc(size_bytes)
        elif number >= FIRST_LOCAL:
            free(local.pop(number))
        elif number in slots:
            free(slots.pop(number))
    for number, slot in events.leaves:
        slots[slot] = local[number]  # a block that nothing has freed stays allocated to the end of the run
