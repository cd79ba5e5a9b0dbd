"""Records gradients and the parameter updates that use them, after the backward or inside of it (step in backward)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from planner.recording.step_graph import Category, Op
from planner.recording.storage_table import StorageTable
from planner.virtual_gpu.data_dependence import DataDependence


class Updates:
    """Sets hooks on parameters and optimizers, and records gradients and updates.

    The hooks set the categories of gradients and optimizer state, and note the tick at which an update begins.

    Args:
        table: the storages of the watched device, and the clock.
        data_dependence: creates the error for a step that reads a parameter after its update.
    """

    def __init__(self, table: StorageTable, data_dependence: DataDependence) -> None:
        self.running = False
        """True while `optimizer.step` runs."""
        self.in_setup = True
        """True before the first recorded step. Updates then only create optimizer state, and are not noted."""
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
        """Names of the parameters that received a gradient, or were declared to have one (`note_trained`)."""
        return tuple(self._is_sparse)

    @property
    def tick(self) -> int | None:
        """Tick at which the last update began; None if there was none, or it cannot be separated from the backward.

        It cannot be separated if it ran inside the backward, or read a sparse gradient: only a backward creates those.
        """
        return None if any(self._is_sparse.values()) else self._began

    def hooks(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> list[torch.utils.hooks.RemovableHandle]:
        """Registers the hooks on the model's parameters and on all optimizers, and returns the handles of the hooks."""
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
        """Declares which parameters have a gradient. It is for a step without a backward, which cannot show them."""
        self._is_sparse.update(dict.fromkeys(names, False))

    def starts_step(self) -> None:
        """Begins a step: forgets which parameters the previous step has updated."""
        self._updated.clear()

    def check(self, op: Op) -> None:
        """Raises `RehearsalError` if the op reads a parameter that was already updated inside the same backward.

        The op would compute with the new value of the parameter, but the original training step uses the old value.
        """
        for storage in op.inputs if self._updated and not self.running and not op.is_view else ():
            if storage in self._updated:
                raise self._data_dependence.refusal(
                    f"parameter '{self._updated[storage]}' is read by {op.name} after its update in backward, "
                    "so the op would compute with the new value",
                    "plan with --forbid step-in-backward",
                )

    def idle_state(self) -> set[int]:
        """Returns the storages of optimizer state that belongs to parameters without a gradient.

        Priming creates state for every parameter; a real step creates none for these parameters.
        """
        states = (state for p, state in self._state.items() if self._names.get(id(p)) not in self._is_sparse)
        tensors = (value for state in states for value in state.values() if isinstance(value, torch.Tensor))
        return {index for tensor in tensors if (index := self._table.storage_of(tensor)) is not None}

    def _got_gradient(self, parameter: torch.Tensor) -> None:
        """Hook of a parameter, which autograd calls after it has accumulated into `parameter.grad`."""
        gradient = parameter.grad
        assert isinstance(parameter, torch.nn.Parameter) and gradient is not None  # autograd has just set it
        name = self._names[id(parameter)]
        self._table.mark(gradient, Category.GRADIENT, name=name)
        self._is_sparse[name] = gradient.is_sparse
        if id(parameter) in self._optimized:
            self._waiting.append(parameter)

    def _before_update(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Hook that runs before every `optimizer.step`."""
        self.running = True
        if not self.in_setup:
            self._in_backward = torch._C._current_autograd_node() is not None
            self._began = None if self._in_backward else self._table.next_tick()

    def _after_update(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Hook that runs after every `optimizer.step`."""
        self.running = False
        updated, self._waiting = self._waiting, []
        if self._in_backward:
            for weight in updated:
                if (storage := self._table.storage_of(weight)) is not None:
                    self._updated[storage] = self._names[id(weight)]
        # An update inside of backward uses the gradients of the waiting parameters; a later update uses all.
        parameters: Iterable[torch.Tensor] = updated if self._in_backward else tuple(optimizer.state)
        for parameter in parameters:
            owner = self._names.get(id(parameter), "")
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    self._table.mark(value, Category.OPTIMIZER_STATE, name=f"{owner} ({key})" if owner else str(key))
