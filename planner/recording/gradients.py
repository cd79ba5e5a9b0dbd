"""Records gradients and the parameter updates that use them, after the backward or inside of it (step in backward)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from planner.errors import WorkloadError
from planner.recording.step_graph import Category, Op
from planner.recording.storage_table import StorageTable, local_part
from planner.virtual_gpu.values.data_dependence import DataDependence


class Updates:
    """Sets hooks on parameters and optimizers, and records gradients and updates.

    The hooks set the categories of gradients and optimizer state, and note the tick at which an update begins.

    Args:
        table: the storages of the watched device, and the clock.
        data_dependence: creates the error for a step that reads a parameter after its update.
    """

    def __init__(self, table: StorageTable, data_dependence: DataDependence) -> None:
        self.in_backward = False
        """True if the update that runs, or ran last, began inside of a backward."""
        self.in_setup = True
        """True before the first recorded step. Updates then only create optimizer state, and are not noted."""
        self._table = table
        self._data_dependence = data_dependence
        self._depth = 0  # of nested calls of `optimizer.step`: an optimizer may wrap another one
        self._optimizers: Sequence[torch.optim.Optimizer] = ()
        self._names: dict[int, str] = {}
        self._optimized: set[int] = set()  # ids of the parameters that the optimizer updates
        self._is_sparse: dict[str, bool] = {}  # by name of each parameter that received a gradient
        self._waiting: list[torch.nn.Parameter] = []  # parameters with a gradient that no update has used yet
        self._updated: dict[int, str] = {}  # storage -> name of the parameters updated inside this step's backward
        self._began: int | None = None

    @property
    def running(self) -> bool:
        """True while `optimizer.step` runs."""
        return self._depth > 0

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
        self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, own_step: bool
    ) -> list[torch.utils.hooks.RemovableHandle]:
        """Registers the hooks on the model's parameters and on all optimizers, and returns the handles of the hooks.

        A step of the user's own may train a parameter that does not require a gradient yet, so it gets a hook, too.
        """
        self._optimizers = optimizers
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._optimized = {id(parameter) for optimizer in optimizers for parameter in _parameters_of(optimizer)}
        handles = []
        for parameter in model.parameters():
            trained = parameter.requires_grad
            if trained or (own_step and parameter.is_floating_point()):
                handles.append(parameter.requires_grad_().register_post_accumulate_grad_hook(self._got_gradient))
                parameter.requires_grad_(trained)
        return [
            *handles,
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
        known = (pair for optimizer in self._optimizers for pair in optimizer.state.items())
        states = (state for p, state in known if self._names.get(id(p)) not in self._is_sparse)
        tensors = (value for state in states for value in state.values() if isinstance(value, torch.Tensor))
        return {index for tensor in tensors if (index := self._table.storage_of(local_part(tensor))) is not None}

    def _got_gradient(self, parameter: torch.Tensor) -> None:
        """Hook of a parameter, which autograd calls after it has accumulated into `parameter.grad`."""
        gradient = parameter.grad
        assert isinstance(parameter, torch.nn.Parameter)
        if gradient is None:  # a hook of the model has used it and set it to None
            return
        name = self._names[id(parameter)]
        self._table.mark(gradient, Category.GRADIENT, name=name)
        self._is_sparse[name] = gradient.is_sparse
        if id(parameter) in self._optimized:
            self._waiting.append(parameter)

    def _before_update(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Hook that runs before every `optimizer.step`."""
        self._depth += 1
        # Parameters of the model are known by their identity, too: offloaded shards are not on the device.
        if not any(
            id(parameter) in self._names or self._table.watches(local_part(parameter))
            for parameter in _parameters_of(optimizer)
        ):
            raise WorkloadError(
                f"the step calls step() of {type(optimizer).__name__}, which has no parameter of the model: give this "
                "optimizer as optimizer=..., and use the one that the step function gets"
            )
        if not self.in_setup:
            self.in_backward = torch._C._current_autograd_node() is not None
            self._began = None if self.in_backward else self._table.next_tick()
            for parameter in _parameters_of(optimizer):
                # A step may set gradients itself, as `torch.autograd.grad` and FSDP2 do.
                if parameter.grad is not None and (name := self._names.get(id(parameter))) is not None:
                    self._table.mark(parameter.grad, Category.GRADIENT, name=name)
                    self._is_sparse.setdefault(name, parameter.grad.is_sparse)

    def _after_update(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Hook that runs after every `optimizer.step`."""
        self._depth -= 1
        updated, self._waiting = self._waiting, []
        if self.in_backward:
            for weight in updated:
                if (storage := self._table.storage_of(local_part(weight))) is not None:
                    self._updated[storage] = self._names[id(weight)]
        # An update inside of backward uses the gradients of the waiting parameters; a later update uses all.
        parameters: Iterable[torch.Tensor] = updated if self.in_backward else tuple(optimizer.state)
        for parameter in parameters:
            owner = self._names.get(id(parameter), "")
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    self._table.mark(value, Category.OPTIMIZER_STATE, name=f"{owner} ({key})" if owner else str(key))


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


class Backwards:
    """Records for each running backward whether it builds a graph of itself (`create_graph=True`)."""

    def __init__(self) -> None:
        self._build_graphs: list[bool] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Returns a context manager that records the backwards that begin in it."""
        run = torch.autograd._engine_run_backward

        @functools.wraps(run)
        def noting(tensors, gradients, retain_graph, create_graph, *args, **kwargs):
            self._build_graphs.append(create_graph)
            try:
                return run(tensors, gradients, retain_graph, create_graph, *args, **kwargs)
            finally:
                self._build_graphs.pop()

        torch.autograd._engine_run_backward = noting  # type: ignore[assignment]  # a patch
        try:
            yield
        finally:
            torch.autograd._engine_run_backward = run

    def recompute(self, *, in_module: bool) -> bool:
        """True if the op that runs inside of a backward belongs to a recomputed forward.

        A recomputed forward builds nodes. So does a backward that builds a graph of itself.

        Args:
            in_module: True if the forward of a module is running.
        """
        if not torch.is_grad_enabled() or in_module or not (self._build_graphs and self._build_graphs[-1]):
            return torch.is_grad_enabled()
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
