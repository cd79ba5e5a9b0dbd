"""The decisions that a plan consists of: one frozen dataclass for each technique, in the order of their application.

A decision states *what* to change; its rule in `rewrite/rules/` makes the change. Most files read only the attributes
of the base class (`decision_base.Decision`), so that they need not know the classes below.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import ClassVar

from planner.errors import DecisionError
from planner.plan_types.decision_base import Decision, Fidelity, Role, conflict, micro_batches_of, of_optimizers
from planner.plan_types.decision_text import counted, module_listing, op_ranges

__all__ = [
    "Accumulation",
    "Checkpoint",
    "ChunkedLoss",
    "Decision",
    "Fidelity",
    "Freeze",
    "Offload",
    "Optimizer",
    "OptimizerKernel",
    "Precision",
    "Replay",
    "Role",
    "Segment",
    "StepInBackward",
    "conflict",
    "micro_batches_of",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Freeze(Decision):
    """Do not train the parameters of `modules`, which are the first modules of the model, counted from its input."""

    kind: ClassVar[str] = "freeze"
    fidelity: ClassVar[Fidelity] = Fidelity.PARTIAL
    role: ClassVar[Role] = Role.FREEZING
    modules: tuple[str, ...]

    @property
    def frozen_modules(self) -> tuple[str, ...]:
        return self.modules

    def describe(self) -> str:
        return f"freeze {counted(len(self.modules), 'module')}: {module_listing(self.modules)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision(Decision):
    """Run the forward and the loss under autocast. Weights stay in fp32; for fp16 a GradScaler scales the loss."""

    kind: ClassVar[str] = "mixed-precision"
    former_kind: ClassVar[str | None] = "precision"
    fidelity: ClassVar[Fidelity] = Fidelity.ROUNDED
    role: ClassVar[Role] = Role.PRECISION
    dtype: str
    """'bf16' or 'fp16'."""

    def __post_init__(self) -> None:
        if self.dtype not in ("bf16", "fp16"):
            raise DecisionError(f"mixed-precision dtype '{self.dtype}' is unknown: choose bf16 or fp16")

    @property
    def autocast_dtype(self) -> str | None:
        return self.dtype

    def describe(self) -> str:
        scaler = " with a gradient scaler" if self.needs_gradient_scaler else ""
        return f"mixed precision: {self.dtype} autocast{scaler}, trained weights in fp32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer(Decision):
    """Keep the optimizer's state in 8 bits (bitsandbytes AdamW8bit; small tensors and embeddings keep 32 bits)."""

    kind: ClassVar[str] = "8bit-optimizer"
    former_kind: ClassVar[str | None] = "optimizer"
    rule: ClassVar[str | None] = "eight_bit_optimizer"
    fidelity: ClassVar[Fidelity] = Fidelity.ROUNDED
    role: ClassVar[Role] = Role.OPTIMIZER
    eight_bit_state: ClassVar[bool] = True
    required_packages: ClassVar[tuple[str, ...]] = ("bitsandbytes",)
    left_out_if_empty: ClassVar[tuple[str, ...]] = ("optimizers",)
    name: str = "adamw8bit"
    optimizers: tuple[str, ...] = ()
    """Names of the optimizers that are replaced, if the step has several; empty for its only optimizer."""

    def __post_init__(self) -> None:
        if self.name != "adamw8bit":
            raise DecisionError(f"8-bit optimizer '{self.name}' is unknown: the only supported name is adamw8bit")

    def describe(self) -> str:
        of = of_optimizers(self.optimizers)
        return f"8-bit optimizer state{of} (bitsandbytes AdamW); embeddings and small tensors keep 32-bit state"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerKernel(Decision):
    """Replace the foreach implementation, which torch's optimizers use on a GPU by default, to save its temporaries.

    foreach allocates temporaries for all parameters at once. 'fused' is one kernel that writes in place; 'for-loop'
    updates one parameter after the other.
    """

    kind: ClassVar[str] = "optimizer-kernel"
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    role: ClassVar[Role] = Role.OPTIMIZER
    left_out_if_empty: ClassVar[tuple[str, ...]] = ("optimizers",)
    kernel: str
    """'fused' or 'for-loop'."""
    optimizers: tuple[str, ...] = ()
    """Names of the optimizers whose kernel is set, if the step has several; empty for its only optimizer."""

    def __post_init__(self) -> None:
        if self.kernel not in ("fused", "for-loop"):
            raise DecisionError(f"optimizer-kernel '{self.kernel}' is unknown: choose fused or for-loop")

    @property
    def optimizer_kernel(self) -> str | None:
        return self.kernel

    @property
    def reorders_sums(self) -> bool:
        return self.kernel == "fused"

    def excludes(self, other: Decision) -> str | None:
        if other.eight_bit_state:
            return "optimizer-kernel sets an option of torch's own optimizer, and 8-bit state needs another optimizer"
        return None

    def describe(self) -> str:
        of = of_optimizers(self.optimizers)
        if self.kernel == "fused":
            return f"fused optimizer kernel{of}: updates parameters in place, without temporaries"
        return f"for-loop optimizer kernel{of}: temporaries of one parameter at a time"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedLoss(Decision):
    """Compute lm_head, cross entropy and their gradients in chunks of tokens, so that the full logits never exist."""

    kind: ClassVar[str] = "chunked-loss"
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    role: ClassVar[Role] = Role.LOSS
    module: str
    """The linear layer that makes the logits (lm_head)."""
    chunks: int

    def __post_init__(self) -> None:
        if type(self.chunks) is not int or self.chunks < 2:
            raise DecisionError(f"chunked-loss has chunks={self.chunks}: give a whole number of at least 2")

    @property
    def reorders_sums(self) -> bool:
        return True

    def describe(self) -> str:
        return f"loss in {self.chunks} chunks ({self.module}): the full logits are never materialized"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accumulation(Decision):
    """Split the batch into micro-batches of `micro_batch_size` samples; the last one may be smaller."""

    kind: ClassVar[str] = "accumulation"
    aliases: ClassVar[tuple[str, ...]] = ("gradient-accumulation",)
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    role: ClassVar[Role] = Role.MICRO_BATCHING
    micro_batch_size: int
    micro_batches: int

    def __post_init__(self) -> None:
        whole = type(self.micro_batch_size) is int and type(self.micro_batches) is int
        if not whole or self.micro_batch_size < 1 or self.micro_batches < 2:
            raise DecisionError(
                f"accumulation over {self.micro_batches} micro-batches of {self.micro_batch_size} samples: "
                "needs at least 2 micro-batches of at least 1 sample"
            )

    @property
    def micro_batch_count(self) -> int:
        return self.micro_batches

    @property
    def samples_per_micro_batch(self) -> int | None:
        return self.micro_batch_size

    def with_micro_batches(self, count: int) -> Accumulation:
        return dataclasses.replace(self, micro_batches=count)

    @property
    def reorders_sums(self) -> bool:
        return True

    def describe(self) -> str:
        return f"gradient accumulation: {self.micro_batches} micro-batches of {self.micro_batch_size}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepInBackward(Decision):
    """Update each parameter during the backward, as soon as its gradient is complete, and free the gradient at once."""

    kind: ClassVar[str] = "step-in-backward"
    aliases: ClassVar[tuple[str, ...]] = ("optimizer-in-backward",)
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    role: ClassVar[Role] = Role.UPDATE_TIME
    steps_in_backward: ClassVar[bool] = True

    def excludes(self, other: Decision) -> str | None:
        if other.micro_batch_count > 1:
            return "step-in-backward frees each gradient at once, and accumulation sums gradients over micro-batches"
        if other.needs_gradient_scaler:
            return "step-in-backward never has all gradients, and fp16's gradient scaler has to check all of them"
        if other.optimizer_kernel == "for-loop":
            return "step-in-backward updates one parameter at a time anyway: optimizer-kernel's loop changes nothing"
        return None

    def describe(self) -> str:
        return "optimizer step in backward: each gradient is applied and freed at once (no clipping by global norm)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint(Decision):
    """Recompute the activations of `modules` in backward (activation checkpointing).

    With `kept` this is selective activation checkpointing: the outputs of some ops are kept, all others are recomputed.
    """

    kind: ClassVar[str] = "checkpoint"
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    role: ClassVar[Role] = Role.RECOMPUTE
    disables_kv_cache: ClassVar[bool] = True
    modules: tuple[str, ...]
    kept: tuple[tuple[int, ...], ...] = ()
    """For each module: numbers of the ops whose outputs are kept. Only matmuls, convolutions and attention ops are
    numbered, in the order in which a call of the module runs them (`recompute.kept_products`). Empty if no module keeps
    outputs."""

    def __post_init__(self) -> None:
        if not self.modules:
            raise DecisionError("checkpoint names no modules: name at least one module, or leave the decision out")
        if not isinstance(self.kept, tuple) or (self.kept and len(self.kept) != len(self.modules)):
            raise DecisionError(
                f"checkpoint names {counted(len(self.modules), 'module')}, and its kept ops are {self.kept!r}: "
                "give a list of op numbers for each module, or leave kept empty"
            )
        for numbers in self.kept:
            whole = isinstance(numbers, tuple) and all(type(number) is int and number >= 0 for number in numbers)
            if not whole or any(first >= second for first, second in itertools.pairwise(numbers)):
                raise DecisionError(
                    f"checkpoint keeps ops {numbers!r}: give whole numbers of at least 0 in ascending order"
                )

    @property
    def by_module(self) -> dict[str, tuple[int, ...]]:
        """For each module name: numbers of the ops whose outputs are kept."""
        return dict(zip(self.modules, self.kept or ((),) * len(self.modules), strict=True))

    def describe(self) -> str:
        by_kept: dict[tuple[int, ...], list[str]] = {}
        for module, kept in self.by_module.items():
            by_kept.setdefault(kept, []).append(module)
        parts = [
            f"{module_listing(modules)}{_keeping(len(kept), each=len(modules) > 1)}"
            for kept, modules in sorted(by_kept.items())
        ]
        return f"activation checkpointing: {'; '.join(parts)}"


Segment = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""A segment of a forward: its first op, the op after its last op, its kept ops, its stops. See `Replay`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay(Decision):
    """Recompute segments of a module's forward in backward, op by op, instead of keeping their activations.

    A segment is a range of consecutive ops; it need not be a call of a submodule.
    """

    kind: ClassVar[str] = "segment-checkpoint"
    former_kind: ClassVar[str | None] = "replay"
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    role: ClassVar[Role] = Role.RECOMPUTE
    modules: tuple[str, ...]
    """For each segment: the name of the module whose forward it is a part of. Segments of a module are adjacent."""
    stretches: tuple[tuple[int, int], ...]
    """For each segment: the number of its first op, and of the op after its last op. In each call of a module, ops are
    numbered from 0 in the order in which they run. Only ops that make or change a tensor on the module's device are
    counted."""
    kept: tuple[tuple[int, ...], ...]
    """For each segment: numbers of the ops whose outputs are kept."""
    stops: tuple[tuple[int, ...], ...] = ()
    """For each segment: numbers of the ops at which it is divided into parts; a part begins at each of these ops. Each
    part is recomputed when the backward reaches it, so that the saved tensors of only one part are in memory at a time.
    Empty if no segment is divided."""

    def __post_init__(self) -> None:
        if not self.modules:
            raise DecisionError(
                "segment-checkpoint names no segments: name at least one segment, or leave the decision out"
            )
        if not len(self.modules) == len(self.stretches) == len(self.kept) == len(self.stops or self.kept):
            raise DecisionError(
                f"segment-checkpoint has {len(self.modules)} modules, {len(self.stretches)} stretches, "
                f"{len(self.kept)} lists of kept ops and {len(self.stops)} lists of stops: give as many of each "
                "(stops may be empty)"
            )
        for segments in self.by_module.values():
            ranges = [number for start, stop, _, _ in segments for number in (start, stop)]
            inside = [(start, n, stop - 1) for start, stop, kept, stops in segments for n in (*kept, *stops)]
            numbers = [*ranges, *(number for numbers in inside for number in numbers)]
            whole = all(type(number) is int and number >= 0 for number in numbers)
            lists = [list(numbers) for _, _, kept, stops in segments for numbers in (kept, stops)]
            lists += [ranges, *map(list, inside)]
            empty = any(start >= stop or start in stops for start, stop, _, stops in segments)
            if not whole or empty or any(numbers != sorted(numbers) for numbers in lists):
                raise DecisionError(
                    f"segment-checkpoint has segments {segments!r}: give op numbers of at least 0 in ascending order; "
                    "segments must not be empty or overlap, and must contain their kept ops and stops"
                )

    @property
    def by_module(self) -> dict[str, tuple[Segment, ...]]:
        """For each module name: the segments of its forward."""
        by_module: dict[str, tuple[Segment, ...]] = {}
        segments = zip(self.modules, self.stretches, self.kept, self.stops or ((),) * len(self.modules), strict=True)
        for module, (start, stop), kept, stops in segments:
            by_module[module] = (*by_module.get(module, ()), (start, stop, kept, stops))
        return by_module

    def describe(self) -> str:
        alike: dict[tuple[Segment, ...], list[str]] = {}
        for module, segments in self.by_module.items():
            alike.setdefault(segments, []).append(module)
        parts = []
        for segments, modules in alike.items():
            owner = module_listing(modules) if all(modules) else "the model's forward"
            kept = sum(len(kept) for _, _, kept, _ in segments)
            divided = sum(len(stops) + 1 for *_, stops in segments if stops)
            in_parts = f", recomputed in {divided} parts" if divided else ""
            ops = op_ranges((start, stop) for start, stop, _, _ in segments)
            parts.append(f"ops {ops} of {owner}{_keeping(kept, each=len(modules) > 1)}{in_parts}")
        return f"segment checkpointing: {'; '.join(parts)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offload(Decision):
    """Keep the tensors that `modules` save for backward in pinned host memory between forward and backward."""

    kind: ClassVar[str] = "offload"
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    role: ClassVar[Role] = Role.RECOMPUTE
    needs_host_memory: ClassVar[bool] = True
    modules: tuple[str, ...]
    inputs_of: tuple[str, ...]
    """Members of `modules` that are recomputed in backward. Only the inputs of these modules are offloaded."""
    from_bytes: int
    """Minimum size in bytes of the storages that are offloaded; smaller storages stay on the card."""

    def __post_init__(self) -> None:
        if not self.modules or not set(self.inputs_of) <= set(self.modules):
            raise DecisionError(
                f"offload has {counted(len(self.modules), 'module')}, and inputs_of names {list(self.inputs_of)}: "
                "name at least one module in modules, and repeat every module of inputs_of there"
            )
        if type(self.from_bytes) is not int or self.from_bytes < 1:
            raise DecisionError(
                f"offload has a minimum size of {self.from_bytes!r} bytes: give a whole number of at least 1"
            )

    def describe(self) -> str:
        saving = tuple(module for module in self.modules if module not in self.inputs_of)
        parts = [
            f"{tensors} {module_listing(modules)}"
            for tensors, modules in (("tensors saved in", saving), ("inputs of", self.inputs_of))
            if modules
        ]
        return f"offload to pinned host memory: {'; '.join(parts)}"


def _keeping(outputs: int, *, each: bool) -> str:
    """Describes how many op outputs are kept; empty if none are kept.

    Args:
        each: True if the number holds for each of several modules.
    """
    return f", keeping {counted(outputs, 'op output')}{' each' if each else ''}" if outputs else ""
