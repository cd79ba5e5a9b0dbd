"""Lower bounds on the time and the memory of a configuration, computed from the recording of the baseline alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from planner.estimate import roofline
from planner.plan_types.decision_base import Decision, Role, has_role, with_roles
from planner.profiles.device import DeviceProfile
from planner.recording.step_graph import Category, Op, Phase, StepGraph
from planner.workload.eight_bit import least_state_bytes
from planner.workload.torch_optimizers import moves_all_its_state
from planner.workload.workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeastUpdate:
    """Lower bounds on the time and the state of an optimizer update, for any implementation of its kernels."""

    ns: int
    """Time in nanoseconds to read parameters, gradients and state once, and to write parameters and state once."""
    state_bytes: int | None
    """Bytes of optimizer state of all trained parameters; None if the state is the same as in the baseline."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateMemoryBound:
    """A lower bound on the memory of a step if another optimizer update replaces the recorded one."""

    state_bytes: int | None
    """Lower bound on the bytes of the optimizer state; None if the state is the same as in the recording."""
    counts_gradients: bool
    """True if all gradients are kept until the update; False if the update runs inside of the backward."""
    counts_logits: bool = True
    """False if the loss is computed in chunks, so that the logits take little memory."""

    def least_bytes(self, alive_bytes: np.ndarray, graph: StepGraph, *, granularity_bytes: int) -> np.ndarray:
        """Returns int64[ticks]: lower bounds on the bytes that are alive if this update replaces the recorded one.

        They are 0 from `update_tick` on, because the memory that the update itself needs is ignored.

        Args:
            alive_bytes: int64[ticks], bytes that are alive in the recording.
            graph: a recording whose `update_tick` is known.
            granularity_bytes: storage sizes are rounded up to multiples of it.
        """
        least = alive_bytes.copy()
        if self.state_bytes is not None:
            least -= max(graph.bytes_of(Category.OPTIMIZER_STATE) - self.state_bytes, 0)
        counted = {Category.GRADIENT: self.counts_gradients, Category.LOGITS: self.counts_logits}
        if not all(counted.values()):
            storages = [storage for storage in graph.storages if not counted.get(storage.category, True)]
            only = dataclasses.replace(graph, storages=storages, saves=[])
            least -= only.live_bytes(granularity_bytes=granularity_bytes)[: len(least)]
        least[graph.update_tick :] = 0
        return least


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """Numbers from the recording of the baseline that bound the time and the peak of every configuration from below."""

    step_ns: int
    """Step time of the baseline in nanoseconds; only the time of its forward if a prefix is frozen. A plan in the
    baseline's precision takes at least this time minus `most_saved_ns`."""
    optimizer_ns: int
    """Time of the baseline's optimizer update in nanoseconds; 0 if a prefix is frozen."""
    loss_ns: int
    """Time in nanoseconds of the baseline's ops that read or write logits and compute no matrix product. A loss in
    chunks cannot save more time than this."""
    updates: Mapping[bool, LeastUpdate]
    """Lower bounds on an update that replaces the baseline's update. Keys: True for an optimizer with 8-bit state,
    False for the user's optimizer with another kernel."""
    lower_bound_bytes: Callable[[tuple[Decision, ...]], int]
    """Returns for a configuration a lower bound in bytes on the peaks of its plans."""

    @classmethod
    def of(
        cls,
        graph: StepGraph,
        card: DeviceProfile,
        *,
        updates: Mapping[bool, LeastUpdate],
        lower_bound_bytes: Callable[[tuple[Decision, ...]], int],
        is_frozen: bool,
    ) -> Bounds:
        """Returns the bounds that follow from the recording of the baseline.

        Args:
            is_frozen: True if a prefix of the model is frozen in every configuration.
        """
        times = roofline.op_times_ns(graph, card, 1)
        forward_ns = sum(ns for op, ns in zip(graph.ops, times, strict=True) if op.phase is Phase.FORWARD)
        return cls(
            step_ns=forward_ns if is_frozen else sum(times),
            optimizer_ns=0 if is_frozen else optimizer_ns(graph, times),
            loss_ns=loss_ns(graph, times),
            updates=updates,
            lower_bound_bytes=lower_bound_bytes,
        )

    def most_saved_ns(self, decisions: tuple[Decision, ...], optimizer_ns: int) -> int:
        """Returns the maximum number of ns that `decisions` save in a step whose update takes `optimizer_ns`."""
        return self.saved_by_update_ns(decisions, optimizer_ns) + has_role(decisions, Role.LOSS) * self.loss_ns

    def saved_by_update_ns(self, decisions: tuple[Decision, ...], optimizer_ns: int) -> int:
        """Returns an upper bound in ns on what the update of `decisions` saves of the time `optimizer_ns`.

        The result is 0 if `decisions` leave the optimizer unchanged.
        """
        least = self.least_update(decisions)
        return 0 if least is None else max(optimizer_ns - least.ns, 0)

    def update_memory_bound(self, decisions: tuple[Decision, ...]) -> UpdateMemoryBound:
        """Returns the lower bound on memory with the optimizer update of `decisions`."""
        least = self.least_update(decisions)
        return UpdateMemoryBound(
            state_bytes=None if least is None else least.state_bytes,
            counts_gradients=not any(decision.steps_in_backward for decision in decisions),
        )

    def least_update(self, decisions: tuple[Decision, ...]) -> LeastUpdate | None:
        """Returns lower bounds on the optimizer update of `decisions`; None if they leave the optimizer unchanged."""
        optimizers = with_roles(decisions, Role.OPTIMIZER)
        return self.updates[optimizers[0].eight_bit_state] if optimizers else None


def least_updates(
    workload: Workload,
    card: DeviceProfile,
    graph: StepGraph,
    with_state: Sequence[torch.nn.Parameter],
    *,
    is_frozen: bool,
) -> dict[bool, LeastUpdate]:
    """Returns lower bounds on the time and the state of an update, by whether the state has 8 bits (`Bounds.updates`).

    The times are 0 if a prefix of the model is frozen, and for a step of the user's own.

    Args:
        card: the card, whose memory bandwidth limits the update.
        graph: the recording of the baseline.
        with_state: the trained parameters for which the optimizer has state.
        is_frozen: True if a prefix of the model is frozen in every configuration.
    """
    if is_frozen or workload.step is not None:
        return {True: LeastUpdate(ns=0, state_bytes=0), False: LeastUpdate(ns=0, state_bytes=None)}
    # A parameter and its gradient are read, and the parameter is written.
    once_bytes = sum(3 * p.numel() * p.itemsize for p in with_state)
    eight_bit_bytes = least_state_bytes(workload.model, with_state)
    # The baseline's optimizer may leave a part of its state untouched.
    moved_bytes = graph.bytes_of(Category.OPTIMIZER_STATE) if moves_all_its_state(workload.optimizer) else 0

    def ns(state_bytes: int) -> int:
        return roofline.transfer_ns(once_bytes + 2 * state_bytes, card)

    return {
        True: LeastUpdate(ns=ns(eight_bit_bytes), state_bytes=eight_bit_bytes),
        False: LeastUpdate(ns=ns(moved_bytes), state_bytes=None),
    }


def optimizer_peak_bytes(graph: StepGraph) -> int:
    """Returns the maximum number of bytes alive while the baseline's optimizer steps."""
    ticks = [op.tick + 1 for op in graph.ops if op.phase is Phase.OPTIMIZER]
    return int(graph.live_bytes()[ticks].max()) if ticks else 0


def loss_ns(graph: StepGraph, times: Sequence[int]) -> int:
    """Returns `Bounds.loss_ns` of a baseline, whose ops take these times in nanoseconds."""
    return sum(ns for op, ns in zip(graph.ops, times, strict=True) if _is_of_logits(graph, op))


def _is_of_logits(graph: StepGraph, op: Op) -> bool:
    """True if the op reads or writes logits and computes no matrix product: a loss in chunks may save its time."""
    touched = (*op.inputs, *op.outputs)
    return not op.flops and any(graph.storages[index].category is Category.LOGITS for index in touched)


def optimizer_ns(graph: StepGraph, op_times_ns: list[int]) -> int:
    """Returns the time of the optimizer phase in nanoseconds."""
    return sum(ns for ns, op in zip(op_times_ns, graph.ops, strict=True) if op.phase is Phase.OPTIMIZER)
