"""The error that the simulated allocator raises if a request does not fit, and a report of its state at that moment."""

from __future__ import annotations

import dataclasses

from planner.errors import PlannerError
from planner.plan_types.sizes import format_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutOfMemoryReport:
    """The request that did not fit, and the state of the allocator at that moment."""

    asked_bytes: int
    """Size of the request after rounding."""
    allocated_bytes: int
    """Bytes of all allocated blocks."""
    reserved_bytes: int
    """Bytes that are taken from the driver, after free segments were released."""
    capacity_bytes: int
    """Limit of the reserved memory that the request would have exceeded: the capacity or `allowed_bytes`."""


class OutOfMemory(PlannerError):
    """Raised if a request does not fit, even after all segments without an allocated block were released."""

    def __init__(self, report: OutOfMemoryReport) -> None:
        self.report = report
        super().__init__(
            f"an allocation of {format_size(report.asked_bytes)} does not fit in {format_size(report.capacity_bytes)}, "
            f"of which {format_size(report.reserved_bytes)} are reserved and {format_size(report.allocated_bytes)} "
            "allocated: give a larger budget or a smaller step"
        )

    def __reduce__(self) -> tuple[type[OutOfMemory], tuple[OutOfMemoryReport]]:
        return OutOfMemory, (self.report,)
