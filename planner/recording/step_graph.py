"""The result of a rehearsal: plain data about training steps, in the order in which they ran.

Time is counted in *ticks*: each event gets the next tick. The events are: an op starts, a storage is born or dies, a
tensor is saved for backward, unpacked or released, a module call starts or ends, an optimizer step begins. Bytes are
the sizes of storages as PyTorch requested them, before the allocator rounds them up.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import itertools
from typing import Any

import numpy as np

from planner.plan_types.categories import Category
from planner.spawned.columns import Columns
from planner.workspaces.registry import KernelCall, Trials


class Phase(enum.StrEnum):
    """A part of a training step."""

    SETUP = "setup"
    """Ops before the recorded steps, for example those that create optimizer state in a primed recording."""
    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    """Forward ops that run inside backward, because activation checkpointing recomputes them."""
    OPTIMIZER = "optimizer"
    """Ops between a backward and the next forward: unscaling, clipping, optimizer step, zeroing of gradients."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective that an op runs."""

    kind: str
    """Name of the op without its namespace, such as '_allgather_base_'."""
    size_bytes: int
    """Bytes of the larger of its inputs and its outputs."""
    cards: int
    """Number of ranks that take part."""
    span: int
    """Distance between the first and the last of these ranks, plus 1."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Op:
    """One op that ran below autograd: a kernel call, or a view."""

    name: str
    """Name with overload, such as 'aten.addmm.default'."""
    tick: int
    """Tick at which the op started."""
    phase: Phase
    module: str
    """Path of the module whose forward ran the op. For a backward op: the module of its `forward_op`."""
    call: int | None
    """Innermost module call that was running, as an index into `StepGraph.calls`; None if there was none."""
    source: str
    """Line of the model's code that ran the op, as 'file.py:line'; empty if it is not known."""
    flops: int
    moved_bytes: int
    """Bytes read plus bytes written; 0 for views, which launch no kernel."""
    host_bytes: int
    """Bytes that the op copies between device and host; 0 for most ops."""
    dtype: str
    """Compute dtype: 'fp32', 'bf16', 'fp16', ..."""
    is_view: bool
    step: int
    micro_batch: int
    forward_op: int | None = None
    """For a backward op: index of the forward op whose gradient it computes, None if not known. None for other ops."""
    inputs: tuple[int, ...] = ()
    """Indices of the storages that the op reads."""
    outputs: tuple[int, ...] = ()
    """Indices of the storages that the op writes or returns."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the output tensors."""
    kernel: KernelCall | None = None
    """Arguments and outputs of the op, if a formula computes its scratch memory from them; else None."""
    scratch_known: bool = True
    """True if the op's scratch memory is known: by a formula, or because the op takes none."""
    scratch_bytes: int = 0
    """Bytes of scratch memory that a convolution writes and reads. It is 0 for other ops, and for all ops of a
    recording to which no workspaces have been added."""
    writes: bool = False
    """True if the op changes an argument in place."""
    written: tuple[int, ...] = ()
    """Indices of the storages that the op changes in place."""
    collective: Collective | None = None
    """The collective that the op runs together with other ranks; None for other ops."""
    draws_random_numbers: bool = False
    """True if the op advances the random generator; dropout and attention with dropout do."""

    @property
    def makes_or_changes(self) -> bool:
        """True if the op makes or changes a storage. Op numbers in segments count only these ops."""
        return not self.is_view and (self.writes or not set(self.outputs) <= set(self.inputs))


@dataclasses.dataclass(slots=True, kw_only=True)
class Storage:
    """The memory behind one or more tensors."""

    size_bytes: int
    lives: list[tuple[int, int]]
    """Ticks [birth, death) in which the storage is alive. In a what-if recording they leave out the time for which only
    saves keep it alive."""
    category: Category
    op: int | None
    """Index of the op that made the storage; None if the storage existed before the recorded steps."""
    name: str = ""
    """Name of the parameter or buffer that the storage holds. A gradient has the name of its parameter. Optimizer state
    has this name and its key, such as 'fc.weight (exp_avg)'. An input has its path in the batch. Empty for others."""
    shape: tuple[int, ...] = ()
    """Shape of the first tensor that was seen on the storage; empty for memory that belongs to no tensor."""
    dtype: str = ""
    """Dtype of that tensor, such as 'float32'; empty for memory that belongs to no tensor."""
    stream: int = 0
    """Number of the CUDA stream in which the storage is allocated; 0 for the default stream."""
    trials: Trials | None = None
    """Sizes that are tried if the storage does not fit, `size_bytes` first; None if nothing else is tried."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Save:
    """A tensor that autograd saved for backward. The save keeps its storage alive in ticks [pack, release)."""

    storage: int | None
    """Index of the tensor's storage; None if the storage lives during the whole step anyway (parameters, inputs)."""
    pack: int
    """Tick at which autograd saved the tensor."""
    unpack: int | None
    """Tick at which backward first reads the tensor; None if backward never reads it."""
    release: int | None
    """Tick at which autograd releases the tensor; None if it holds the tensor to the end of the recording."""
    call: int | None
    """Index of the innermost call in which the tensor was saved; None if it was saved outside of the model."""
    again: int | None = None
    """Tick at which a second backward first reads the tensor, as with `retain_graph`; None if there is none."""
    is_of_next_op: bool = False
    """True if autograd saved the tensor for an op that had not run yet. False if it saved the tensor for the last op
    before that made or changed a storage."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Call:
    """One forward call of a module, or a segment of one. A recomputation inside backward is not a `Call`."""

    module: str
    """Path of the module."""
    parent: int | None
    """Index of the call in which this call is nested; None for an outermost call."""
    start: int
    """Tick at which the call began."""
    end: int
    """Tick at which the call ended."""
    inputs: tuple[int, ...]
    """Indices of the storages of the tensors among the arguments; empty for a segment."""
    made_inputs: tuple[int, ...]
    """Storages in `inputs` that are outputs of differentiable ops. Only these inputs may be offloaded. Empty if the
    call gets one tensor as two arguments: offloading would turn it into two tensors."""
    obstacle: str | None
    """The reason why this call must not be run twice; None if no reason was found."""
    has_hooks: bool = False
    """True if the user has set forward hooks on the module. The ops of hooks are recorded in the call, but do not run
    if the planner replaces the module's forward."""
    segment: tuple[int, int] | None = None
    """For a segment of a forward: number of its first op, and of the op after its last (`planner.recompute.segments`).
    None for a whole forward."""
    split_points: tuple[int, ...] = ()
    """Numbers of the ops at which the segment may be divided into parts."""
    only_divided: bool = False
    """True if the segment may be recomputed only in parts, and not as a whole."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The calls of a training step that a recording has, and how the calls after them continue."""

    calls: int = 2
    """Number of recorded calls. They take every course that was seen."""
    period: int = 1
    """Number of calls, at the end of the recorded ones, that all later calls repeat."""
    watched: int = 2
    """Number of calls that were run to find this out."""
    is_certain: bool = True
    """True if the state of Python objects shows that later calls repeat these. False if a number changed in each call,
    such as a counter, so that a call after the watched ones may do something else."""
    repeats: bool = True
    """False if the calls did not repeat. `period` is then 1."""
    growth_bytes: int = 0
    """Bytes by which the memory that calls hold grows in each call, if they do not repeat."""


TWO_STEPS = Schedule()
"""The schedule of a step of which each call after the first does the same."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepGraph:
    """One or more recorded training steps."""

    ops: list[Op]
    storages: list[Storage]
    saves: list[Save]
    """Tensors that autograd saved, in a what-if recording. Empty in a plain recording, where `Storage.lives` includes
    the time for which autograd keeps a storage."""
    calls: list[Call]
    """Module calls in the order in which they began, followed by the segments, if there are any."""
    ticks: int
    """Number of ticks: the ticks of the recording are 0 to `ticks - 1`."""
    steps: int
    """Number of training steps."""
    primed: bool
    """True if the optimizer's state existed before the first recorded step."""
    micro_batch_sizes: tuple[int, ...]
    """Number of samples of each micro-batch of a step."""
    module_types: dict[str, str]
    """Class name of each module, by path."""
    batch_statistics: tuple[str, ...]
    """Paths of modules that normalize over the samples of the batch (BatchNorm in training mode)."""
    update_tick: int | None = None
    """Tick at which the last optimizer step began. None if there is none or it cannot be separated from the backward:
    it ran inside the backward, read a sparse gradient, which only a backward can make, or is in the user's own step."""
    step_starts: tuple[int, ...] = ()
    """For each training step, the last tick before it. Earlier ticks than the first of them belong to the setup."""
    cache_releases: tuple[int, ...] = ()
    """Ticks, at which nothing else happens, of the calls of `torch.cuda.empty_cache`. They matter only in a whole run:
    the footprint of one step is that of the largest cache."""
    trained: tuple[str, ...] = ()
    """Names of the parameters that received a gradient."""
    assumptions: tuple[str, ...] = ()
    """Assumptions about tensor values that the step reads and a rehearsal does not have, each with module and line."""

    schedule: Schedule = TWO_STEPS
    """How the steps after the recorded ones continue. It is known for plain recordings of two steps or more."""
    changed_state: str | None = None
    """Python state of the model or the loss function that the last step changed; None if it changed none, or if only
    one step was recorded."""
    changed_optimizer: str | None = None
    """Attribute of an optimizer of the user's own class that the last step changed; None if it changed none, or if only
    one step was recorded."""
    forwards_differ: bool = False
    """True if the forwards of the steps ran different ops, or ops with different numbers as arguments."""
    ops_differ: bool = False
    """True if the forwards of the steps ran different ops, such as those that fill a cache in the first forward."""

    @property
    def before_update_end(self) -> int:
        """The tick at which the part before the update ends: the end of the recording if `update_tick` is None."""
        return self.ticks if self.update_tick is None else self.update_tick

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self).items()
        return {name: Columns.of(value) if isinstance(value, list) and value else value for name, value in state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            vars(self)[name] = value.items() if isinstance(value, Columns) else value

    def enclosing(self, call: int | None) -> list[int]:
        """Returns the indices of a call and of the calls in which it is nested, innermost first; empty for None."""
        chain = []
        while call is not None:
            chain.append(call)
            call = self.calls[call].parent
        return chain

    def spans(self) -> list[list[tuple[int, int]]]:
        """Returns, for each storage, the disjoint ticks [start, stop) in which it is alive, including its saves."""
        spans: list[list[tuple[int, int]]] = [list(storage.lives) for storage in self.storages]
        for save in self.saves:
            if save.storage is not None:
                spans[save.storage].append((save.pack, self.ticks if save.release is None else save.release))
        return [merged_spans(span) for span in spans]

    def live_bytes(self, *, granularity_bytes: int = 1) -> np.ndarray:
        """Returns int64[ticks]: bytes alive at each tick, with sizes rounded up to multiples of `granularity_bytes`."""
        delta = np.zeros(self.ticks + 1, dtype=np.int64)
        for storage, spans in zip(self.storages, self.spans(), strict=True):
            size = round_up(storage.size_bytes, granularity_bytes)
            for start, stop in spans:
                delta[start] += size
                delta[stop] -= size
        return np.cumsum(delta)[:-1]

    def category_bytes(self, *, granularity_bytes: int = 1) -> np.ndarray:
        """Returns int64[len(Category), ticks]: `live_bytes` of each category, in the order of `Category`."""
        delta = np.zeros((len(Category), self.ticks + 1), dtype=np.int64)
        rows = {category: row for category, row in zip(Category, delta, strict=True)}
        for storage, spans in zip(self.storages, self.spans(), strict=True):
            size, row = round_up(storage.size_bytes, granularity_bytes), rows[storage.category]
            for start, stop in spans:
                row[start] += size
                row[stop] -= size
        return np.cumsum(delta, axis=1)[:, :-1]

    def bytes_of(self, category: Category) -> int:
        """Returns the total bytes of all storages of a category that are alive at any tick."""
        return sum(storage.size_bytes for storage in self.storages if storage.category is category and storage.lives)

    def op_at(self, tick: int) -> Op | None:
        """Returns the op that was running at this tick, or else the last one before; None before the first op."""
        position = bisect.bisect_right(self.ops, tick, key=lambda op: op.tick)
        return self.ops[position - 1] if position else None


def first_steps(graph: StepGraph, steps: int) -> StepGraph:
    """Returns the recording as if it had ended after a number of steps."""
    if steps >= len(graph.step_starts):
        return graph
    last = graph.step_starts[steps]
    ticks = last + 1
    storages = [
        dataclasses.replace(storage, lives=lives)
        for storage in graph.storages
        if (lives := [(start, min(stop, ticks)) for start, stop in storage.lives if start <= last]) or not storage.lives
    ]
    return dataclasses.replace(
        graph,
        ops=[op for op in graph.ops if op.step < steps],
        storages=storages,
        calls=[call for call in graph.calls if call.start <= last],
        ticks=ticks,
        steps=steps,
        step_starts=graph.step_starts[:steps],
        cache_releases=tuple(tick for tick in graph.cache_releases if tick <= last),
    )


def first_step_before_update(graph: StepGraph) -> StepGraph:
    """Returns the recording of the first step without its update, which makes the optimizer state."""
    step = first_steps(graph, 1)
    update_tick = next((op.tick for op in step.ops if op.phase is Phase.OPTIMIZER), step.ticks)
    ops = [op for op in step.ops if op.tick < update_tick]
    storages = [
        dataclasses.replace(
            storage,
            lives=[life for life in storage.lives if life[0] < update_tick],
            op=None if storage.op is None or storage.op >= len(ops) else storage.op,
        )
        for storage in step.storages
    ]
    return dataclasses.replace(step, ops=ops, storages=storages, update_tick=update_tick, primed=True)


def last_step(graph: StepGraph) -> StepGraph:
    """Returns the recording of the last step alone. What exists before this step counts as made before the recording.

    Args:
        graph: a plain recording.
    """
    begin = graph.step_starts[-1]
    ops, calls = sum(op.tick <= begin for op in graph.ops), sum(call.start <= begin for call in graph.calls)

    def later(index: int | None, before: int) -> int | None:
        return None if index is None or index < before else index - before

    return dataclasses.replace(
        graph,
        ops=[
            dataclasses.replace(op, call=later(op.call, calls), forward_op=later(op.forward_op, ops))
            for op in graph.ops[ops:]
        ],
        storages=[
            dataclasses.replace(
                storage, lives=[life for life in storage.lives if life[1] > begin], op=later(storage.op, ops)
            )
            for storage in graph.storages
        ],
        calls=[dataclasses.replace(call, parent=later(call.parent, calls)) for call in graph.calls[calls:]],
        steps=1,
        primed=True,
        step_starts=(begin,),
        cache_releases=tuple(tick for tick in graph.cache_releases if tick > begin),
    )


def round_up(size_bytes: int, granularity_bytes: int) -> int:
    """Returns the smallest multiple of `granularity_bytes` that is at least `size_bytes`."""
    return -(-size_bytes // granularity_bytes) * granularity_bytes


def merged_spans(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merges half-open intervals of ticks that overlap or touch."""
    if len(spans) < 2:
        return spans
    spans = sorted(spans)
    merged = [spans[0]]
    for start, stop in itertools.islice(spans, 1, None):
        if start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged
