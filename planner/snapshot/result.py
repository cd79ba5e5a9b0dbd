"""What a replay of a record gives: every difference, and both sides in numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from planner.allocator.blocks import Segment


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddressMismatch:
    """A request that was served differently. None stands for out of memory."""

    at_event: int
    size_bytes: int
    stream: int
    recorded_address: int | None
    simulated_address: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriverMismatch:
    """Memory that was taken from the driver or given back differently, up to and including one event."""

    at_event: int
    recorded_change_bytes: int
    """Of reserved memory since the event before."""
    simulated_change_bytes: int
    only_recorded: tuple[int, ...] = ()
    """Addresses of segments that only the record gives back."""
    only_simulated: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """What a record holds."""

    allocations: int
    failed_requests: int
    taken: int
    """Segments taken from the driver, or stretches of pages mapped."""
    given_back: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Levels:
    """How much memory there was. Requested: before rounding; reserved: taken from the driver."""

    peak_requested_bytes: int
    peak_allocated_bytes: int | None
    """Blocks with what was not worth splitting off; None: a record does not tell."""
    peak_reserved_bytes: int
    final_allocated_bytes: int
    final_reserved_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentPair:
    """One segment at the end: as recorded and as simulated; None where only the other one has it."""

    recorded: Segment | None
    simulated: Segment | None

    @property
    def is_equal(self) -> bool:
        return self.recorded == self.simulated


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """A record beside its simulation."""

    counts: Counts
    addresses: tuple[AddressMismatch, ...]
    driver: tuple[DriverMismatch, ...]
    recorded: Levels
    simulated: Levels
    segments: tuple[SegmentPair, ...]
    """By ascending address."""
    retries: int
    """How often the simulator found the card full and gave segments back."""
    starts_empty: bool
    capacity_bytes: int | None
    """Memory the simulator had for segments; None: no limit."""

    @property
    def is_equal(self) -> bool:
        """Whether every address, every exchange with the driver and every segment is as recorded."""
        return not self.addresses and not self.driver and all(pair.is_equal for pair in self.segments)


def pair_segments(recorded: Sequence[Segment], simulated: Sequence[Segment]) -> tuple[SegmentPair, ...]:
    """Segments of the same address side by side."""
    by_address = [{segment.address: segment for segment in segments} for segments in (recorded, simulated)]
    addresses = sorted(by_address[0].keys() | by_address[1].keys())
    return tuple(
        SegmentPair(recorded=by_address[0].get(address), simulated=by_address[1].get(address)) for address in addresses
    )
