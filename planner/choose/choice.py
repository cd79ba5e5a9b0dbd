"""The result of the chooser: a plan before it is certified."""

from __future__ import annotations

import dataclasses

from planner.plan_types.decision_base import Decision, fidelity_of

Config = tuple[Decision, ...]
"""A configuration: the decisions about precision, loss, optimizer and time of the update."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A plan before its certificate, with the peak and the time that it promises."""

    decisions: tuple[Decision, ...]
    peak_bytes: int
    step_ns: int
    status: str
    """Status of the solver, as in `SolverFacts`."""
    gap: float
    """Maximum share of the step time by which another selection of units could be faster."""
    config: Config = ()
    """The configuration that the plan belongs to, with the number of chunks for the whole batch."""

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sort key among equally fast plans, smallest first: fidelity, number of decisions, step time."""
        return fidelity_of(self.decisions), len(self.decisions), self.step_ns
