"""What a rehearsal leaves behind: plain data about one training step, in the order in which it happened.

Time is counted in *ticks*: every event (an op starts, a storage is born or dies, a tensor is saved for
backward, unpacked or released, a module call starts or ends) takes the next one. Bytes are the sizes of
storages as PyTorch asked for them; rounding is the allocator's business.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools

import numpy as np

from planner.workspaces.registry import KernelCall


class Phase(enum.StrEnum):
    """Part of a training step."""

    SETUP = "setup"
    """Before the recorded steps: parameters and the batch arrive, optimizer state may be primed."""
    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    """Forward ops that run inside backward."""
    OPTIMIZER = "optimizer"
    """Everything between a backward and the next forward: unscale, clip, step, zero."""


class Category(enum.StrEnum):
    """What bytes are, in the order in which reports list them."""

    PARAMETER = "parameters"
    GRADIENT = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    ACTIVATION = "activations"
    LOGITS = "logits and loss"
    AUTOCAST = "autocast copies"
    TEMPORARY = "temporaries"
    INPUT = "inputs"
    WORKSPACE = "workspaces"
    SLACK = "allocator slack"
    CONTEXT = "CUDA context"


@dataclasses.dataclass(slots=True, kw_only=True)
class Op:
    """One kernel call (or view) below autograd."""

    name: str
    """Such as 'aten.addmm.default'."""
    tick: int
    phase: Phase
    module: str
    """Path of the module whose forward made it (for backward ops: whose forward op it differentiates)."""
    call: int | None
    """Innermost module call that was running, as an index into `StepGraph.calls`."""
    source: str
    """'file.py:line' of the model's code, where known."""
    flops: int
    moved_bytes: int
    """Read plus written; 0 for views, which launch nothing."""
    host_bytes: int
    """Of those, bytes that cross the link between the device and the host."""
    dtype: str
    """Compute dtype: 'fp32', 'bf16', 'fp16', ..."""
    is_view: bool
    step: int
    micro_batch: int
    forward_op: int | None = None
    """For backward ops: index of the forward op they differentiate."""
    inputs: tuple[int, ...] = ()
    """Storages read."""
    outputs: tuple[int, ...] = ()
    """Storages written or returned."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the output tensors."""
    kernel: KernelCall | None = None
    """The call, where a formula says what scratch memory it takes."""
    scratch_known: bool = True
    """Whether it is known what the op takes beside its outputs: by a formula, or nothing."""
    writes: bool = False
    """Whether it changes an argument in place."""
    draws_random_numbers: bool = False
    """Whether it moves the generator on, as attention with dropout does."""

    @property
    def makes_or_changes(self) -> bool:
        """Whether it makes a storage or changes one: such ops are numbered in a replay."""
        return not self.is_view and (self.writes or not set(self.outputs) <= set(self.inputs))


@dataclasses.dataclass(slots=True, kw_only=True)
class Storage:
    """Memory behind one or more tensors."""

    size_bytes: int
    lives: list[tuple[int, int]]
    """Ticks [birth, death) in which anything but a `Save` holds it. Longer lives overlap or touch a save."""
    category: Category
    op: int | None
    """Op that it was born in; None if it was there before."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Save:
    """A tensor kept by autograd for backward: ticks [pack, release), first needed at `unpack`."""

    storage: int | None
    """None where what is kept is held elsewhere anyway (parameters, inputs)."""
    pack: int
    unpack: int | None
    release: int | None
    call: int | None
    """Innermost module call in which it was saved."""
    is_of_next_op: bool = False
    """Whether it was saved for the op that comes next, rather than for the last one that made or changed a storage."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Call:
    """One forward call of a module (recomputations are not listed)."""

    module: str
    parent: int | None
    start: int
    end: int
    inputs: tuple[int, ...]
    """Storages of the tensors among its arguments."""
    made_inputs: tuple[int, ...]
    """Those of them that were made by differentiable ops; none where one tensor is given twice."""
    obstacle: str | None
    """Why this call must not be run twice; None if nothing was seen that speaks against it."""
    has_hooks: bool = False
    """Whether ops of the user's forward hooks are among those of the call; a rewritten forward does not hold them."""
    stretch: tuple[int, int] | None = None
    """For a stretch of a module's forward: the first op and the one after the last (`planner.recompute.segments`)."""
    stops: tuple[int, ...] = ()
    """Ops that may divide the stretch."""
    only_divided: bool = False
    """Whether the stretch is of no use undivided."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepGraph:
    """One or more recorded training steps."""

    ops: list[Op]
    storages: list[Storage]
    saves: list[Save]
    """Empty in a plain recording: there, the holds of saves are part of `Storage.lives`."""
    calls: list[Call]
    ticks: int
    steps: int
    primed: bool
    """Whether the optimizer's state was there before the first recorded step."""
    micro_batch_sizes: tuple[int, ...]
    """Sizes of the micro-batches that were rehearsed in each step."""
    module_types: dict[str, str]
    batch_statistics: tuple[str, ...]
    """Modules that normalise over the samples of the batch (BatchNorm in training mode)."""
    update_tick: int | None = None
    """When the last step's optimizer began; None if it cannot be told from the rest (a sparse gradient, which only a
    backward can make)."""
    trained: tuple[str, ...] = ()
    """Parameters that got a gradient."""
    assumptions: tuple[str, ...] = ()
    """What was assumed where the step asked for values that nothing tells, each with its module and line."""

    def spans(self) -> list[list[tuple[int, int]]]:
        """For each storage: disjoint ticks [start, stop) in which it is alive, saves included."""
        spans: list[list[tuple[int, int]]] = [list(storage.lives) for storage in self.storages]
        for save in self.saves:
            if save.storage is not None:
                spans[save.storage].append((save.pack, self.ticks if save.release is None else save.release))
        return [_union(span) for span in spans]

    def live_bytes(self, *, granularity_bytes: int = 1) -> np.ndarray:
        """int64[ticks]: bytes alive at each tick, each storage rounded up to `granularity_bytes`."""
        delta = np.zeros(self.ticks + 1, dtype=np.int64)
        for storage, spans in zip(self.storages, self.spans(), strict=True):
            size = round_up(storage.size_bytes, granularity_bytes)
            for start, stop in spans:
                delta[start] += size
                delta[stop] -= size
        return np.cumsum(delta)[:-1]

    def bytes_of(self, category: Category) -> int:
        """Of all storages of a category that ever live."""
        return sum(storage.size_bytes for storage in self.storages if storage.category is category and storage.lives)

    def op_at(self, tick: int) -> Op | None:
        """The op that was running, or had last run, at this tick."""
        position = int(np.searchsorted(np.fromiter((op.tick for op in self.ops), np.int64), tick, side="right")) - 1
        return self.ops[position] if position >= 0 else None


def round_up(size_bytes: int, granularity_bytes: int) -> int:
    return -(-size_bytes // granularity_bytes) * granularity_bytes


def _union(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
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
