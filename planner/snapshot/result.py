"""The result of a replay: all differences between the record and the simulation, and the memory use of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from planner.allocator.blocks import Segment


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddressMismatch:
    """A request that got one address in the record and another address in the simulation."""

    at_event: int
    """Index of the request among the events of the record."""
    size_bytes: int
    """Size of the request."""
    stream: int
    recorded_address: int | None
    """Address in the record; None if the request ran out of memory there."""
    simulated_address: int | None
    """Address in the simulation; None if the request ran out of memory there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriverMismatch:
    """A difference in the memory that was taken from the driver or released to it.

    Record and simulation are compared at certain events. The difference arose after the previous comparison, up to and
    including `at_event`.
    """

    at_event: int
    """Index of the event at which the difference was found."""
    recorded_change_bytes: int
    """Change of the reserved memory in the record since the previous comparison."""
    simulated_change_bytes: int
    """Change of the reserved memory in the simulation since the previous comparison."""
    only_recorded: tuple[int, ...] = ()
    """Addresses of segments that were released in the record, but not in the simulation."""
    only_simulated: tuple[int, ...] = ()
    """Addresses of segments that were released in the simulation, but not in the record."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """The number of events of each kind in a record."""

    allocations: int
    failed_requests: int
    taken: int
    """Number of times that memory was taken from the driver: segments allocated, or ranges of pages mapped."""
    given_back: int
    """Number of times that memory was released to the driver: segments freed, or ranges of pages unmapped."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Levels:
    """Peaks of memory during a record or a simulation, and the memory at its end.

    Requested bytes are counted before rounding, allocated bytes are the sizes of the blocks, and reserved bytes are
    those taken from the driver.
    """

    peak_requested_bytes: int
    peak_allocated_bytes: int | None
    """None for a record, because its events do not hold the sizes of the blocks."""
    peak_reserved_bytes: int
    final_allocated_bytes: int
    final_reserved_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentPair:
    """A segment at the end, with its state in the record and in the simulation."""

    recorded: Segment | None
    """None if the record has no segment at this address."""
    simulated: Segment | None
    """None if the simulation has no segment at this address."""

    @property
    def is_equal(self) -> bool:
        """True if record and simulation both have the segment, with the same blocks."""
        return self.recorded == self.simulated


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """The comparison of a recorded allocator history with the simulation of the same events."""

    counts: Counts
    """Number of events in the record."""
    addresses: tuple[AddressMismatch, ...]
    """Requests that got different addresses."""
    driver: tuple[DriverMismatch, ...]
    """Differences in the memory that was taken from the driver or released to it."""
    recorded: Levels
    simulated: Levels
    segments: tuple[SegmentPair, ...]
    """All segments that the record or the simulation has at the end, by ascending address."""
    retries: int
    """Number of requests for which the simulator found the card full and released all free segments."""
    starts_empty: bool
    """True if no memory is reserved before the first event."""
    capacity_bytes: int | None
    """Memory that segments could take in the simulation. None means no limit."""
    start: tuple[Segment, ...] = ()
    """Segments before the first event."""
    emptied: tuple[int, ...] = ()
    """Indices of the events with which the program released unused memory (`torch.cuda.empty_cache`)."""
    looked_at: tuple[Segment, ...] | None = None
    """Segments of the simulator after the event `look_at`; None if it was not asked for."""

    @property
    def is_equal(self) -> bool:
        """True if all addresses, all exchanges of memory with the driver and all segments are as in the record."""
        return not self.addresses and not self.driver and all(pair.is_equal for pair in self.segments)


def pair_segments(recorded: Sequence[Segment], simulated: Sequence[Segment]) -> tuple[SegmentPair, ...]:
    """Returns one pair for each address at which the record or the simulation has a segment, by ascending address."""
    by_address = [{segment.address: segment for segment in segments} for segments in (recorded, simulated)]
    addresses = sorted(by_address[0].keys() | by_address[1].keys())
    return tuple(
        SegmentPair(recorded=by_address[0].get(address), simulated=by_address[1].get(address)) for address in addresses
    )
