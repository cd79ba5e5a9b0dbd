"""Simulates the caching allocator during a run: a long sequence of moments, most of which repeat.

From the same state, the same moment always leads to the same state. Each such transition is simulated once, so that the
time depends on the number of different transitions, and not on the length of the run. Small and large requests are
served from different pools, and influence each other only if the memory of the card runs out. The two pools are
simulated separately, which makes the states fewer, and together only in moments that need more memory than there is.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence

from planner.allocator.blocks import FIRST_ADDRESS, Block
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.out_of_memory import OutOfMemory
from planner.allocator.settings import LARGEST_SMALL_BYTES, AllocatorSettings, round_size
from planner.allocator.state import AllocatorState, capture, restore
from planner.profiles.device import SEGMENT_ADDRESSES, DeviceProfile
from planner.run_memory.moments import FIRST_LOCAL, RELEASE, Events

_MOMENTS_BETWEEN_REPORTS = 256
"""Number of moments after which progress is reported."""
_APART_BYTES = 1 << 60
"""Distance between the first segments for small requests and those for large ones. They must never overlap."""


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
    outcomes = [
        _Simulation(settings, card.vram_bytes, capacity_bytes, descending=descending).run(run, tick)
        for descending in SEGMENT_ADDRESSES[card.segment_addresses]
    ]
    return max(outcomes, key=lambda outcome: (outcome.out_of_memory is not None, outcome.peak_bytes))


@dataclasses.dataclass(frozen=True, slots=True)
class _Transition:
    """Effect of events in a state of the allocator."""

    after: int
    """Number of the state in which it ends."""
    peaks: tuple[int, ...]
    """Bytes that are reserved before each release of the cache, and at the end. In between, they never fall."""


class _Simulation:
    """A run in an allocator whose segments are placed in one direction."""

    def __init__(
        self, settings: AllocatorSettings, card_bytes: int | None, capacity_bytes: int | None, *, descending: bool
    ) -> None:
        self._settings, self._card_bytes, self._capacity_bytes = settings, card_bytes, capacity_bytes
        self._descending = descending
        self._parts: dict[Events, tuple[Events, Events]] = {}
        self._states: list[AllocatorState] = []
        self._numbers: dict[AllocatorState, int] = {}
        self._transitions: dict[tuple[int, Events], _Transition] = {}
        self._live: dict[int, tuple[CachingAllocator, dict[int, Block]]] = {}
        """The latest allocator of each pool with the blocks in its slots, by number of its state."""

    def run(self, run: Iterable[tuple[Events, ...]], tick: Callable[[int], None]) -> RunOutcome:
        """Returns the outcome of a run that begins without any segment."""
        small, large = (
            self._number(AllocatorState(address, ())) for address in (FIRST_ADDRESS + _APART_BYTES, FIRST_ADDRESS)
        )
        peaks: list[int] = []
        retries: list[int] = []
        for number, moment in enumerate(run):
            if number % _MOMENTS_BETWEEN_REPORTS == 0:
                tick(number)
            peak_bytes = released = 0
            for events in moment:
                of_small, of_large = self._halves(events)
                first, second = self._transition(small, of_small), self._transition(large, of_large)
                reserved_bytes = max(map(operator.add, first.peaks, second.peaks))
                if self._capacity_bytes is None or reserved_bytes <= self._capacity_bytes:
                    small, large = first.after, second.after
                    peak_bytes = max(peak_bytes, reserved_bytes)
                    continue
                both = self._joined(self._states[small], self._states[large])
                allocator, slots = self._restored(both, self._capacity_bytes)
                fits = _replay(allocator, slots, events)
                peak_bytes, released = max(peak_bytes, allocator.peak_reserved_bytes), released + allocator.retries
                if not fits:
                    return RunOutcome(peaks=(*peaks, peak_bytes), retries=(*retries, released), out_of_memory=number)
                small, large = map(self._number, self._separated(_captured(allocator, slots)))
            peaks.append(peak_bytes)
            retries.append(released)
        return RunOutcome(peaks=tuple(peaks), retries=tuple(retries), out_of_memory=None)

    def _halves(self, events: Events) -> tuple[Events, Events]:
        """Returns the events of the small requests, and those of the large ones."""
        if events not in self._parts:
            sizes = {number: size_bytes for number, size_bytes in events.stream if size_bytes}
            small = {n for n, size in sizes.items() if round_size(size, self._settings) <= LARGEST_SMALL_BYTES}
            self._parts[events] = events.part(small), events.part(set(sizes) - small)
        return self._parts[events]

    def _number(self, state: AllocatorState) -> int:
        """Returns the number of a state, which is a new one if the state was not seen before."""
        number = self._numbers.setdefault(state, len(self._states))
        if number == len(self._states):
            self._states.append(state)
        return number

    def _transition(self, state: int, events: Events) -> _Transition:
        """Returns what the events of one pool do in a state, without a limit."""
        transition = self._transitions.get((state, events))
        if transition is None:
            live = self._live[state] if state in self._live else self._restored(self._states[state], None)
            allocator, slots = live
            peaks: list[int] = []
            _replay(allocator, slots, events, lambda: peaks.append(allocator.reserved_bytes))
            after = self._number(_captured(allocator, slots))
            self._live.pop(state, None)
            self._live = {**dict(list(self._live.items())[-1:]), after: live}
            transition = self._transitions[state, events] = _Transition(after, (*peaks, allocator.reserved_bytes))
        return transition

    def _restored(self, state: AllocatorState, capacity_bytes: int | None) -> tuple[CachingAllocator, dict[int, Block]]:
        return restore(state, self._settings, capacity_bytes, card_bytes=self._card_bytes, descending=self._descending)

    def _joined(self, small: AllocatorState, large: AllocatorState) -> AllocatorState:
        """Returns the state of an allocator with both pools. New segments come after those of either pool."""
        segments = sorted((*small.segments, *large.segments), key=lambda segment: segment[0])
        latest = min if self._descending else max
        return AllocatorState(latest(small.next_address, large.next_address), tuple(segments))

    def _separated(self, state: AllocatorState) -> tuple[AllocatorState, AllocatorState]:
        """Returns the states of the pool of small requests and of that of large ones."""
        small, large = (
            tuple(segment for segment in state.segments if segment[1] is is_small) for is_small in (True, False)
        )
        apart = state.next_address + (-_APART_BYTES if self._descending else _APART_BYTES)
        return AllocatorState(apart, small), AllocatorState(state.next_address, large)


def _captured(allocator: CachingAllocator, slots: dict[int, Block]) -> AllocatorState:
    return capture(allocator, {block.address: slot for slot, block in slots.items()})


def _replay(
    allocator: CachingAllocator,
    slots: dict[int, Block],
    events: Events,
    before_release: Callable[[], None] = lambda: None,
) -> bool:
    """Sends events to an allocator, and changes the blocks in the slots accordingly.

    Returns True; False if a request does not fit in the capacity.

    Args:
        before_release: called before each release of the cache.
    """
    malloc, free = allocator.malloc, allocator.free
    local: dict[int, Block] = {}
    try:
        for number, size_bytes in events.stream:
            if size_bytes:
                local[number] = malloc(size_bytes)
            elif number >= FIRST_LOCAL:
                free(local.pop(number))
            elif number == RELEASE:
                before_release()
                allocator.empty_cache()
            elif number in slots:
                free(slots.pop(number))
    except OutOfMemory:
        return False
    for number, slot in events.leaves:
        slots[slot] = local[number]  # a block that nothing has freed stays allocated to the end of the run
    return True
