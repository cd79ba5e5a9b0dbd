"""The forward calls of a model's modules, nested as they ran, and what speaks against running one of them twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from planner.recording.module_state import changed_state, is_compiled, module_state
from planner.recording.step_graph import Call

if TYPE_CHECKING:
    from planner.recording.recorder import Recorder

COMPILED = "it runs compiled, or inside of what is compiled"
_WITHOUT_FORWARD = "its class has no forward of its own"
_WITHOUT_GRADIENTS = "it runs without gradients"
OWN_GENERATOR = "it draws from a generator of its own, which a second run would find moved on"
TAKES_GRADIENTS = "its parent takes gradients of it in its own forward"
NO_REPLAY = frozenset({COMPILED, _WITHOUT_FORWARD, _WITHOUT_GRADIENTS, TAKES_GRADIENTS})
"""Obstacles even where ops are run again and Python is not."""


class ModuleCalls:
    """Hooks on modules that write `Call`s; a recomputation in backward is followed, but is no call of its own."""

    def __init__(self, recorder: Recorder) -> None:
        self.all: list[Call] = []
        self._recorder = recorder
        self._stack: list[tuple[str, int | None]] = []
        self._states: list[dict[str, object]] = []

    @property
    def innermost(self) -> tuple[str, int | None]:
        """The running module, and its call as an index into `all`; None for a recomputation."""
        return self._stack[-1] if self._stack else ("", None)

    @property
    def are_running(self) -> bool:
        return bool(self._stack)

    def place(self) -> str:
        """Where the model is now, for people."""
        return f"in module '{self._stack[-1][0] or 'the model itself'}'" if self._stack else "outside of the model"

    def hooks(self, name: str, module: torch.nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
        return [
            module.register_forward_pre_hook(self._entering(name), with_kwargs=True, prepend=True),
            module.register_forward_hook(self._leaving, always_call=True),
        ]

    def note_obstacle(self, call: int | None, obstacle: str) -> None:
        """A second run of this call, or of one that contains it, would not be like the first."""
        while call is not None:
            self.all[call].obstacle = self.all[call].obstacle or obstacle
            call = self.all[call].parent

    def _entering(self, name: str):
        def enter(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            if torch._C._current_autograd_node() is not None:
                self._stack.append((name, None))
                return
            _, parent = self.innermost
            if not self._stack:
                self._recorder.enters_model()
            storage_of = self._recorder.storage_of
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            inputs = {storage_of(tensor) for tensor in tensors}
            given_once = len(set(map(id, tensors))) == len(tensors)  # a second run may ask which of them are the same
            made = {storage_of(tensor) for tensor in tensors if tensor.grad_fn is not None and given_once}
            call = Call(
                module=name,
                parent=parent,
                start=self._recorder.next_tick(),
                end=0,
                inputs=tuple(sorted(inputs - {None})),
                made_inputs=tuple(sorted(made - {None})),
                obstacle=self._obstacle(module, parent),
                has_hooks=max(len(module._forward_pre_hooks), len(module._forward_hooks)) > 1,  # one is ours
            )
            self._stack.append((name, len(self.all)))
            self._states.append(module_state(module))
            self.all.append(call)

        return enter

    def _obstacle(self, module: torch.nn.Module, parent: int | None) -> str | None:
        """What is known before the call."""
        if is_compiled(module) or (parent is not None and self.all[parent].obstacle == COMPILED):
            return COMPILED
        if getattr(type(module).forward, "__name__", "") == "_forward_unimplemented":
            return _WITHOUT_FORWARD
        return None if torch.is_grad_enabled() else _WITHOUT_GRADIENTS

    def _leaving(self, module: torch.nn.Module, args: tuple, output: Any) -> None:
        _, call = self._stack.pop()
        if call is not None:
            self.all[call].end = self._recorder.next_tick()
            if (changed := changed_state(self._states.pop(), module_state(module))) is not None:
                self.note_obstacle(call, f"it changes {changed}")
