"""`Tradeoff`: memory against time for one training step, as certified plans. Without a torch object in it."""

from __future__ import annotations

import dataclasses

from planner.plan_types.plan import SCHEMA_VERSION, Footprint, Plan

DEFAULT_SECONDS = 30.0
"""About how long a trade-off takes at most, unless told otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tradeoff:
    """The front of one workload: no plan in it is both as small and as fast as another."""

    as_it_is: Plan
    """The step without any decision: what sizes and times are to be compared with."""
    points: tuple[Plan, ...]
    """From the fastest to the smallest; each fits a budget of exactly its total."""
    vram_bytes: int | None
    """The budget that was given; None: there is nothing to mark."""
    usable_bytes: int | None
    """The part of it that the card has."""
    complete: bool
    """False: time ran out, and there may be plans between these."""
    seconds: float

    @property
    def baseline(self) -> Footprint:
        """Of the step as it is, with as much memory as it likes."""
        return self.as_it_is.baseline

    @property
    def chosen(self) -> Plan | None:
        """The fastest plan inside the budget; None if there is none, or no budget."""
        if self.usable_bytes is None:
            return None
        return next((plan for plan in self.points if plan.peak.total_bytes <= self.usable_bytes), None)

    @property
    def fits(self) -> bool:
        """Whether some plan is inside the budget; without a budget whether there is any plan at all."""
        return bool(self.points) if self.vram_bytes is None else self.chosen is not None

    def to_json(self) -> dict[str, object]:
        """One object; each of `points` is a plan as `Plan.from_json` reads it."""
        chosen = self.chosen
        return {
            "schema_version": SCHEMA_VERSION,
            "fits": self.fits,
            "vram_bytes": self.vram_bytes,
            "baseline": self.baseline.to_json(),
            "points": [plan.to_json() for plan in self.points],
            "chosen": None if chosen is None else self.points.index(chosen),
            "complete": self.complete,
            "seconds": self.seconds,
        }
