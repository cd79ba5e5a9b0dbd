"""The user's constraints on a plan: a fidelity, techniques that are forced or forbidden, a maximum slowdown."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from planner.errors import DecisionError
from planner.plan_types.decisions import Decision, Fidelity, Role
from planner.plan_types.techniques import KINDS, canonical_kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constraints:
    """The user's constraints on a plan.

    Techniques in `forced` and `forbidden` may be given by any name; former names and aliases are replaced by
    `Decision.kind`.

    Raises:
        DecisionError: a name is unknown, the constraints contradict each other, or `max_slowdown` is not above 0.
    """

    fidelity: Fidelity
    forced: tuple[str, ...]
    forbidden: tuple[str, ...]
    max_slowdown: float | None = None
    """Maximum step time, as a multiple of the step time of the baseline; None for no limit."""
    margin: str | int | None = None
    """The part of the card that the plan leaves free, as for `sizes.margin_bytes`; None for the default."""
    asked_by: tuple[tuple[str, str], ...] = ()
    """Techniques (`Decision.kind`) that an option other than `--force` forces, each with that option, such as
    ('8bit-optimizer', '--optimizer adamw_8bit'). Errors name the option."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "forced", known_kinds(self.forced))
        object.__setattr__(self, "forbidden", known_kinds(self.forbidden))
        if both := sorted(set(self.forced) & set(self.forbidden)):
            raise DecisionError(f"technique '{both[0]}' is both forced and forbidden: force it or forbid it, not both")
        for name in self.forced:
            if KINDS[name].fidelity > self.fidelity:
                needed = KINDS[name].fidelity.name.lower()
                raise DecisionError(
                    f"technique '{name}' is forced but not allowed at this fidelity: add --fidelity {needed}"
                )
        if self.max_slowdown is not None and not 0 < self.max_slowdown < math.inf:
            raise DecisionError(
                f"maximum slowdown {self.max_slowdown} is not a number above 0: give a number such as 1.2"
            )

    def allow(self, technique: type[Decision] | Role) -> bool:
        """True if a plan may use this technique; for a role, if a plan may use any technique with this role."""
        return any(kind.fidelity <= self.fidelity and kind.kind not in self.forbidden for kind in kinds_of(technique))

    def force(self, technique: type[Decision] | Role) -> bool:
        """True if the user demands this technique; for a role, if the user demands any technique with this role."""
        return any(kind.kind in self.forced for kind in kinds_of(technique))

    def why_forced(self, technique: type[Decision]) -> tuple[str, str]:
        """Returns two texts for an error: why a technique has to be used, and what to do if it cannot be used."""
        option = dict(self.asked_by).get(technique.kind)
        if option is None:
            return f"{technique.kind} is forced", f"do not force {technique.kind}"
        return f"{option} asks for {technique.kind}", f"leave {option} out"


def parse_constraints(
    *,
    fidelity: str,
    force: str | Sequence[str],
    forbid: str | Sequence[str],
    only: str | Sequence[str] | None = None,
    max_slowdown: float | None = None,
    margin: str | int | None = None,
    asked_by: Mapping[str, str] | None = None,
) -> Constraints:
    """Creates constraints from the user's options.

    Args:
        asked_by: options that force further techniques, by `Decision.kind`.
        only: names of the techniques that are allowed; all others are forbidden. None allows all techniques.

    Raises:
        DecisionError: a name is unknown, or two options contradict each other.
    """
    asked_by = asked_by or {}
    forced, forbidden = (*_names(force), *asked_by), _names(forbid)
    if divided := [name for name in known_kinds(forbidden) if KINDS[name].role is Role.SHARDING]:
        raise DecisionError(
            f"'{divided[0]}' cannot be forbidden: several cards always use it, and one card never does; choose how the "
            "model is divided with sharding (--sharding)"
        )
    if only is not None:
        allowed, excluded = known_kinds(_names(only)), {canonical_kind(name) for name in forbidden}
        for name in allowed:
            if name in excluded:
                raise DecisionError(
                    f"technique '{name}' is forbidden, but 'only' allows it: leave it out of one of the two options"
                )
        if others := sorted(set(known_kinds(forced)) - set(allowed)):
            raise DecisionError(
                f"technique '{others[0]}' is forced, but 'only' does not name it: add it there, or do not force it"
            )
        # How several cards divide the model is not a matter of `only`.
        forbidden = tuple(
            name for name, kind in KINDS.items() if name not in allowed and kind.role is not Role.SHARDING
        )
    return Constraints(
        fidelity=Fidelity.parse(fidelity),
        forced=forced,
        forbidden=forbidden,
        max_slowdown=max_slowdown,
        margin=margin,
        asked_by=tuple(asked_by.items()),
    )


def known_kinds(names: Sequence[str]) -> tuple[str, ...]:
    """The kinds (`Decision.kind`) of techniques, given by any name. Raises `DecisionError` for an unknown name."""
    kinds = tuple(canonical_kind(name) for name in names)
    for name, kind in zip(names, kinds, strict=True):
        if kind not in KINDS:
            raise DecisionError(f"technique '{name}' is unknown: choose from {', '.join(KINDS)}")
    return kinds


def kinds_of(technique: type[Decision] | Role) -> tuple[type[Decision], ...]:
    """The decision classes with a role. A decision class is returned as a tuple of this class alone."""
    if isinstance(technique, Role):
        return tuple(kind for kind in KINDS.values() if kind.role is technique)
    return (technique,)


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
