"""What must be alive while the optimizer steps: no plan goes below."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence

import torch

from planner.plan_types.decisions import Decision, Freeze, Optimizer, OptimizerKernel, StepInBackward
from planner.workload.eight_bit import least_state_bytes
from planner.workload.torch_optimizers import keeps_alike, kind_of
from planner.workload.workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedParameters:
    """Parameters by what the step makes for them."""

    with_gradient: tuple[torch.nn.Parameter, ...]
    with_state: tuple[torch.nn.Parameter, ...]
    """Those of them that the optimizer holds."""

    @classmethod
    def of(cls, work: Workload, names: Sequence[str]) -> TrainedParameters:
        """From the names of all that get a gradient, as recorded."""
        reached = set(names)
        gradients = tuple(parameter for name, parameter in work.model.named_parameters() if name in reached)
        optimizer = work.optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            return cls(with_gradient=gradients, with_state=gradients)
        covered = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return cls(with_gradient=gradients, with_state=tuple(p for p in gradients if id(p) in covered))

    def without(self, held: Container[int]) -> TrainedParameters:
        """Less those whose identity is among `held`."""
        return TrainedParameters(
            with_gradient=tuple(p for p in self.with_gradient if id(p) not in held),
            with_state=tuple(p for p in self.with_state if id(p) not in held),
        )


def lower_bound_bytes(
    work: Workload,
    trained: TrainedParameters,
    *,
    optimizer_peak_bytes: int,
    state_bytes: int,
    outer: Sequence[Decision],
) -> int:
    """Bytes that no plan with these outer choices goes below: what must be alive while the optimizer steps.

    Args:
        optimizer_peak_bytes: the same for the baseline. It stays so but for what another optimizer or frozen
            parameters spare: gradients, state and temporaries are taken to be proportional to trained parameters.
        state_bytes: of the baseline's optimizer. It is all that a step in backward needs beside the parameters, and
            with the gradients all that another kernel needs.
    """
    parameter_bytes = sum(p.numel() * p.itemsize for p in work.model.parameters())
    frozen = {name for decision in outer if isinstance(decision, Freeze) for name in decision.modules}
    held = {id(p) for name in frozen for p in work.model.get_submodule(name).parameters()}
    still = trained.without(held)
    eight_bit = any(isinstance(decision, Optimizer) for decision in outer)
    in_backward = any(isinstance(decision, StepInBackward) for decision in outer)
    without_temporaries = in_backward or any(isinstance(decision, OptimizerKernel) for decision in outer)
    if not held and not eight_bit and not without_temporaries:
        return optimizer_peak_bytes
    least_bytes = parameter_bytes
    if not in_backward:
        least_bytes += sum(p.numel() * p.itemsize for p in still.with_gradient)
    if eight_bit:
        return least_bytes + least_state_bytes(work.model, still.with_state)
    if len(trained.with_state) < len(trained.with_gradient):
        return least_bytes
    if held and not _keeps_alike(work, trained):
        return least_bytes
    share = sum(p.numel() for p in still.with_state) / sum(p.numel() for p in trained.with_state)
    if without_temporaries:
        return least_bytes + int(0.99 * share * state_bytes)
    return parameter_bytes + int(0.99 * share * (optimizer_peak_bytes - parameter_bytes))


def _keeps_alike(work: Workload, trained: TrainedParameters) -> bool:
    """Whether the state of a part of the parameters is known to be that share of all state."""
    groups = getattr(work.optimizer, "param_groups", ())  # groups may differ in the state that they keep
    dtypes = {parameter.dtype for parameter in trained.with_state}
    return keeps_alike(kind_of(work.optimizer)) and len(groups) < 2 and len(dtypes) == 1
