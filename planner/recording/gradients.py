"""Gradients and the updates that use them: after the backward, or one by one inside of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from planner.recording.step_graph import Category, Op

if TYPE_CHECKING:
    from planner.recording.recorder import Recorder


class Updates:
    """Hooks on parameters and the optimizer that say what gradients and state are, and when an update runs."""

    def __init__(self, recorder: Recorder) -> None:
        self.running = False
        self.in_setup = True
        self._recorder = recorder
        self._state: dict[torch.nn.Parameter, Any] = {}
        self._names: dict[int, str] = {}
        self._held: set[int] = set()
        self._sparse: dict[str, bool] = {}  # by parameter that got a gradient
        self._waiting: list[torch.nn.Parameter] = []  # those that got a gradient since the last update
        self._updated: dict[int, str] = {}  # storages of parameters that this step has updated inside of its backward
        self._began: int | None = None
        self._in_backward = False

    @property
    def trained(self) -> tuple[str, ...]:
        """Parameters that got a gradient."""
        return tuple(self._sparse)

    @property
    def tick(self) -> int | None:
        """When the last update began; None if it cannot be told from the backward, or needs what only that makes."""
        return None if any(self._sparse.values()) else self._began

    def hooks(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> list[torch.utils.hooks.RemovableHandle]:
        self._state = optimizer.state
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [
            *(
                parameter.register_post_accumulate_grad_hook(self._got_gradient)
                for parameter in model.parameters()
                if parameter.requires_grad
            ),
            register_optimizer_step_pre_hook(self._starts),
            register_optimizer_step_post_hook(self._ends),
        ]

    def note_trained(self, names: Iterable[str]) -> None:
        """Say which parameters have a gradient, where no backward will."""
        self._sparse.update(dict.fromkeys(names, False))

    def starts_step(self) -> None:
        self._updated.clear()

    def check(self, op: Op) -> None:
        """What reads a parameter after its update, while the backward still runs, does not compute what it should."""
        for storage in op.inputs if self._updated and not self.running and not op.is_view else ():
            if storage in self._updated:
                raise self._recorder.data_dependence.refusal(
                    f"parameter '{self._updated[storage]}' is read by {op.name} after its update in backward",
                    "forbid step-in-backward",
                )

    def idle_state(self) -> set[int]:
        """Storages of state that was primed for parameters which then got no gradient: a real step makes none."""
        states = (state for p, state in self._state.items() if self._names.get(id(p)) not in self._sparse)
        tensors = (value for state in states for value in state.values() if isinstance(value, torch.Tensor))
        return {index for tensor in tensors if (index := self._recorder.storage_of(tensor)) is not None}

    def _got_gradient(self, parameter: torch.nn.Parameter) -> None:
        self._recorder.mark(parameter.grad, Category.GRADIENT)
        self._sparse[self._names[id(parameter)]] = parameter.grad.is_sparse
        if id(parameter) in self._held:
            self._waiting.append(parameter)

    def _starts(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        self.running = True
        if not self.in_setup:
            self._in_backward = torch._C._current_autograd_node() is not None
            self._began = None if self._in_backward else self._recorder.next_tick()

    def _ends(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        self.running = False
        updated, self._waiting = self._waiting, []
        if self._in_backward:
            self._updated.update((self._recorder.storage_of(p), self._names[id(p)]) for p in updated)
        for parameter in updated if self._in_backward else tuple(optimizer.state):
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor):
                    self._recorder.mark(value, Category.OPTIMIZER_STATE)
