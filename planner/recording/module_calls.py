"""Records the forward calls of a model's modules as a tree, with the reasons why a call must not be run twice."""

from __future__ import annotations

import weakref
from bisect import bisect, bisect_left
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from planner.recording.given_containers import GivenContainers
from planner.recording.host_tensors import HostTensors
from planner.recording.module_state import (
    attributes_of,
    changed_state,
    is_compiled,
    memory_of,
    memory_of_own,
    module_state,
)
from planner.recording.step_graph import Call, Op, Phase, StepGraph
from planner.recording.storage_table import StorageTable, local_part

# Obstacles: reasons why a call must not be run twice. "It" is the module.
COMPILED = "it runs compiled, or inside of a compiled module"
_WITHOUT_FORWARD = "its class does not define a forward"
WITHOUT_GRADIENTS = "it runs without gradients"
OWN_GENERATOR = "it draws from its own random generator, whose state would differ in a second run"
TAKES_GRADIENTS = "its backward runs already during the model's forward"
REPLACED = "its parameters are replaced for this call, as torch.func.functional_call does"
REPLACED_DATA = "the data of a tensor that it saves for backward is replaced after it has been saved"
TRANSFORMED = "it runs inside of a transform of torch.func, or calls one that takes gradients"
NO_REPLAY = frozenset({COMPILED, _WITHOUT_FORWARD, WITHOUT_GRADIENTS, TAKES_GRADIENTS, TRANSFORMED})
"""Obstacles that also forbid a replay, which runs the recorded ops of the forward again but no Python code."""


class ModuleCalls:
    """Sets hooks on modules, which record a `Call` for every forward.

    A forward that runs again inside backward (a recomputation) gets no `Call`. Its ops are attributed to its module.

    Args:
        table: the storages of the watched device, and the clock.
        enters_model: called whenever a forward of the whole model begins.
    """

    def __init__(self, table: StorageTable, enters_model: Callable[[], None]) -> None:
        self.all: list[Call] = []
        """Every call so far, in the order in which the calls began."""
        self._table = table
        self._enters_model = enters_model
        self._stack: list[tuple[str, int | None]] = []
        self._parameters: dict[torch.nn.Module, list[int]] = {}
        """Identities of the parameters that each module has itself, when its hooks were set. Modules with shards are
        left out: FSDP2 replaces these for each call."""
        self._states: list[dict[str, object]] = []
        self._given: list[GivenContainers | None] = []
        self._before: list[tuple[int, torch.nn.Module, dict[str, object]]] = []
        """Calls in the running forward of the model: index of the call, module, and its attributes before the call."""
        self._until_backward: list[tuple[int, torch.nn.Module, dict[str, object]]] = []
        """The same for the forwards of the model that have ended, in a step of the user's own."""
        self._saved_leaves: list[tuple[int, weakref.ref[torch.Tensor], int | None]] = []
        """Leaves that autograd saved for the next backward: index of the call, tensor, and its memory at that time."""
        self._host_tensors = HostTensors(table.device, self.all)
        self.of_own_step = False
        """True for a step of the user's own, which may change modules between a forward and its backward."""

    @property
    def innermost(self) -> tuple[str, int | None]:
        """Path of the innermost running module, and its call as an index into `all`.

        The path is '' outside of the model. The call is None there, and in a recomputation.
        """
        return self._stack[-1] if self._stack else ("", None)

    @property
    def are_running(self) -> bool:
        """True if a module's forward is running."""
        return bool(self._stack)

    def location(self) -> str:
        """Returns text for an error message that says which module is running, such as "in module 'encoder'"."""
        return f"in module '{self._stack[-1][0] or 'the model itself'}'" if self._stack else "outside of the model"

    def hooks(self, name: str, module: torch.nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
        """Registers the hooks on one module and returns their handles.

        They are functions: a step may deep-copy the module, and a copied bound method would have its own `ModuleCalls`.
        A call of a unit of FSDP2 begins when its parameters are gathered, and ends before they are freed: a second run
        of its forward does neither. The hooks by which tensor parallelism gathers the inputs of a module, and divides
        its outputs, are outside of its call for the same reason.
        """
        has_hooks = bool(module._forward_pre_hooks or module._forward_hooks)
        is_inside = _is_unit(module) or (has_hooks and _divides_modules())
        if all(p is None or local_part(p) is p for p in module._parameters.values()):
            self._parameters[module] = [id(parameter) for parameter in module._parameters.values()]
        return [
            module.register_forward_pre_hook(self._entering(name), with_kwargs=True, prepend=not is_inside),
            module.register_forward_hook(self._leaving(), always_call=True, prepend=is_inside),
        ]

    def note_obstacle(self, call: int | None, obstacle: str) -> None:
        """Records why this call, and every call around it, must not be run twice."""
        while call is not None:
            self.all[call].obstacle = self.all[call].obstacle or obstacle
            call = self.all[call].parent

    def _entering(self, name: str) -> Callable[[torch.nn.Module, tuple, dict], None]:
        """Returns the hook that runs before every forward of one module and begins a `Call`."""

        def enter(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            self._given.append(GivenContainers(args, kwargs) if _is_unit(module) else None)
            if torch._C._current_autograd_node() is not None:  # a recomputation inside backward
                self._stack.append((name, None))
                return
            _, parent = self.innermost
            if not self._stack:
                self._enters_model()
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            storages = [self._table.storage_of(local_part(tensor)) for tensor in tensors]
            inputs = {storage for storage in storages if storage is not None}
            # If a tensor is passed twice, a second run gets two copies of it, and the module could see the difference.
            each_once = len(set(map(id, tensors))) == len(tensors)
            made_inputs = {
                storage
                for tensor, storage in zip(tensors, storages, strict=True)
                if storage is not None and tensor.grad_fn is not None and each_once
            }
            call = Call(
                module=name,
                parent=parent,
                start=self._table.next_tick(),
                end=0,
                inputs=tuple(sorted(inputs)),
                made_inputs=tuple(sorted(made_inputs)),
                obstacle=self._obstacle(module, parent),
                has_hooks=max(len(module._forward_pre_hooks), len(module._forward_hooks)) > 1 + _is_unit(module),
            )
            self._stack.append((name, len(self.all)))
            self._states.append(module_state(module))
            self._before.append((len(self.all), module, self._attributes_of(module)))
            self.all.append(call)

        return enter

    def _obstacle(self, module: torch.nn.Module, parent: int | None) -> str | None:
        """Returns the obstacle that is already known before the forward runs; None if there is none."""
        if is_compiled(module) or (parent is not None and self.all[parent].obstacle == COMPILED):
            return COMPILED
        if getattr(type(module).forward, "__name__", "") == "_forward_unimplemented":
            return _WITHOUT_FORWARD
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return TRANSFORMED
        if not torch.is_grad_enabled():
            return WITHOUT_GRADIENTS
        known = ((part, self._parameters.get(part)) for part in module.modules())
        replaced = any(
            ids is not None and ids != [id(parameter) for parameter in part._parameters.values()] for part, ids in known
        )
        return REPLACED if replaced else None

    def _leaving(self) -> Callable[[torch.nn.Module, tuple, Any], None]:
        """Returns the hook that runs after the forward of every module, even if the forward raises; ends the `Call`."""

        def leave(module: torch.nn.Module, args: tuple, output: Any) -> None:
            name, call = self._stack.pop()
            if (given := self._given.pop()) is not None:
                given.refuse_changes(name)
            if call is not None:
                self.all[call].end = self._table.next_tick()
                if (changed := changed_state(self._states.pop(), module_state(module))) is not None:
                    self.note_obstacle(call, f"it changes {changed}")
            if not self._stack:
                self._model_ends()

        return leave

    def _model_ends(self) -> None:
        """Notes calls whose modules are no longer in the state in which they ran, so that a second run would differ.

        A caller may set an attribute for one call, or put the module into evaluation mode.
        """
        self._note_changed(self._before)
        self._note_replaced_data()
        if self.of_own_step:
            self._until_backward += (known for known in self._before if self.all[known[0]].obstacle is None)
        self._before.clear()

    def backward_begins(self) -> None:
        """Notes calls whose modules the step has changed since their forward."""
        self._note_changed(self._until_backward)
        self._note_replaced_data()
        self._forget()

    def setup_ends(self) -> None:
        """Forgets all calls so far."""
        self.all.clear()
        self._forget()

    def _forget(self) -> None:
        self._saved_leaves.clear()
        self._until_backward.clear()
        self._host_tensors.forget()

    def notes_op(self, tick: int, written: object, read: object, made: object) -> None:
        """Notes the tensors in host memory among the arguments and results of an op, which began at this tick."""
        self._host_tensors.note(self.innermost[1], tick, written, read, made)

    def saves(self, leaf: torch.Tensor) -> None:
        """Notes that autograd saves a leaf in the innermost call. It keeps the tensor, and not the tensor's memory.

        A forward may set `.data` of a weight for one op and set it back. Backward then reads the data that was set
        back, but a second run would save the other data.
        """
        if (call := self.innermost[1]) is not None:
            self._saved_leaves.append((call, weakref.ref(leaf), memory_of(leaf)))

    def _note_replaced_data(self) -> None:
        for call, reference, before in self._saved_leaves:
            leaf = reference()
            if leaf is not None and memory_of(leaf) != before:
                self.note_obstacle(call, REPLACED_DATA)

    def _attributes_of(self, module: torch.nn.Module) -> dict[str, object]:
        parts = ((name, part) for name, part in module.named_modules() if part in self._parameters)
        return attributes_of(module) | {
            f"the memory of its {name}": memory for path, part in parts for name, memory in memory_of_own(part, path)
        }

    def _note_changed(self, calls: Iterable[tuple[int, torch.nn.Module, dict[str, object]]]) -> None:
        for call, module, before in calls:
            now = self._attributes_of(module)
            if (changed := changed_state(before, now) or changed_state(now, before)) is not None:
                self.note_obstacle(call, f"{changed} changes after it has run")


def _divides_modules() -> bool:
    """True if the process is one of several among which modules may be divided."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _is_unit(module: torch.nn.Module) -> bool:
    """True if FSDP2 gathers the parameters of the module before each forward, by one hook before and one after it."""
    return hasattr(module, "_get_fsdp_state")


def ops_in(graph: StepGraph, call: int) -> list[int]:
    """Returns the indices of a call's ops that make or change a storage, in execution order.

    The number of an op in a segment is its position in this list.
    """
    ops = graph.ops
    first = bisect(ops, graph.calls[call].start, key=_tick_of)
    last = bisect_left(ops, graph.calls[call].end, lo=first, key=_tick_of)
    return [index for index in range(first, last) if ops[index].phase is Phase.FORWARD and ops[index].makes_or_changes]


def _tick_of(op: Op) -> int:
    return op.tick
