"""Lower bounds on time and memory of a configuration, from the baseline alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from planner.plan_types.decision_base import Decision, Role, has_role, with_roles


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeastUpdate:
    """Lower bounds of an optimizer update, whatever its kernels."""

    ns: int
    """Time to move parameters, gradients and state through the card's memory once."""
    state_bytes: int | None
    """Bytes of optimizer state of all trained parameters; None if they are the same as in the baseline."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """Lower bounds of configurations that follow from the baseline, before anything else is recorded."""

    step_ns: int
    """Lower bound of the time of every plan in the baseline's precision, without the time of the optimizer. It is the
    baseline's time, or that of the baseline's forward if a prefix is frozen."""
    optimizer_ns: int
    """Time of the baseline's optimizer."""
    loss_ns: int
    """Time of the baseline's ops that only move logits, which is the maximum time that a loss in chunks can save."""
    updates: Mapping[bool, LeastUpdate]
    """The update of an optimizer with 8-bit state (True), and of the user's optimizer with another kernel (False)."""
    lower_bound_bytes: Callable[[tuple[Decision, ...]], int]
    """Lower bound of the peak of every plan with a configuration."""

    def most_saved_ns(self, decisions: tuple[Decision, ...], optimizer_ns: int) -> int:
        """Maximum time that these decisions save in a step whose optimizer takes `optimizer_ns`."""
        return self.saved_by_update_ns(decisions, optimizer_ns) + has_role(decisions, Role.LOSS) * self.loss_ns

    def saved_by_update_ns(self, decisions: tuple[Decision, ...], optimizer_ns: int) -> int:
        """Maximum time that their update saves, compared with an update that takes `optimizer_ns`."""
        least = self.least_update(decisions)
        return 0 if least is None else max(optimizer_ns - least.ns, 0)

    def least_update(self, decisions: tuple[Decision, ...]) -> LeastUpdate | None:
        """Lower bounds of the update under these decisions; None if they leave the optimizer unchanged."""
        optimizers = with_roles(decisions, Role.OPTIMIZER)
        return self.updates[optimizers[0].eight_bit_state] if optimizers else None
