"""The result of a replay: all differences between record and simulation, and the memory of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from planner.allocator.blocks import Segment


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddressMismatch:
    """A request that got different addresses in the record and the simulation; None if it ran out of memory."""

    at_event: int
    size_bytes: int
    stream: int
    recorded_address: int | None
    simulated_address: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriverMismatch:
    """A difference in the memory that was taken from the driver or released, up to and including one event."""

    at_event: int
    recorded_change_bytes: int
    """Change of the reserved memory since the last comparison."""
    simulated_change_bytes: int
    only_recorded: tuple[int, ...] = ()
    """Addresses of segments that were released in the recorded history, but not in the simulation."""
    only_simulated: tuple[int, ...] = ()
    """Addresses of segments that only the simulation releases."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of events of a record."""

    allocations: int
    failed_requests: int
    taken: int
    """Number of segments taken from the driver, or of ranges of pages that were mapped."""
    given_back: int
    """Number of segments released to the driver, or of ranges of pages that were unmapped."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Levels:
    """Memory during and after a record. Requested means before rounding, reserved means taken from the driver."""

    peak_requested_bytes: int
    peak_allocated_bytes: int | None
    """Peak of the sizes of blocks, including remainders that were not split off. None for a record, which lacks this
    peak."""
    peak_reserved_bytes: int
    final_allocated_bytes: int
    final_reserved_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentPair:
    """A segment at the end, as recorded and as simulated. None means that this side does not have the segment."""

    recorded: Segment | None
    simulated: Segment | None

    @property
    def is_equal(self) -> bool:
        """True if both have the segment, with the same blocks."""
        return self.recorded == self.simulated


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """The comparison of a recorded allocator history with the simulation of the same events."""

    counts: Counts
    addresses: tuple[AddressMismatch, ...]
    driver: tuple[DriverMismatch, ...]
    recorded: Levels
    simulated: Levels
    segments: tuple[SegmentPair, ...]
    """Segments at the end by ascending address."""
    retries: int
    """Number of times that the simulator found the card full and released segments."""
    starts_empty: bool
    """True if no segment exists before the first event."""
    capacity_bytes: int | None
    """Memory that segments could take in the simulation. None means no limit."""

    @property
    def is_equal(self) -> bool:
        """True if all addresses, all exchanges with the driver and all segments are as recorded."""
        return not self.addresses and not self.driver and all(pair.is_equal for pair in self.segments)


def pair_segments(recorded: Sequence[Segment], simulated: Sequence[Segment]) -> tuple[SegmentPair, ...]:
    """Pairs recorded and simulated segments of the same address."""
    by_address = [{segment.address: segment for segment in segments} for segments in (recorded, simulated)]
    addresses = sorted(by_address[0].keys() | by_address[1].keys())
    return tuple(
        SegmentPair(recorded=by_address[0].get(address), simulated=by_address[1].get(address)) for address in addresses
    )
