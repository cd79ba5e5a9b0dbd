"""Find where memory ran out: the op that asked for memory, its module and phase, and what the memory was used for."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclasses.dataclass(frozen=True, kw_only=True)
class OomLocation:
    """The place in a training step where an allocation failed."""

    phase: str
    """'forward', 'backward', 'recompute' or 'optimizer'."""
    module: str
    """The innermost module whose forward was running or being recomputed; '' if there was none."""
    op: str
    """The op whose allocation failed, such as 'aten.mm.default'."""
    alive: dict[str, int]
    """Bytes that were in use, by purpose: 'parameters' (with buffers), 'gradients', 'optimizer state', and 'the rest'
    for all other tensors, such as activations."""


class OomLocator(TorchDispatchMode):
    """Records where the first out-of-memory error of a training step occurs. The error is raised as usual.

    Under a dispatch mode some ops use a little more memory (autograd accumulates gradients out of place). Therefore use
    this mode in a second run, after a run without it has run out of memory.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, allocated_bytes: Callable[[], int]
    ) -> None:
        super().__init__()
        self.location: OomLocation | None = None
        """Location of the first failed allocation; None until an op has run out of memory."""
        self._model, self._optimizer, self._allocated_bytes = model, optimizer, allocated_bytes
        self._names = {id(module): name for name, module in model.named_modules()}
        self._running: list[str] = []
        self._updates = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which the mode is active, with hooks that track which module and phase is running."""
        hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            self._optimizer.register_step_pre_hook(lambda *_: self._update(True)),
            self._optimizer.register_step_post_hook(lambda *_: self._update(False)),
        ]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        try:
            return op(*args, **(kwargs or {}))
        except torch.OutOfMemoryError:
            if self.location is None:  # code that handles the first error may run out of memory again
                self.location = self._here(str(op))
            raise

    def _here(self, op: str) -> OomLocation:
        alive = bytes_by_purpose(self._model, (self._optimizer,), self._allocated_bytes())
        return OomLocation(phase=self._phase(), module=self._running[-1] if self._running else "", op=op, alive=alive)

    def _phase(self) -> str:
        if self._updates:
            return "optimizer"
        if torch._C._current_graph_task_id() == -1:  # no backward is running
            return "forward"
        return "recompute" if self._running else "backward"

    def _enter(self, module: torch.nn.Module, _: object) -> None:
        if id(module) in self._names:
            self._running.append(self._names[id(module)])

    def _leave(self, module: torch.nn.Module, *_: object) -> None:
        if id(module) in self._names and self._running:
            self._running.pop()

    def _update(self, begins: bool) -> None:
        self._updates = begins


def bytes_by_purpose(
    model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer], allocated_bytes: int
) -> dict[str, int]:
    """Return the bytes in use by purpose, as in `OomLocation.alive`."""
    alive = {
        "parameters": _size_of((*model.parameters(), *model.buffers())),
        "gradients": _size_of(p.grad for p in model.parameters() if p.grad is not None),
        "optimizer state": _size_of(tree_leaves([list(optimizer.state.values()) for optimizer in optimizers])),
    }
    return {**alive, "the rest": max(allocated_bytes - sum(alive.values()), 0)}


def _size_of(values: Iterable[object]) -> int:
    """Return the bytes of the storages of all tensors among the values, counting each storage once."""
    storages = {
        value.untyped_storage()._cdata: value.untyped_storage().nbytes()
        for value in values
        if isinstance(value, torch.Tensor) and value.layout is torch.strided
    }
    return sum(storages.values())
