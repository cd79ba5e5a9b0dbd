"""Records a training step as it runs on a device: ops, storages, saved tensors, module calls.

The device is the virtual GPU or a real device (CPU, CUDA). The recording has the same form for all of them.

There are two kinds of recording:

- *plain*: the recorded life of a storage is the time for which PyTorch keeps it.
- *what-if*: tensors that autograd saves are replaced by placeholders (shape, dtype, storage index), so that autograd
  keeps no storage alive. The recorded life of a storage is then the time for which anything but autograd keeps it, and
  the times for which autograd would keep it are listed separately, as saves. From both one can compute which storages
  would be alive if any set of module calls were checkpointed. If none is, both kinds of recording have the same memory
  curve (tests compare them).

Deaths of storages come from their finalizers (`storage_table`). Phases and modules come from hooks on modules and
optimizers, and from the current node of the autograd engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from planner.recording.categories import classify, note_obstacles
from planner.recording.collectives import ranks
from planner.recording.flops import flops_of
from planner.recording.gradients import Backwards, Updates
from planner.recording.module_calls import OWN_GENERATOR, ModuleCalls
from planner.recording.op_schema import (
    OpTraits,
    changed_arguments,
    draws_random_numbers,
    dtype_name,
    host_bytes,
    in_order_of_birth,
    moved_bytes,
    numbers_in,
    op_traits,
    uses_batch_statistics,
)
from planner.recording.saved_tensors import SavedTensors
from planner.recording.step_graph import Category, Op, Phase, StepGraph
from planner.recording.storage_table import StorageTable, local_part
from planner.virtual_gpu import sparse_tensors
from planner.virtual_gpu.in_place import InPlaceRule
from planner.virtual_gpu.inference_mode import composite_kernel
from planner.virtual_gpu.kernels import kernels_of
from planner.virtual_gpu.source_lines import source_line
from planner.virtual_gpu.values.data_dependence import DataDependence
from planner.virtual_gpu.values.data_dependent_ops import run_data_dependent_op
from planner.virtual_gpu.values.kernel_arguments import refuse_arguments
from planner.virtual_gpu.values.kernel_calls import kernel_call
from planner.virtual_gpu.values.shadow_ops import nested_tensors
from planner.workspaces import has_formula

_IGNORED_NAMESPACES = ("prim", "profiler")
_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)


class Recorder(TorchDispatchMode):
    """A dispatch mode that is active while the step runs, and records every op that reaches it below autograd.

    Args:
        device: type of the device whose memory is watched, such as 'vgpu' or 'cpu'.
        virtual: True if the tensors on this device are fake. Real tensors are then constants on the host.
        what_if: True to also record what every module saves, from which candidates for recomputing are derived.
        in_place: decides which ops are recorded as in-place, because they would run in place on real tensors although
            they return a new tensor for fake tensors. If it is None, ops are recorded as they run.
    """

    def __init__(
        self, device: str, *, virtual: bool = True, what_if: bool, in_place: InPlaceRule | None = None
    ) -> None:
        super().__init__()
        self.virtual, self.in_place = virtual, in_place
        self.what_if = what_if
        self.module_types: dict[str, str] = {}
        self.ops: list[Op] = []
        self.table = StorageTable(device, virtual=virtual)
        self.calls = ModuleCalls(self.table, self.enters_model)
        self.data_dependence = DataDependence(self.calls.location, self._line)
        self.updates = Updates(self.table, self.data_dependence)
        self.step = self.micro_batch = 0
        self.sequence = -1
        """Number of autograd's nodes when the last op that made or changed a storage had run."""
        self._paused = False
        self._ranks = ranks(self.table, self.data_dependence, self.pause)
        self._kernels = kernels_of(device)
        self._saved = SavedTensors(self, self.table, self.calls, self.data_dependence.known)
        self._own_step = False
        self._step_starts: list[int] = []
        self._backwards = Backwards()
        self.seen_backward = False
        self.numbers_asked: set[int | None] = set()  # storages of tensors whose value Python code got
        self._in_setup, self._setup_tick = True, 0
        self._op_of_sequence: dict[int, int] = {}  # autograd's number of a node -> the forward op that made it
        self._batch_statistics: dict[str, None] = {}
        self.forwards: dict[int, tuple[int, int]] = {}
        """For each step, a hash of the ops of its forward, and one that includes the numbers among their arguments."""
        self._buffers: dict[int, tuple[str, bool]] = {}  # storage -> (module, True if the module is a norm)
        self.writes: list[tuple[int, int, int | None]] = []  # (tick, storage, call) of in-place writes in forward

    @property
    def is_rank(self) -> bool:
        """True if the process is one rank of several."""
        return self._ranks is not None

    def mark(self, tensor: torch.Tensor | None, category: Category, *, name: str = "") -> None:
        """Sets the category and the name of a tensor's storage."""
        self.table.mark(tensor, category, name=name)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.prim.device.default:  # two thirds of all calls: C++ asks a fake for its device
            return args[0].fake_device
        kwargs = kwargs or {}
        if self._ranks is not None and any(issubclass(kind, self._ranks.wrappers) for kind in types):
            return NotImplemented
        if torch.is_inference_mode_enabled() and (kernel := composite_kernel(op, self.table.device)) is not None:
            with self:
                return kernel(*args, **kwargs)
        asks_number = op is torch.ops.aten._local_scalar_dense.default
        if self._paused or op.namespace in _IGNORED_NAMESPACES or (asks_number and not self.virtual):
            return op(*args, **kwargs)
        if kwargs.get("generator") is not None:
            self.calls.note_obstacle(self.calls.innermost[1], OWN_GENERATOR)
        if asks_number and (value := self._scalar(args[0])) is not None:
            self.numbers_asked.add(self.table.storage_of(args[0]))
            return value
        tick = self.table.next_tick()
        traits = op_traits(op)
        if not self.virtual:
            out = op(*args, **kwargs)
            self._note_op(op, traits, args, kwargs, out, tick)
            return out
        refuse_arguments(op, args)
        # 1. Ops that the real device runs in place: fakes return a copy, so the result is the argument itself.
        if self.in_place is not None and self.in_place(op, args, self._maker):
            self._note_op(op, traits, args, kwargs, args[0], tick)
            return args[0]
        # 2. Run the op: by a substitute for its kernel, by its known values, or by its fake kernel.
        ran, out = False, None
        scratch: Sequence[torch.Tensor] = ()
        try:
            kernel = self._kernels.get(op)
            if kernel is not None and any(self.table.watches(tensor) for tensor in nested_tensors(args)):
                with self.pause():
                    out, scratch = kernel(self.data_dependence, op, *args, **kwargs)
            else:
                if traits.asks_values:
                    ran, out, args = run_data_dependent_op(self.data_dependence, self._run, op, args, kwargs)
                if not ran:
                    out = op(*args, **kwargs)
        except _DATA_DEPENDENT:
            raise self.data_dependence.refusal(
                f"the result of {op} depends on values of tensors, which a rehearsal does not compute"
            ) from None
        except UnsupportedOperatorException:
            with self.pause():
                out, scratch = sparse_tensors.run_without_fake_kernel(self.data_dependence, op, args, kwargs)
        # 3. Carry known values on to the result. A view shares its argument's storage, whose values are known already.
        if not ran and not (traits.is_view and isinstance(args[0], FakeTensor)):
            self.data_dependence.known.follow(op, args, kwargs, out, traits.written_arguments(args, kwargs))
        if isinstance(out, torch.Tensor) and out.is_sparse:
            with self.pause():
                out = sparse_tensors.with_parts(self.data_dependence, op, out, args, kwargs)
        # 4. Record the op. Scratch memory is registered after the outputs: the kernel allocates it after them.
        self._note_op(op, traits, args, kwargs, out, tick)
        if isinstance(out, torch.Tensor) and out.is_sparse:
            for tensor in sparse_tensors.parts_of(out):
                self.table.storage_of(tensor)
        if self.table.device != "cpu":  # the scratch tensors are those that CUDA's kernels allocate
            for tensor in scratch:
                self.table.storage_of(tensor)
        return out

    def _scalar(self, tensor: torch.Tensor) -> float | bool | None:
        """Returns the answer to `.item()`, or raises `RehearsalError` if the value of a watched tensor is not known.

        None is for a tensor on the host: the fake mode then answers, which knows the values of constants.
        """
        answers = self.data_dependence
        return answers.scalar_or_refuse(tensor) if self.table.watches(tensor) else answers.scalar(tensor)

    def _note_op(self, op, traits: OpTraits, args, kwargs, out, tick: int) -> None:
        """Appends the op to the recording, and registers the storages that it made. `tick` is when the op began."""
        watches, storage_of = self.table.watches, self.table.storage_of
        self.calls.notes_op(tick, traits.written_arguments(args, kwargs), (args, kwargs), out)
        read = [leaf for leaf in nested_tensors((args, kwargs)) if watches(leaf)]
        written = [leaf for leaf in nested_tensors(in_order_of_birth(op, out)) if watches(leaf)]
        changed = [leaf for leaf in nested_tensors(changed_arguments(op, args, kwargs)) if watches(leaf)]
        if not read and not written:
            return
        # 1. The op, attributed to the phase, module and source line that run it.
        index, name = len(self.ops), traits.name
        phase, module, call, forward_op = self._where(index)
        self.ops.append(
            Op(
                name=name,
                tick=tick,
                phase=phase,
                module=module,
                call=call,
                source=source_line() if phase in (Phase.FORWARD, Phase.RECOMPUTE) else "",
                flops=flops_of(op, args, kwargs, out),
                moved_bytes=0 if traits.is_view else moved_bytes(op, read, (*written, *changed)),
                host_bytes=host_bytes(op, (*read, *written), nested_tensors((args, out))) if self.virtual else 0,
                dtype=dtype_name(read, written),
                is_view=traits.is_view,
                step=self.step,
                micro_batch=self.micro_batch,
                forward_op=forward_op,
                kernel=kernel_call(op, args, kwargs, out) if has_formula(name) else None,
                scratch_known=traits.scratch_known,
                writes=traits.writes,
                draws_random_numbers=draws_random_numbers(op, args, kwargs),
            )
        )
        if phase is Phase.FORWARD:
            ops, with_numbers = self.forwards.get(self.step, (0, 0))
            self.forwards[self.step] = hash((ops, name)), hash((with_numbers, name, *numbers_in((args, kwargs))))
        # 2. Its storages, in the order in which the kernel allocates them: the simulated allocator depends on it.
        if not self._in_setup:
            self.table.birth_op = index
        record = self.ops[index]
        record.inputs = tuple(i for t in read if (i := storage_of(t)) is not None)
        record.outputs = tuple(i for t in written if (i := storage_of(t)) is not None)
        record.shapes = tuple(tuple(t.shape) for t in written)
        if traits.writes:
            targets = nested_tensors(traits.written_arguments(args, kwargs))
            record.written = tuple(i for t in targets if watches(t) and (i := storage_of(t)) is not None)
        if self._ranks is not None:
            record.collective = self._ranks.note(op, args, kwargs)
        # 3. Notes for later: the last op that made a storage, reads after an update in backward, in-place writes.
        if record.makes_or_changes:
            self.sequence = torch.autograd._get_sequence_nr()
        self.updates.check(record)
        if traits.writes and phase is Phase.FORWARD:
            storages = map(storage_of, nested_tensors(traits.written_arguments(args, kwargs)))
            self.writes += [(tick, storage, call) for storage in storages if storage is not None]
        if uses_batch_statistics(op, args, kwargs):
            self._batch_statistics[module] = None

    def _maker(self, tensor: torch.Tensor) -> str:
        """Returns the name of the op that made the tensor's storage; empty if no recorded op has made it."""
        storage = self.table.storage_of(tensor) if self.table.watches(tensor) else None
        return "" if storage is None or (op := self.table.storages[storage].op) is None else self.ops[op].name

    def _where(self, index: int) -> tuple[Phase, str, int | None, int | None]:
        """Returns the phase, module path, call and forward op of the op that is recorded next, as index `index`.

        The forward op is that of a backward op, and None for all other ops.
        """
        module, call = self.calls.innermost
        if self._in_setup:
            return Phase.SETUP, "", None, None
        node = torch._C._current_autograd_node()
        runs_model = node is not None or self.calls.are_running  # inside of an update: a closure does
        if self.updates.running and (self.updates.in_backward or not runs_model):
            return Phase.OPTIMIZER, "", None, None
        if node is None or call is not None:  # a backward inside of a module's forward is part of the forward
            if self._own_step and self.seen_backward and torch.is_grad_enabled():
                self.enters_model()  # a step of the user's own goes on after a backward, outside of modules
            phase = Phase.OPTIMIZER if self.seen_backward and not self.calls.are_running else Phase.FORWARD
            if phase is Phase.FORWARD and torch.is_grad_enabled():
                # Autograd numbers its nodes: this op's node, if it makes one, is the one counted last.
                self._op_of_sequence[torch.autograd._get_sequence_nr() - 1] = index
            return phase, module, call, None
        if not self.seen_backward:
            self.calls.backward_begins()
        self.seen_backward = True
        forward_op = self._op_of_sequence.get(node._sequence_nr())
        if self._backwards.recompute(in_module=self.calls.are_running):
            self._op_of_sequence[torch.autograd._get_sequence_nr() - 1] = index
            where = (
                module if self.calls.are_running else (self.ops[forward_op].module if forward_op is not None else "")
            )
            return Phase.RECOMPUTE, where, None, None
        return Phase.BACKWARD, self.ops[forward_op].module if forward_op is not None else "", None, forward_op

    def _line(self) -> str:
        """Returns the running line of model code; in backward, that of the forward op whose gradient is computed."""
        node = torch._C._current_autograd_node()
        index = None if node is None else self._op_of_sequence.get(node._sequence_nr())
        return source_line(in_backward=node is not None) or ("" if index is None else self.ops[index].source)

    def _run(self, op, *args):
        return self.__torch_dispatch__(op, (), args)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Returns a context manager; ops inside the `with` block run without being recorded."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @contextlib.contextmanager
    def watching(
        self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, own_step: bool = False
    ) -> Iterator[None]:
        """Returns a context manager that sets the hooks on modules, optimizers and gradients, and for saved tensors.

        Args:
            own_step: True if the step is a function of the user's own, which may run several forwards and backwards.
        """
        self._own_step = self.data_dependence.numbers_are_for_logging = self.calls.of_own_step = own_step
        self.module_types = {name: type(module).__name__ for name, module in model.named_modules()}
        self._note_buffers(model)
        if self.virtual and self.what_if:
            self._saved.install()
        handles = []
        for name, module in model.named_modules(remove_duplicate=True):
            handles += self.calls.hooks(name, module)
        handles += self.updates.hooks(model, optimizers, own_step=own_step)
        saving = torch.autograd.graph.saved_tensors_hooks(self._saved.pack, self._saved.unpack)
        try:
            with (
                saving if self.what_if else contextlib.nullcontext(),
                self._backwards.watching(),
                self.watching_ranks(),
            ):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def watching_ranks(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which FSDP2 and DTensors are recorded if the process is one rank of several."""
        return contextlib.nullcontext() if self._ranks is None else self._ranks.watching()

    def _note_buffers(self, model: torch.nn.Module) -> None:
        """Notes which storages are buffers of which modules. It keeps no buffer alive: a forward may replace it."""
        for name, module in model.named_modules():
            for _, buffer in module.named_buffers(recurse=False):
                if (storage := self.table.storage_of(local_part(buffer))) is not None:
                    self._buffers[storage] = (name, isinstance(module, torch.nn.modules.batchnorm._NormBase))

    def setup_ends(self) -> None:
        """Ends the setup, which may have been a whole step. All later events belong to the recorded steps."""
        self.calls.setup_ends()
        self._saved.all.clear()
        self._in_setup, self._setup_tick = False, self.table.tick
        self.updates.in_setup = False
        self.table.birth_op = len(self.ops) - 1 if self.ops else None

    def starts_step(self, step: int) -> None:
        """Begins training step number `step`, counted from 0."""
        self.step, self.micro_batch, self.seen_backward = step, 0, False
        self._step_starts.append(self.table.tick)
        self.updates.starts_step()
        self._op_of_sequence.clear()

    def enters_model(self) -> None:
        """Notes that a forward of the model begins. If it follows a backward, it also begins a new micro-batch."""
        if self.seen_backward:
            self.micro_batch += 1
            self.seen_backward = False

    # ---- the result -------------------------------------------------------------------------------------------

    def finish(self, *, steps: int, primed: bool, micro_batch_sizes: tuple[int, ...]) -> StepGraph:
        """Ends the recording and returns it. The recorder must not be used afterwards."""
        ticks = self.table.next_tick() + 1
        idle = self.updates.idle_state() if primed else set()
        self.table.close(ticks)
        storages = self.table.storages
        if primed or self._ranks is not None:  # remove storages that died before the steps, such as whole parameters
            for index, storage in enumerate(storages):  # and optimizer state that a real step does not make
                storage.lives = [] if index in idle else [life for life in storage.lives if life[1] > self._setup_tick]
        note_obstacles(self.calls.all, self.writes, self._buffers, storages)
        graph = StepGraph(
            ops=self.ops,
            storages=storages,
            saves=self._saved.all,
            calls=self.calls.all,
            ticks=ticks,
            steps=steps,
            primed=primed,
            micro_batch_sizes=micro_batch_sizes,
            module_types=self.module_types,
            batch_statistics=tuple(self._batch_statistics),
            update_tick=None if self._own_step else self.updates.tick,
            step_starts=tuple(self._step_starts),
            cache_releases=tuple(self.table.cache_releases),
            trained=self.updates.trained,
            assumptions=tuple(self.data_dependence.assumptions),
            forwards_differ=len(set(self.forwards.values())) > 1,
            ops_differ=len({ops for ops, _ in self.forwards.values()}) > 1,
        )
        classify(graph)
        return graph
