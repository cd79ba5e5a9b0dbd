"""What the user allows: fidelity, techniques that are forced or forbidden, a slowdown."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from planner.errors import DecisionError
from planner.plan_types.decisions import KINDS, Decision, Fidelity


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constraints:
    """What the user allows."""

    fidelity: Fidelity
    forced: tuple[str, ...]
    forbidden: tuple[str, ...]
    max_slowdown: float | None = None
    """Step time over that of the step as it is; None: any."""

    def __post_init__(self) -> None:
        for name in (*self.forced, *self.forbidden):
            if name not in KINDS:
                raise DecisionError(f"technique '{name}' is unknown: choose from {', '.join(KINDS)}")
        if both := sorted(set(self.forced) & set(self.forbidden)):
            raise DecisionError(f"technique '{both[0]}' is forced and forbidden: name it once")
        for name in self.forced:
            if KINDS[name].fidelity > self.fidelity:
                needed = KINDS[name].fidelity.name.lower()
                raise DecisionError(
                    f"technique '{name}' is forced but not allowed at this fidelity: add --fidelity {needed}"
                )
        if self.max_slowdown is not None and not 0 < self.max_slowdown < math.inf:
            raise DecisionError(f"slowdown of at most {self.max_slowdown} is impossible: give a number such as 1.2")

    def allow(self, kind: type[Decision]) -> bool:
        return kind.fidelity <= self.fidelity and kind.kind not in self.forbidden

    def force(self, kind: type[Decision]) -> bool:
        return kind.kind in self.forced


def parse_constraints(
    *,
    fidelity: str,
    force: Sequence[str],
    forbid: Sequence[str],
    only: Sequence[str] | None = None,
    max_slowdown: float | None = None,
) -> Constraints:
    """Constraints as a user states them; `only` forbids every technique that it does not name.

    Raises:
        DecisionError: a name is unknown, or two of them contradict each other.
    """
    forced, forbidden = _names(force), _names(forbid)
    if only is not None:
        only = _names(only)
        for name in only:
            if name not in KINDS:
                raise DecisionError(f"technique '{name}' is unknown: choose from {', '.join(KINDS)}")
            if name in forbidden:
                raise DecisionError(f"technique '{name}' is forbidden, and among those that alone are allowed")
        forbidden = tuple(name for name in KINDS if name not in only or name in forbidden)
    return Constraints(fidelity=Fidelity.parse(fidelity), forced=forced, forbidden=forbidden, max_slowdown=max_slowdown)


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)
