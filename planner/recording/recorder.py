"""Writes down what a training step does on a device: ops, storages, saved tensors, module calls.

The device is the virtual GPU, or any other on which a step really runs: what is written down is the same.

Two kinds of recording:

- *plain*: everything lives exactly as long as PyTorch lets it.
- *what-if*: tensors that autograd saves are replaced by ghosts (shape, dtype, which storage), so that the lives
  that remain are those that Python holds, and each save is listed with its own life. From such a recording
  follows what would be alive if any set of module calls were checkpointed. With no unit checkpointed the two
  give the same curve, which is a test.

Deaths come from the storages' own finalizers, phases and modules from hooks and the autograd engine's node.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from planner.recording.categories import classify, note_obstacles
from planner.recording.flops import flops_of
from planner.recording.gradients import Updates
from planner.recording.module_calls import OWN_GENERATOR, ModuleCalls
from planner.recording.op_schema import (
    OpTraits,
    changed_arguments,
    draws_random_numbers,
    dtype_name,
    host_bytes,
    in_order_of_birth,
    kernel_call,
    moved_bytes,
    traits_of,
    uses_batch_statistics,
)
from planner.recording.saved_tensors import SavedTensors
from planner.recording.step_graph import Category, Op, Phase, Save, StepGraph, Storage
from planner.virtual_gpu import sparse_gradients
from planner.virtual_gpu.data_dependence import DataDependence
from planner.virtual_gpu.data_dependent_ops import run_data_dependent_op
from planner.virtual_gpu.in_place import InPlaceRule
from planner.virtual_gpu.kernels import KERNELS
from planner.virtual_gpu.shadow_values import nested_tensors
from planner.virtual_gpu.source_lines import source_line
from planner.workspaces import has_formula

_IGNORED_NAMESPACES = ("prim", "profiler")
_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)


class Recorder(TorchDispatchMode):
    """Active around the step.

    Args:
        device: type of the device whose memory is watched, such as 'vgpu' or 'cpu'.
        virtual: whether the tensors there are fakes. Real ones among fakes are constants of the host.
        what_if: the kind of recording.
        in_place: which ops count as in place although fakes get a copy.
    """

    def __init__(
        self, device: str, *, virtual: bool = True, what_if: bool, in_place: InPlaceRule | None = None
    ) -> None:
        super().__init__()
        self.device, self.virtual = device, virtual
        self.in_place = in_place
        self.what_if = what_if
        self.module_types: dict[str, str] = {}
        self.tick = 0
        self.ops: list[Op] = []
        self.storages: list[Storage] = []
        self.saves: list[Save] = []
        self.calls = ModuleCalls(self)
        self.updates = Updates(self)
        self.step = 0
        self.micro_batch = 0
        self.data_dependence = DataDependence(self.calls.place)
        self.sequence = -1
        """Autograd's count of nodes when the last op ran that made or changed a storage."""
        self._paused = False
        self._saved = SavedTensors(self)
        self._alive: dict[int, tuple[int, int, weakref.ref]] = {}  # storage pointer -> (id, birth, finalizer)
        self._seen_backward = False
        self._in_setup = True
        self._setup_tick = 0
        self._op_of_sequence: dict[int, int] = {}
        self._batch_statistics: dict[str, None] = {}
        self._buffers: dict[int, tuple[str, bool]] = {}
        self._writes: list[tuple[int, int, int | None]] = []  # (tick, storage, call) of in-place writes in forward

    # ---- time -------------------------------------------------------------------------------------------------

    def next_tick(self) -> int:
        self.tick += 1
        return self.tick

    # ---- storages ---------------------------------------------------------------------------------------------

    def _watches(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, FakeTensor) is self.virtual and tensor.device.type == self.device

    def storage_of(
        self, tensor: torch.Tensor, *, category: Category = Category.TEMPORARY, adopt: int | None = None
    ) -> int | None:
        """Index of a tensor's storage; it is registered (born now) if it is new. None if empty or elsewhere.

        `adopt` registers a new storage as another life of a known one.
        """
        if not self._watches(tensor) or tensor.layout is not torch.strided:
            return None
        untyped = tensor.untyped_storage()
        size_bytes = untyped.nbytes()
        if size_bytes == 0:
            return None
        pointer = untyped._cdata
        known = self._alive.get(pointer)
        if known is not None:
            return known[0]
        birth = self.next_tick()
        if adopt is None:
            index = len(self.storages)
            op = len(self.ops) - 1 if self.ops and not self._in_setup else None
            self.storages.append(Storage(size_bytes=size_bytes, lives=[], category=category, op=op))
        else:
            index = adopt

        def died(_: weakref.ref, pointer: int = pointer) -> None:
            dead, born, _finalizer = self._alive.pop(pointer)
            self.storages[dead].lives.append((born, self.next_tick()))

        self._alive[pointer] = (index, birth, weakref.ref(untyped, died))
        return index

    def mark(self, tensor: torch.Tensor | None, category: Category) -> None:
        """Say what a tensor is; a sparse one is its indices and its values."""
        if tensor is not None and tensor.is_sparse:
            for part in sparse_gradients.parts_of(tensor):
                if (index := self.storage_of(part)) is not None and self.storages[index].op is not None:
                    self.storages[index].category = category
        elif tensor is not None and (index := self.storage_of(tensor)) is not None:
            self.storages[index].category = category

    # ---- ops --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.prim.device.default:  # two thirds of all calls: C++ asks a fake for its device
            return args[0].fake_device
        kwargs = kwargs or {}
        if self._paused or op.namespace in _IGNORED_NAMESPACES:
            return op(*args, **kwargs)
        if kwargs.get("generator") is not None:
            self.calls.note_obstacle(self.calls.innermost[1], OWN_GENERATOR)
        if not self.virtual:
            return self._really(op, args, kwargs)
        if op is torch.ops.aten._local_scalar_dense.default and (value := self._scalar(args[0])) is not None:
            return value
        tick = self.next_tick()
        traits = traits_of(op)
        ran, out, scratch = False, None, ()
        if self.in_place is not None and self.in_place(op, args):
            self._note_op(op, traits, args, kwargs, args[0], tick)
            return args[0]
        try:
            kernel = KERNELS.get(op)
            if kernel is not None and any(self._watches(tensor) for tensor in nested_tensors(args)):
                with self.pause():
                    out, scratch = kernel(self.data_dependence, op, *args, **kwargs)
            else:
                if traits.asks_values:
                    ran, out, args = run_data_dependent_op(self.data_dependence, self._run, op, args, kwargs)
                if not ran:
                    out = op(*args, **kwargs)
        except _DATA_DEPENDENT:
            raise self.data_dependence.refusal(
                f"the result of {op} depends on values, and a rehearsal has none"
            ) from None
        except UnsupportedOperatorException:
            raise self.data_dependence.refusal(
                f"{op} has no fake kernel (register one with torch.library.register_fake)"
            ) from None
        if not ran and not (traits.is_view and isinstance(args[0], FakeTensor)):
            self.data_dependence.known.follow(op, args, kwargs, out, traits.written_arguments(args, kwargs))
        if isinstance(out, torch.Tensor) and out.is_sparse:
            sparse_gradients.hold_parts(out, nested_tensors((args, kwargs)))
            self.data_dependence.assume((sparse_gradients.ASSUMED_TEMPORARIES,))
        self._note_op(op, traits, args, kwargs, out, tick)
        for tensor in scratch:
            self.storage_of(tensor)
        return out

    def _really(self, op, args, kwargs):
        """An op on real tensors is only written down."""
        if op is torch.ops.aten._local_scalar_dense.default:
            return op(*args, **kwargs)
        tick = self.next_tick()
        out = op(*args, **kwargs)
        self._note_op(op, traits_of(op), args, kwargs, out, tick)
        return out

    def _scalar(self, tensor: torch.Tensor) -> float | bool | None:
        """The answer to `.item()`; None where it is left to the fake mode, which knows constants on the host."""
        return (
            self.data_dependence.scalar_or_refuse(tensor)
            if self._watches(tensor)
            else self.data_dependence.scalar(tensor)
        )

    def _note_op(self, op, traits: OpTraits, args, kwargs, out, tick: int) -> None:
        read = [leaf for leaf in nested_tensors((args, kwargs)) if self._watches(leaf)]
        written = [leaf for leaf in nested_tensors(in_order_of_birth(op, out)) if self._watches(leaf)]
        changed = [leaf for leaf in nested_tensors(changed_arguments(op, args, kwargs)) if self._watches(leaf)]
        if not read and not written:
            return
        index = len(self.ops)
        phase, module, call, forward_op = self._where(index)
        self.ops.append(
            Op(
                name=str(op),
                tick=tick,
                phase=phase,
                module=module,
                call=call,
                source=source_line() if phase is Phase.FORWARD else "",
                flops=flops_of(op, args, kwargs, out),
                moved_bytes=0 if traits.is_view else moved_bytes(op, read, (*written, *changed)),
                host_bytes=host_bytes(op, (*read, *written), nested_tensors((args, out))) if self.virtual else 0,
                dtype=dtype_name(read, written),
                is_view=traits.is_view,
                step=self.step,
                micro_batch=self.micro_batch,
                forward_op=forward_op,
                kernel=kernel_call(op, args, kwargs, out) if has_formula(str(op)) else None,
                scratch_known=traits.scratch_known,
                writes=traits.writes,
                draws_random_numbers=draws_random_numbers(op, args, kwargs),
            )
        )
        record = self.ops[index]
        record.inputs = tuple(i for t in read if (i := self.storage_of(t)) is not None)
        record.outputs = tuple(i for t in written if (i := self.storage_of(t)) is not None)
        record.shapes = tuple(tuple(t.shape) for t in written)
        if record.makes_or_changes:
            self.sequence = torch.autograd._get_sequence_nr()
        self.updates.check(record)
        if traits.writes and phase is Phase.FORWARD:
            self._note_writes(traits, args, kwargs, tick, call)
        if uses_batch_statistics(op, args, kwargs):
            self._batch_statistics[module] = None

    def _note_writes(self, traits: OpTraits, args, kwargs, tick: int, call: int | None) -> None:
        for target in nested_tensors(traits.written_arguments(args, kwargs)):
            if (storage := self.storage_of(target)) is not None:
                self._writes.append((tick, storage, call))

    def _where(self, index: int) -> tuple[Phase, str, int | None, int | None]:
        module, call = self.calls.innermost
        if self._in_setup:
            return Phase.SETUP, "", None, None
        if self.updates.running:
            return Phase.OPTIMIZER, "", None, None
        node = torch._C._current_autograd_node()
        if node is None or call is not None:  # a backward inside of a module's forward is part of the forward
            phase = Phase.OPTIMIZER if self._seen_backward and not self.calls.are_running else Phase.FORWARD
            if phase is Phase.FORWARD:
                self._op_of_sequence[torch.autograd._get_sequence_nr() - 1] = index
            return phase, module, call, None
        self._seen_backward = True
        forward_op = self._op_of_sequence.get(node._sequence_nr())
        if torch.is_grad_enabled():
            self._op_of_sequence[torch.autograd._get_sequence_nr() - 1] = index
            where = (
                module if self.calls.are_running else (self.ops[forward_op].module if forward_op is not None else "")
            )
            return Phase.RECOMPUTE, where, None, None
        return Phase.BACKWARD, self.ops[forward_op].module if forward_op is not None else "", None, forward_op

    def _run(self, op, *args):
        return self.__torch_dispatch__(op, (), args)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Ops inside the context are not recorded."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # ---- modules and phases -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watching(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Hooks on every module, the optimizer and the gradients, for as long as the context lasts."""
        self.module_types = {name: type(module).__name__ for name, module in model.named_modules()}
        for name, module in model.named_modules():
            is_norm = isinstance(module, torch.nn.modules.batchnorm._NormBase)
            for _, buffer in module.named_buffers(recurse=False):
                if (storage := self.storage_of(buffer)) is not None:
                    self._buffers[storage] = (name, is_norm)
        handles = []
        for name, module in model.named_modules(remove_duplicate=True):
            handles += self.calls.hooks(name, module)
        handles += self.updates.hooks(model, optimizer)
        hooks = (
            torch.autograd.graph.saved_tensors_hooks(self._saved.pack, self._saved.unpack)
            if self.what_if
            else contextlib.nullcontext()
        )
        try:
            with hooks:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def setup_ends(self) -> None:
        self._in_setup, self._setup_tick = False, self.tick
        self.updates.in_setup = False

    def starts_step(self, step: int) -> None:
        self.step, self.micro_batch, self._seen_backward = step, 0, False
        self.updates.starts_step()
        self._op_of_sequence.clear()

    def enters_model(self) -> None:
        """A forward begins; after a backward it is that of another micro-batch."""
        if self._seen_backward:
            self.micro_batch += 1
            self._seen_backward = False

    # ---- the result -------------------------------------------------------------------------------------------

    def finish(self, *, steps: int, primed: bool, micro_batch_sizes: tuple[int, ...]) -> StepGraph:
        """Close all lives and hand the recording over. The recorder must not be used afterwards."""
        ticks = self.next_tick() + 1
        idle = self.updates.idle_state() if primed else set()
        for index, birth, _finalizer in self._alive.values():
            self.storages[index].lives.append((birth, ticks))
        self._alive.clear()
        if primed:
            for index, storage in enumerate(self.storages):
                storage.lives = [] if index in idle else [life for life in storage.lives if life[1] > self._setup_tick]
        note_obstacles(self.calls.all, self._writes, self._buffers, self.storages)
        graph = StepGraph(
            ops=self.ops,
            storages=self.storages,
            saves=self.saves,
            calls=self.calls.all,
            ticks=ticks,
            steps=steps,
            primed=primed,
            micro_batch_sizes=micro_batch_sizes,
            module_types=self.module_types,
            batch_statistics=tuple(self._batch_statistics),
            update_tick=self.updates.tick,
            trained=self.updates.trained,
            assumptions=tuple(self.data_dependence.assumptions),
        )
        classify(graph)
        return graph
