"""Gradients and the updates that use them: after the whole backward, or inside of it (optimizer step in backward)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from planner.recording.step_graph import Category, Op
from planner.recording.storage_table import StorageTable
from planner.virtual_gpu.data_dependence import DataDependence


class Updates:
    """Hooks on parameters and the optimizer that classify gradients and optimizer state, and time the updates.

    Args:
        table: the storages of the watched device, and the clock.
        data_dependence: raises the error for a step that reads a parameter after its update.
    """

    def __init__(self, table: StorageTable, data_dependence: DataDependence) -> None:
        self.running = False
        """True while `optimizer.step` runs."""
        self.in_setup = True
        """True before the first recorded step, while optimizer state may be created."""
        self._table = table
        self._data_dependence = data_dependence
        self._state: Mapping[torch.Tensor, Any] = {}
        self._names: dict[int, str] = {}
        self._optimized: set[int] = set()  # ids of the parameters that the optimizer updates
        self._is_sparse: dict[str, bool] = {}  # by name of each parameter that received a gradient
        self._waiting: list[torch.nn.Parameter] = []  # parameters with a gradient that no update has used yet
        self._updated: dict[int, str] = {}  # storage -> name of the parameters updated inside this step's backward
        self._began: int | None = None
        self._in_backward = False

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the parameters that received a gradient."""
        return tuple(self._is_sparse)

    @property
    def tick(self) -> int | None:
        """Tick at which the last update began.

        None if the update cannot be separated from backward: it runs inside the backward, or it reads a sparse
        gradient, which only a backward can create.
        """
        return None if any(self._is_sparse.values()) else self._began

    def hooks(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> list[torch.utils.hooks.RemovableHandle]:
        """Registers the hooks on the parameters and on all optimizers, and returns their handles."""
        self._state = optimizer.state
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [
            *(
                parameter.register_post_accumulate_grad_hook(self._got_gradient)
                for parameter in model.parameters()
                if parameter.requires_grad
            ),
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]

    def note_trained(self, names: Iterable[str]) -> None:
        """Declares which parameters have a gradient, for a step without a backward."""
        self._is_sparse.update(dict.fromkeys(names, False))

    def starts_step(self) -> None:
        """Forgets the updates of the step before."""
        self._updated.clear()

    def check(self, op: Op) -> None:
        """Raises an error if the op reads a parameter that was already updated in the same backward.

        The op would compute with the new value, whereas the original training step uses the old value.
        """
        for storage in op.inputs if self._updated and not self.running and not op.is_view else ():
            if storage in self._updated:
                raise self._data_dependence.refusal(
                    f"parameter '{self._updated[storage]}' is read by {op.name} after its update in backward",
                    "forbid step-in-backward",
                )

    def idle_state(self) -> set[int]:
        """Storages of optimizer state that was primed for parameters without a gradient, unlike in a real step."""
        states = (state for p, state in self._state.items() if self._names.get(id(p)) not in self._is_sparse)
        tensors = (value for state in states for value in state.values() if isinstance(value, torch.Tensor))
        return {index for tensor in tensors if (index := self._table.storage_of(tensor)) is not None}

    def _got_gradient(self, parameter: torch.Tensor) -> None:
        """Called by autograd after it has accumulated into `parameter.grad`."""
        gradient = parameter.grad
        assert isinstance(parameter, torch.nn.Parameter) and gradient is not None  # autograd has just set it
        self._table.mark(gradient, Category.GRADIENT)
        self._is_sparse[self._names[id(parameter)]] = gradient.is_sparse
        if id(parameter) in self._optimized:
            self._waiting.append(parameter)

    def _before_update(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Pre-hook of every `optimizer.step`."""
        self.running = True
        if not self.in_setup:
            self._in_backward = torch._C._current_autograd_node() is not None
            self._began = None if self._in_backward else self._table.next_tick()

    def _after_update(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Post-hook of every `optimizer.step`."""
        self.running = False
        updated, self._waiting = self._waiting, []
        if self._in_backward:
            for weight in updated:
                if (storage := self._table.storage_of(weight)) is not None:
                    self._updated[storage] = self._names[id(weight)]
        # An update inside of backward uses the gradients of the waiting parameters; a later update uses all.
        parameters: Iterable[torch.Tensor] = updated if self._in_backward else tuple(optimizer.state)
        for parameter in parameters:
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor):
                    self._table.mark(value, Category.OPTIMIZER_STATE)
