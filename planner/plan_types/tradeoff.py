"""`Tradeoff`: certified plans that trade memory against step time. It is plain data without torch objects."""

from __future__ import annotations

import dataclasses

from planner.plan_types.plan import SCHEMA_VERSION, Footprint, Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tradeoff:
    """The Pareto front of one workload: for each plan, every plan that needs less memory is slower."""

    as_it_is: Plan
    """The baseline: the step without any decision."""
    points: tuple[Plan, ...]
    """Plans from the fastest to the smallest. The budget of each plan is the total memory that it needs itself."""
    vram_bytes: int | None
    """The user's budget in bytes; None if there is none."""
    usable_bytes: int | None
    """The user's budget, but at most the memory of the card; None without a budget."""
    complete: bool
    """False if time ran out: faster plans of the same size, and smaller plans, may exist."""
    seconds: float

    @property
    def baseline(self) -> Footprint:
        """Footprint of the baseline on a card with enough memory."""
        return self.as_it_is.baseline

    @property
    def chosen(self) -> Plan | None:
        """The fastest plan inside the budget; None if no plan fits or there is no budget."""
        if self.usable_bytes is None:
            return None
        return next((plan for plan in self.points if plan.peak.total_bytes <= self.usable_bytes), None)

    @property
    def fits(self) -> bool:
        """True if a plan is inside the budget. Without a budget, True if there is any plan."""
        return bool(self.points) if self.vram_bytes is None else self.chosen is not None

    def to_json(self) -> dict[str, object]:
        """The trade-off as a dict for JSON; `Plan.from_json` reads each item of `points`.

        'chosen' is the index of the fastest plan inside the budget, or None.
        """
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
