"""Lower bounds on the peak of a configuration: the bytes that must be alive while the optimizer steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence

import torch

from planner.plan_types.decision_base import Decision, frozen_modules_of, optimizer_kernel_of
from planner.plan_types.quantized import stored_bytes
from planner.workload.eight_bit import least_state_bytes
from planner.workload.torch_optimizers import keeps_alike, kind_of
from planner.workload.workload import Workload

_ROUNDING = 0.99
"""Factor on bytes that are assumed to be proportional to trained parameters: step counters and padding are not."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedParameters:
    """The parameters that the step trains."""

    with_gradient: tuple[torch.nn.Parameter, ...]
    with_state: tuple[torch.nn.Parameter, ...]
    """The trained parameters that the optimizer holds."""

    @classmethod
    def of(cls, workload: Workload, names: Sequence[str]) -> TrainedParameters:
        """Returns the parameters with these names.

        Args:
            names: names of the parameters that received a gradient in the recording of the baseline.
        """
        reached = set(names)
        gradients = tuple(parameter for name, parameter in workload.model.named_parameters() if name in reached)
        optimizer = workload.optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            return cls(with_gradient=gradients, with_state=gradients)
        covered = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return cls(with_gradient=gradients, with_state=tuple(p for p in gradients if id(p) in covered))

    def without(self, frozen: Container[int]) -> TrainedParameters:
        """Returns the parameters whose `id` is not in `frozen`."""
        return TrainedParameters(
            with_gradient=tuple(p for p in self.with_gradient if id(p) not in frozen),
            with_state=tuple(p for p in self.with_state if id(p) not in frozen),
        )


def lower_bound_bytes(
    workload: Workload,
    trained: TrainedParameters,
    *,
    optimizer_peak_bytes: int,
    state_bytes: int,
    config: Sequence[Decision],
) -> int:
    """Returns a lower bound in bytes on the peak of every plan with this configuration.

    The bound is the bytes that are alive while the optimizer steps. They are the same as in the baseline, except for
    what the configuration saves: gradients, state and temporaries of frozen parameters; state, with 8-bit state;
    temporaries, with another optimizer kernel; gradients and temporaries, with a step in backward. State and
    temporaries count only if they are known to be proportional to the number of trained parameters.

    Args:
        trained: the parameters that the baseline trains.
        optimizer_peak_bytes: peak of the baseline while its optimizer steps.
        state_bytes: size of the baseline's optimizer state.
    """
    if any(decision.keeps_parameters_on_host for decision in workload.sharding):
        return 0
    shards = max((decision.divides_parameters_by for decision in workload.sharding), default=1)
    parameter_bytes = sum(map(stored_bytes, workload.model.parameters())) // shards
    if workload.step is not None:  # while one of its optimizers steps, activations may be alive and gradients be freed
        return parameter_bytes
    frozen = {id(p) for name in set(frozen_modules_of(config)) for p in workload.model.get_submodule(name).parameters()}
    still_trained = trained.without(frozen)
    eight_bit = any(decision.eight_bit_state for decision in config)
    in_backward = any(decision.steps_in_backward for decision in config)
    without_temporaries = in_backward or optimizer_kernel_of(config) is not None
    if not frozen and not eight_bit and not without_temporaries:
        return optimizer_peak_bytes
    # Parameters are always alive, and so are all gradients unless the backward frees each of them.
    least_bytes = parameter_bytes
    if not in_backward:
        least_bytes += sum(p.numel() * p.itemsize for p in still_trained.with_gradient) // shards
    if eight_bit:
        return least_bytes + least_state_bytes(workload.model, still_trained.with_state)
    # If the state is not known to be proportional to the parameters that have state, no state is counted.
    if len(trained.with_state) < len(trained.with_gradient):
        return least_bytes
    if frozen and not _state_is_proportional(workload, trained):
        return least_bytes
    share = sum(p.numel() for p in still_trained.with_state) / sum(p.numel() for p in trained.with_state)
    if without_temporaries:
        return least_bytes + int(_ROUNDING * share * state_bytes)
    return parameter_bytes + int(_ROUNDING * share * (optimizer_peak_bytes - parameter_bytes))


def _state_is_proportional(workload: Workload, trained: TrainedParameters) -> bool:
    """True if the optimizer's state is known to be proportional to the number of parameters that it holds."""
    groups = getattr(workload.optimizer, "param_groups", ())  # groups may have options that differ in their state
    dtypes = {parameter.dtype for parameter in trained.with_state}
    return keeps_alike(kind_of(workload.optimizer)) and len(groups) < 2 and len(dtypes) == 1
