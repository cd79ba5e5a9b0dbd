"""Writes down what a training step does on the virtual GPU: ops, storages, saved tensors, module calls.

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
import math
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from planner import sparse, virtual_gpu
from planner.answers import Answers
from planner.classify import classify, note_obstacles
from planner.cuda_kernels import KERNELS
from planner.ghosts import Ghost, Kept
from planner.module_state import changed_state, module_state
from planner.op_schema import OpTraits, dtype_name, traits_of, uses_batch_statistics
from planner.source_line import source_line
from planner.step_graph import Call, Category, Op, Phase, Save, StepGraph, Storage

_IGNORED_NAMESPACES = ("prim", "profiler")
_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)


class Recorder(TorchDispatchMode):
    """Active around the step. `what_if` chooses the kind of recording."""

    def __init__(self, *, what_if: bool) -> None:
        super().__init__()
        self.what_if = what_if
        self.tick = 0
        self.ops: list[Op] = []
        self.storages: list[Storage] = []
        self.saves: list[Save] = []
        self.calls: list[Call] = []
        self.step = 0
        self.micro_batch = 0
        self.answers = Answers(self._running_module)
        self._paused = False
        self._alive: dict[int, tuple[int, int, weakref.ref]] = {}  # storage pointer -> (id, birth, finalizer)
        self._stack: list[tuple[str, int | None]] = []
        self._states: list[dict[str, object]] = []
        self._in_optimizer = False
        self._seen_backward = False
        self._in_setup = True
        self._op_of_sequence: dict[int, int] = {}
        self._batch_statistics: dict[str, None] = {}
        self._buffers: dict[int, tuple[str, bool]] = {}
        self._writes: list[tuple[int, int, int | None]] = []  # (tick, storage, call) of in-place writes in forward

    # ---- time -------------------------------------------------------------------------------------------------

    def next_tick(self) -> int:
        self.tick += 1
        return self.tick

    # ---- storages ---------------------------------------------------------------------------------------------

    def storage_of(
        self, tensor: torch.Tensor, *, category: Category = Category.TEMPORARY, adopt: int | None = None
    ) -> int | None:
        """Index of a tensor's storage; it is registered (born now) if it is new. None off the virtual GPU or if empty.

        `adopt` registers a new storage as another life of a known one.
        """
        if tensor.device.type != virtual_gpu.NAME or tensor.layout is not torch.strided:
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
            for part in sparse.parts_of(tensor):
                if (index := self.storage_of(part)) is not None and self.storages[index].op is not None:
                    self.storages[index].category = category
        elif tensor is not None and (index := self.storage_of(tensor)) is not None:
            self.storages[index].category = category

    # ---- ops --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._paused or op.namespace in _IGNORED_NAMESPACES:
            return op(*args, **kwargs)
        if op is torch.ops.aten._local_scalar_dense.default and (value := self._scalar(args[0])) is not None:
            return value
        tick = self.next_tick()
        traits = traits_of(op)
        ran, out, scratch = False, None, ()
        try:
            if op in KERNELS:
                with self._pause():
                    out, scratch = KERNELS[op](self.answers, op, *args, **kwargs)
            elif traits.asks_values:
                ran, out, args = self._by_value(op, args, kwargs)
            if not ran and op not in KERNELS:
                out = op(*args, **kwargs)
        except _DATA_DEPENDENT:
            raise self.answers.refusal(f"the result of {op} depends on values, and a rehearsal has none") from None
        except UnsupportedOperatorException:
            raise self.answers.refusal(
                f"{op} has no fake kernel (register one with torch.library.register_fake)"
            ) from None
        if not ran and not (traits.is_view and isinstance(args[0], FakeTensor)):
            self.answers.known.follow(op, args, kwargs, out, traits.written_arguments(args, kwargs))
        if isinstance(out, torch.Tensor) and out.is_sparse:
            sparse.hold_parts(out, _tensors((args, kwargs)))
            self.answers.assume((sparse.ASSUMED_TEMPORARIES,))
        self._note_op(op, traits, args, kwargs, out, tick)
        for tensor in scratch:
            self.storage_of(tensor)
        return out

    def _scalar(self, tensor: torch.Tensor) -> float | bool | None:
        """The answer to `.item()`; None where it is left to the fake mode, which knows constants on the host."""
        if tensor.device.type == virtual_gpu.NAME:
            return self.answers.scalar_or_refuse(tensor)
        return self.answers.scalar(tensor)

    def _note_op(self, op, traits: OpTraits, args, kwargs, out, tick: int) -> None:
        read = [leaf for leaf in _tensors((args, kwargs)) if leaf.device.type == virtual_gpu.NAME]
        written = [leaf for leaf in _tensors(out) if leaf.device.type == virtual_gpu.NAME]
        if not read and not written:
            return
        index = len(self.ops)
        phase, module, call, forward_op = self._where(index)
        moved = 0 if traits.is_view else sum(_nbytes(t) for t in read) + sum(_nbytes(t) for t in written)
        counter = flop_registry.get(op.overloadpacket)
        self.ops.append(
            Op(
                name=str(op),
                tick=tick,
                phase=phase,
                module=module,
                call=call,
                source=source_line() if phase is Phase.FORWARD else "",
                flops=counter(*args, **kwargs, out_val=out) if counter else 0,
                moved_bytes=moved,
                dtype=dtype_name(read, written),
                is_view=traits.is_view,
                step=self.step,
                micro_batch=self.micro_batch,
                forward_op=forward_op,
            )
        )
        record = self.ops[index]
        record.inputs = tuple(i for t in read if (i := self.storage_of(t)) is not None)
        record.outputs = tuple(i for t in written if (i := self.storage_of(t)) is not None)
        record.shapes = tuple(tuple(t.shape) for t in written)
        if traits.writes and phase is Phase.FORWARD:
            self._note_writes(traits, args, kwargs, tick, call)
        if uses_batch_statistics(op, args, kwargs):
            self._batch_statistics[module] = None

    def _note_writes(self, traits: OpTraits, args, kwargs, tick: int, call: int | None) -> None:
        for target in _tensors(traits.written_arguments(args, kwargs)):
            if (storage := self.storage_of(target)) is not None:
                self._writes.append((tick, storage, call))

    def _where(self, index: int) -> tuple[Phase, str, int | None, int | None]:
        module, call = self._stack[-1] if self._stack else ("", None)
        if self._in_setup:
            return Phase.SETUP, "", None, None
        if self._in_optimizer:
            return Phase.OPTIMIZER, "", None, None
        node = torch._C._current_autograd_node()
        if node is None:
            phase = Phase.OPTIMIZER if self._seen_backward and not self._stack else Phase.FORWARD
            if phase is Phase.FORWARD:
                self._op_of_sequence[torch.autograd._get_sequence_nr() - 1] = index
            return phase, module, call, None
        self._seen_backward = True
        forward_op = self._op_of_sequence.get(node._sequence_nr())
        if torch.is_grad_enabled():
            self._op_of_sequence[torch.autograd._get_sequence_nr() - 1] = index
            where = module if self._stack else (self.ops[forward_op].module if forward_op is not None else "")
            return Phase.RECOMPUTE, where, None, None
        return Phase.BACKWARD, self.ops[forward_op].module if forward_op is not None else "", None, forward_op

    def _by_value(self, op, args, kwargs):
        """Run an op whose result's shape depends on values, or which returns a value, where they are known.

        -> (whether it was run, result, arguments to run it with instead). Selecting by a boolean mask is what CUDA
        makes of it: `nonzero` and then an index (`expandTensors` in ATen/native/IndexingUtils.h).
        """
        known = self.answers.known
        if op is torch.ops.aten.masked_select.default:
            return True, self._run(torch.ops.aten.index.Tensor, torch.broadcast_tensors(*args)[0], [args[1]]), None
        if op is torch.ops.aten.index.Tensor:
            indices = []
            for index in args[1]:
                if index is None or index.dtype not in (torch.bool, torch.uint8) or index not in known:
                    indices.append(index)
                    continue
                positions = self._run(torch.ops.aten.nonzero.default, index)
                indices += [self._run(torch.ops.aten.select.int, positions, 1, dim) for dim in range(index.dim())]
            return False, None, (args[0], indices)
        real = known.compute(op, args, kwargs)
        if real is None:
            return False, None, args
        given = list(_tensors((args, kwargs)))
        assumed = known.assumptions(given)
        self.answers.assume(assumed)

        def fake(value):
            if not isinstance(value, torch.Tensor):
                return value
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=given[0].device)
            known.learn(made, value, assumed)
            return made

        return True, tree_map(fake, real), None

    def _run(self, op, *args):
        return self.__torch_dispatch__(op, (), args)

    def _running_module(self) -> str:
        return f"in module '{self._stack[-1][0] or 'the model itself'}'" if self._stack else "outside of the model"

    # ---- saved tensors ----------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Ghost | Kept:
        storage = self.storage_of(tensor) if not tensor.is_sparse else None
        call = self._stack[-1][1] if self._stack else None
        permanent = storage is None or self.storages[storage].op is None
        save = Save(storage=None if permanent else storage, pack=self.next_tick(), unpack=None, release=None, call=call)
        self.saves.append(save)
        if permanent:
            with self._pause():
                return Kept(self, tensor.detach(), save)
        return Ghost(self, tensor, save)

    def _unpack(self, packed: Ghost | Kept) -> torch.Tensor:
        save = packed.save
        if save.unpack is None:
            save.unpack = self.next_tick()
        if isinstance(packed, Kept):
            return packed.tensor
        with self._pause():
            elements = math.ceil(self.storages[save.storage].size_bytes / packed.dtype.itemsize)
            base = torch.empty(elements, dtype=packed.dtype, device=virtual_gpu.NAME)
            self.storage_of(base, adopt=save.storage)
            self.answers.known.take_over(base, packed.twin)
            return base.as_strided(packed.shape, packed.stride, packed.offset)

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
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
            handles.append(module.register_forward_pre_hook(self._entering(name), with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(self._leaving, always_call=True))
        for parameter in model.parameters():
            if parameter.requires_grad:
                handles.append(
                    parameter.register_post_accumulate_grad_hook(
                        lambda parameter: self.mark(parameter.grad, Category.GRADIENT)
                    )
                )
        handles.append(register_optimizer_step_pre_hook(self._optimizer_starts))
        handles.append(register_optimizer_step_post_hook(self._optimizer_ends))
        hooks = (
            torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
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
        self._in_setup = False

    def starts_step(self, step: int) -> None:
        self.step, self.micro_batch, self._seen_backward = step, 0, False
        self._op_of_sequence.clear()

    def _entering(self, name: str):
        def enter(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            if torch._C._current_autograd_node() is not None:
                self._stack.append((name, None))
                return
            if not self._stack and self._seen_backward:
                self.micro_batch += 1
                self._seen_backward = False
            inputs = {self.storage_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
            obstacle = None if torch.is_grad_enabled() else "it runs without gradients"
            if getattr(type(module).forward, "__name__", "") == "_forward_unimplemented":
                obstacle = "its class has no forward of its own (a container, or compiled)"
            parent = self._stack[-1][1] if self._stack else None
            call = Call(
                module=name,
                parent=parent,
                start=self.next_tick(),
                end=0,
                inputs=tuple(sorted(inputs - {None})),
                obstacle=obstacle,
            )
            self._stack.append((name, len(self.calls)))
            self._states.append(module_state(module))
            self.calls.append(call)

        return enter

    def _leaving(self, module: torch.nn.Module, args: tuple, output: Any) -> None:
        _, call = self._stack.pop()
        if call is not None:
            self.calls[call].end = self.next_tick()
            if (changed := changed_state(self._states.pop(), module_state(module))) is not None:
                self._note_obstacle(call, f"it changes {changed}")

    def _note_obstacle(self, call: int | None, obstacle: str) -> None:
        """A second run of this call, or of one that contains it, would not be like the first."""
        while call is not None:
            self.calls[call].obstacle = self.calls[call].obstacle or obstacle
            call = self.calls[call].parent

    def _optimizer_starts(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        self._in_optimizer = True

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        self._in_optimizer = False
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self.mark(value, Category.OPTIMIZER_STATE)

    # ---- the result -------------------------------------------------------------------------------------------

    def finish(self, *, steps: int, primed: bool, micro_batch_sizes: tuple[int, ...]) -> StepGraph:
        """Close all lives and hand the recording over. The recorder must not be used afterwards."""
        ticks = self.next_tick() + 1
        for index, birth, _finalizer in self._alive.values():
            self.storages[index].lives.append((birth, ticks))
        self._alive.clear()
        note_obstacles(self.calls, self._writes, self._buffers, self.storages)
        graph = StepGraph(
            ops=self.ops,
            storages=self.storages,
            saves=self.saves,
            calls=self.calls,
            ticks=ticks,
            steps=steps,
            primed=primed,
            micro_batch_sizes=micro_batch_sizes,
            module_types=self.module_types,
            batch_statistics=tuple(self._batch_statistics),
            assumptions=tuple(self.answers.assumptions),
        )
        classify(graph)
        return graph


# ---- small readers ------------------------------------------------------------------------------------------------


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize if not tensor.is_sparse else 0
