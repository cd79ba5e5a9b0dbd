"""The decisions on the memory of tensors that backward needs and makes, and on the allocator that serves it.

The tensors are recomputed, or kept in host memory meanwhile. Gradients are used and freed at once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container
from typing import ClassVar

from planner.errors import DecisionError
from planner.plan_types.decision_base import ALLOCATOR_VARIABLE, Decision, Fidelity, Role, allocator_conf
from planner.plan_types.words import counted, module_listing, op_ranges


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
class Allocator(Decision):
    """Set options of CUDA's caching allocator, so that less of the memory that it reserves stays unused.

    The options are those of the environment variable PYTORCH_ALLOC_CONF. They change neither results nor the
    memory of tensors. PyTorch reads them once, before the first tensor is on the card.
    """

    kind: ClassVar[str] = "allocator"
    aliases: ClassVar[tuple[str, ...]] = ("allocator-settings", "expandable-segments")
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    role: ClassVar[Role] = Role.ALLOCATOR
    left_out_if_empty: ClassVar[tuple[str, ...]] = ("expandable_segments", "max_split_size_mb")
    expandable_segments: bool = False
    """True if segments grow page by page, so that a larger request needs no new segment."""
    max_split_size_mb: int | None = None
    """Blocks of at least this many MiB are not split for smaller requests; None for no such limit."""

    def __post_init__(self) -> None:
        least, most, split, expandable = 21, 1 << 30, self.max_split_size_mb, self.expandable_segments
        if split is not None and (type(split) is not int or not least <= split <= most):
            raise DecisionError(
                f"allocator has max_split_size_mb={split!r}: give a whole number between {least} and {most}"
            )
        if type(expandable) is not bool:
            raise DecisionError(f"allocator has expandable_segments={expandable!r}: give true or false")
        if not self.allocator_options:
            raise DecisionError(
                "allocator sets no option: give expandable_segments=True or max_split_size_mb, or leave the decision "
                "out"
            )

    @property
    def allocator_options(self) -> dict[str, str]:
        options = {"expandable_segments": self.expandable_segments, "max_split_size_mb": self.max_split_size_mb}
        return {name: str(value) for name, value in options.items() if value}

    def describe(self) -> str:
        return f"allocator options, to be set before CUDA starts: {ALLOCATOR_VARIABLE}={allocator_conf([self])}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recomputing(Decision):
    """Base class of decisions that recompute or offload modules, or parts of them."""

    role: ClassVar[Role] = Role.RECOMPUTE
    modules: tuple[str, ...]

    def of_modules(self, chosen: Container[str]) -> Recomputing:
        """Returns the decision for those of its modules that are in `chosen`; at least one has to be."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint(Recomputing):
    """Recompute the activations of `modules` in backward (activation checkpointing).

    With `kept` this is selective activation checkpointing: the outputs of some ops are kept, all others are recomputed.
    """

    kind: ClassVar[str] = "checkpoint"
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    disables_kv_cache: ClassVar[bool] = True
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

    def of_modules(self, chosen: Container[str]) -> Checkpoint:
        kept = {module: numbers for module, numbers in self.by_module.items() if module in chosen}
        return dataclasses.replace(self, modules=tuple(kept), kept=tuple(kept.values()) if self.kept else ())

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
class Replay(Recomputing):
    """Recompute segments of a module's forward in backward, op by op, instead of keeping their activations.

    A segment is a range of consecutive ops; it need not be a call of a submodule.
    """

    kind: ClassVar[str] = "segment-checkpoint"
    former_kind: ClassVar[str | None] = "replay"
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    needs_plain_tensors: ClassVar[bool] = True
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

    def of_modules(self, chosen: Container[str]) -> Replay:
        places = [place for place, module in enumerate(self.modules) if module in chosen]
        return dataclasses.replace(
            self,
            modules=tuple(self.modules[place] for place in places),
            stretches=tuple(self.stretches[place] for place in places),
            kept=tuple(self.kept[place] for place in places),
            stops=tuple(self.stops[place] for place in places) if self.stops else (),
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
class Offload(Recomputing):
    """Keep the tensors that `modules` save for backward in pinned host memory between forward and backward."""

    kind: ClassVar[str] = "offload"
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    needs_plain_tensors: ClassVar[bool] = True
    needs_host_memory: ClassVar[bool] = True
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

    def of_modules(self, chosen: Container[str]) -> Offload:
        modules = tuple(module for module in self.modules if module in chosen)
        return dataclasses.replace(
            self, modules=modules, inputs_of=tuple(module for module in self.inputs_of if module in modules)
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
