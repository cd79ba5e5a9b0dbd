"""Records the tensors that autograd saves for backward, and replaces them by placeholders, in a what-if recording.

A placeholder holds no memory, so the recorded life of a storage is the time for which anything but autograd keeps it.
The `Save` of a tensor has the ticks at which autograd packs it, first unpacks it and releases it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.utils.checkpoint

from planner.recording.module_calls import TAKES_GRADIENTS, TRANSFORMED, ModuleCalls
from planner.recording.step_graph import Category, Save
from planner.recording.storage_table import StorageTable, local_part
from planner.virtual_gpu import sparse_tensors
from planner.virtual_gpu.values.shadow_values import ShadowValues


class OpRecorder(Protocol):
    """The attributes of `Recorder` that `SavedTensors` needs."""

    sequence: int
    """Number of nodes that autograd had created when the last op that made or changed a storage had run."""

    def pause(self) -> AbstractContextManager[None]:
        """Returns a context manager; ops inside the `with` block run without being recorded."""


class _SavedPlaceholder:
    """Takes the place of a saved tensor. It has the dtype, layout and known values, to make an equal fake tensor."""

    __slots__ = ("dtype", "offset", "read_in", "save", "shadow", "shape", "spec", "stride", "table")

    def __init__(
        self, table: StorageTable, known: ShadowValues, tensor: torch.Tensor, save: Save, *, spec: Any
    ) -> None:
        self.spec = spec
        """The layout of a DTensor whose local part was saved; None for a plain tensor."""
        self.table, self.save, self.read_in = table, save, -1
        self.shadow = known.shadow(tensor)
        self.shape, self.stride, self.offset, self.dtype = (
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
        )

    def __del__(self) -> None:
        self.save.release = self.table.next_tick()


class _KeptTensor:
    """A saved tensor that is kept and not replaced (parameter, input or host tensor). Its ticks are recorded too."""

    __slots__ = ("read_in", "save", "table", "tensor")

    def __init__(self, table: StorageTable, tensor: torch.Tensor, save: Save) -> None:
        self.table, self.tensor, self.save, self.read_in = table, tensor, save, -1

    def __del__(self) -> None:
        self.save.release = self.table.next_tick()


class SavedTensors:
    """Pack and unpack hooks for `torch.autograd.graph.saved_tensors_hooks`. They record one `Save` per saved tensor."""

    def __init__(self, recorder: OpRecorder, table: StorageTable, calls: ModuleCalls, known: ShadowValues) -> None:
        self.all: list[Save] = []
        """Every save so far, in the order in which autograd packed the tensors."""
        self._recorder, self._table, self._calls, self._known = recorder, table, calls, known

    def install(self) -> None:
        """Remove saved-tensor hooks while a transform of torch.func computes gradients: it raises if there are any.

        The calls that are running get an obstacle, because recomputing and offloading need hooks too. A checkpoint of
        the user's own gets its inputs back as without hooks. This replaces functions of torch, so it must be called in
        a child process only.
        """
        let_checkpoints_get_the_same_inputs()
        disable = torch.autograd.graph.disable_saved_tensors_hooks

        @functools.wraps(disable)
        @contextlib.contextmanager
        def disable_without_hooks(message: str) -> Iterator[None]:
            self._calls.note_obstacle(self._calls.innermost[1], TRANSFORMED)
            removed = []
            while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
                removed.append(top)
                torch._C._autograd._pop_saved_tensors_default_hooks()
            try:
                with disable(message):
                    yield
            finally:
                for hooks in reversed(removed):
                    torch._C._autograd._push_saved_tensors_default_hooks(*hooks)

        torch.autograd.graph.disable_saved_tensors_hooks = disable_without_hooks  # type: ignore[assignment]  # a patch

    def pack(self, saved: torch.Tensor) -> _SavedPlaceholder | _KeptTensor:
        """Called by autograd when it saves a tensor. Returns the object that autograd saves instead."""
        tensor = local_part(saved)
        storage = self._table.storage_of(tensor) if not tensor.is_sparse else None
        known = None if storage is None else self._table.storages[storage]
        # FSDP2 frees and gathers unsharded parameters whatever autograd keeps.
        is_permanent = known is None or known.op is None or known.category is Category.UNSHARDED
        # Autograd keeps a parameter itself, whose data the program may replace before backward (`weight.data = ...`).
        is_parameter = isinstance(saved, torch.nn.Parameter) or (saved.is_leaf and saved.requires_grad)
        is_kept = not is_permanent and is_parameter
        save = Save(
            storage=None if is_permanent or is_kept else storage,
            pack=self._table.next_tick(),
            unpack=None,
            release=None,
            call=self._calls.innermost[1],
            is_of_next_op=torch.autograd._get_sequence_nr() != self._recorder.sequence,
        )
        self.all.append(save)
        if saved.is_leaf:
            self._calls.saves(saved)
        if is_kept:
            return _KeptTensor(self._table, saved, save)
        if is_permanent:
            with self._recorder.pause():
                kept = sparse_tensors.detached(saved) if tensor.is_sparse else saved.detach()
                return _KeptTensor(self._table, kept, save)
        return _SavedPlaceholder(self._table, self._known, tensor, save, spec=getattr(saved, "_spec", None))

    def unpack(self, packed: _SavedPlaceholder | _KeptTensor) -> torch.Tensor:
        """Called by autograd when backward reads a saved tensor. Returns the kept tensor, or a new one like it."""
        save = packed.save
        if self._calls.innermost[1] is not None:
            self._calls.note_obstacle(save.call, TAKES_GRADIENTS)
        graph_task = torch._C._current_graph_task_id()
        if save.unpack is None:
            save.unpack, packed.read_in = self._table.next_tick(), graph_task
        elif save.again is None and packed.read_in != graph_task:
            save.again = self._table.next_tick()
        if isinstance(packed, _KeptTensor):
            return packed.tensor
        assert save.storage is not None  # `pack` keeps tensors without one
        with self._recorder.pause():
            elements = math.ceil(self._table.storages[save.storage].size_bytes / packed.dtype.itemsize)
            base = torch.empty(elements, dtype=packed.dtype, device=self._table.device)
            self._table.storage_of(base, adopt=save.storage)
            self._known.take_over(base, packed.shadow)
            local = base.as_strided(packed.shape, packed.stride, packed.offset)
            return local if packed.spec is None else _as_dtensor(local, packed.spec)


def let_checkpoints_get_the_same_inputs() -> None:
    """Lets `torch.utils.checkpoint` save a tensor once that it gets several times, as in `checkpoint(attn, x, x, x)`.

    Without hooks the function gets the same object several times when it runs again. With hooks it would get several
    objects, and `torch.nn.MultiheadAttention` runs other ops if query, key and value are not the same object.
    """
    frame: Any = torch.utils.checkpoint._CheckpointFrame
    if not hasattr(frame, "save_inputs") or hasattr(frame, "places"):  # before torch 2.13, or done already
        return
    save, get = frame.save_inputs, frame.get_inputs

    def save_once(self: Any, *inputs: Any) -> None:
        each = {id(value): value for value in inputs}
        numbers = {key: number for number, key in enumerate(each)}
        self.places = [numbers[id(value)] for value in inputs]
        save(self, *each.values())

    def get_each(self: Any) -> list[Any]:
        values = get(self)
        return [values[place] for place in self.places]

    frame.save_inputs, frame.get_inputs, frame.places = save_once, get_each, ()


def _as_dtensor(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """Returns a DTensor with the layout of another one, and `local` as the part of this rank."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, spec.mesh, spec.placements, run_check=False, shape=spec.tensor_meta.shape, stride=spec.tensor_meta.stride
    )
