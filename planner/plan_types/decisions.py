"""The decisions that a plan consists of: one frozen dataclass for each technique, in the order of their application.

A decision states *what* to change; its rule in `rewrite/rules/` makes the change. Most files read only the attributes
of the base class (`decision_base.Decision`), so that they need not know the classes below.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import ClassVar

from planner.errors import DecisionError
from planner.plan_types.decision_base import (
    Decision,
    Fidelity,
    Role,
    conflict,
    divides_batch,
    micro_batches_of,
    of_optimizers,
)
from planner.plan_types.recompute_decisions import Allocator, Checkpoint, Offload, Replay, StepInBackward
from planner.plan_types.words import counted, module_listing

__all__ = [
    "Accumulation",
    "Allocator",
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
    "Shard",
    "ShardedPrecision",
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
class ShardedPrecision(Decision):
    """Run the forward and the loss under autocast, and gather sharded parameters in its dtype.

    The shards and the optimizer's state stay in fp32, and so does the sum of the gradients over the cards. accelerate
    uses no autocast, and adds up gradients in bf16: FSDP2 alone casts parameters, inputs and outputs of its units.
    """

    kind: ClassVar[str] = "sharded-precision"
    fidelity: ClassVar[Fidelity] = Fidelity.ROUNDED
    role: ClassVar[Role] = Role.PRECISION
    left_out_if_empty: ClassVar[tuple[str, ...]] = ("without_autocast",)
    dtype: str = "bf16"
    reduce_dtype: str = "fp32"
    """Precision in which gradients are added up over the cards."""
    without_autocast: bool = False
    """True if each op runs in the dtype of its inputs, and FSDP2 casts the outputs of its units, too."""

    def __post_init__(self) -> None:
        if self.dtype != "bf16" or self.reduce_dtype not in ("bf16", "fp32"):
            raise DecisionError(
                f"sharded-precision has dtype {self.dtype!r} and reduce_dtype {self.reduce_dtype!r}: choose bf16, and "
                "bf16 or fp32"
            )

    @property
    def autocast_dtype(self) -> str | None:
        return None if self.without_autocast else self.dtype

    @property
    def forward_dtype(self) -> str | None:
        return self.dtype

    def describe(self) -> str:
        how = f"forward in {self.dtype} without autocast" if self.without_autocast else f"{self.dtype} autocast"
        return (
            f"mixed precision: {how}, parameters are gathered in {self.dtype}, gradients added up in "
            f"{self.reduce_dtype}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard(Decision):
    """Train one model on several cards, each with its part of the batch.

    'fsdp' divides parameters, gradients and optimizer state among the cards (FSDP2, ZeRO-3). Each unit is a module
    whose parameters are gathered before its forward and its backward, and freed afterwards. 'ddp' keeps all of them on
    each card (DistributedDataParallel). 'zero1' does so, too, but divides the optimizer state
    (ZeroRedundancyOptimizer). With 'own', a function of the user's own divides the model (tensor parallelism, for
    example).
    """

    kind: ClassVar[str] = "shard"
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    role: ClassVar[Role] = Role.SHARDING
    module_fields: ClassVar[tuple[str, ...]] = ("units", "kept", "tail")
    _new_fields = ("offload", "prepared_by", "classes", "reduces_once", "dimensions", "function")
    left_out_if_empty: ClassVar[tuple[str, ...]] = (*module_fields, *_new_fields)
    way: str
    """'fsdp', 'zero1', 'ddp' or 'own'."""
    mesh: tuple[int, ...]
    """Number of cards; for 'fsdp' also (copies, cards that hold one copy together), which is hybrid sharding (HSDP);
    for 'own' the sizes of the dimensions of the user's mesh."""
    units: tuple[str, ...] = ()
    """Paths of the modules that are units of their own. The parameters of all other modules form one more unit."""
    kept: tuple[str, ...] = ()
    """Units whose parameters are not freed between forward and backward, which saves gathering them again (ZeRO-2)."""
    offload: bool = False
    """True if the shards, their gradients and the optimizer state are in host memory, where the optimizer runs."""
    tail: tuple[str, ...] = ()
    """Paths of the modules that are one more unit together, which stays gathered (accelerate: last norm and head)."""
    prepared_by: str = ""
    """'accelerate' if the model is prepared as accelerate does it: all units are gathered again, or none, and copies of
    the model have gradients next to the buckets of DistributedDataParallel, not in them."""
    classes: tuple[str, ...] = ()
    """Names of the classes whose modules accelerate makes units."""
    reduces_once: bool = False
    """True if each card adds up its gradients of all micro-batches, and the cards reduce the sums once in a step. Until
    then each card holds whole gradients. False if the gradients of each micro-batch are reduced."""
    dimensions: tuple[str, ...] = ()
    """For 'own': names of the dimensions of the mesh. The batch is divided among those that begin with 'dp'."""
    function: str = ""
    """For 'own': file and name of the function, 'parallel.py:parallelize'; '' if it is known as an object only."""

    def __post_init__(self) -> None:
        if self.way not in ("fsdp", "zero1", "ddp", "own"):
            raise DecisionError(f"shard way '{self.way}' is unknown: choose fsdp, zero1, ddp or own")
        if len(self.dimensions) != (len(self.mesh) if self.way == "own" else 0):
            raise DecisionError(f"shard has mesh={self.mesh!r} and names {self.dimensions!r} for its dimensions")
        most = {"own": len(self.mesh), "fsdp": 2}.get(self.way, 1)
        if not 1 <= len(self.mesh) <= most or not all(type(size) is int and size > 0 for size in self.mesh):
            raise DecisionError(f"shard has mesh={self.mesh!r}: give the number of cards, or (copies, cards for each)")
        if self.way != "fsdp" and (self.units or self.tail or self.offload):
            raise DecisionError(f"shard way '{self.way}' has neither units nor offload: use fsdp for them")
        if self.prepared_by not in ("", "accelerate"):
            raise DecisionError(f"shard is prepared by '{self.prepared_by}', which is unknown: choose accelerate")
        if unknown := sorted(set(self.kept) - set(self.units)):
            raise DecisionError(f"shard keeps '{unknown[0]}', which is not one of its units")

    @property
    def cards(self) -> int:
        return math.prod(self.mesh)

    @property
    def communicators(self) -> int:
        return 1 if len(self.mesh) == 1 else 1 + len(self.mesh)  # a mesh of one dimension is the group of all cards

    @property
    def divides_batch_by(self) -> int:
        sizes = zip(self.dimensions, self.mesh, strict=self.way == "own")
        return math.prod(size for name, size in sizes if divides_batch(name)) if self.way == "own" else self.cards

    @property
    def dividing_function(self) -> str:
        return self.function

    @property
    def divides_parameters_by(self) -> int:
        return self.cards if self.way == "own" else self.mesh[-1] if self.way == "fsdp" else 1

    @property
    def gathers_parameters(self) -> bool:
        return self.way == "fsdp"

    @property
    def keeps_parameters_on_host(self) -> bool:
        return self.offload

    @property
    def preparing_library(self) -> str:
        return self.prepared_by

    @property
    def classes_of_units(self) -> tuple[str, ...]:
        return self.classes

    @property
    def keeps_whole_gradients(self) -> bool:
        return self.reduces_once

    def reducing_once(self) -> Shard:
        return self if self.prepared_by or self.way == "own" else dataclasses.replace(self, reduces_once=True)

    @property
    def units_gathered_again(self) -> tuple[str, ...]:
        if self.prepared_by:
            return ()  # they are not chosen one by one
        return tuple(unit for unit in self.units if unit not in self.kept)

    def gathering_again(self, units: Collection[str]) -> Shard:
        return dataclasses.replace(self, kept=tuple(unit for unit in self.units if unit not in units))

    @property
    def reorders_sums(self) -> bool:
        return True

    def excludes(self, other: Decision) -> str | None:
        if other.steps_in_backward:
            return "step-in-backward uses each gradient before those of the other cards are added to it"
        if other.eight_bit_state and self.way != "ddp":
            return "8-bit state cannot be planned if parameters or state are divided (--sharding ddp divides neither)"
        if self.way == "own" and other.needs_plain_tensors:
            return f"{other.kind} does not take the DTensors into which your function may turn parameters"
        return None

    def describe(self) -> str:
        once = "; gradients reduced once in a step" if self.reduces_once and not self.prepared_by else ""
        library = f" as {self.prepared_by} prepares it" if self.prepared_by else ""
        cards = counted(self.cards, "card")
        if self.way == "ddp":
            return f"a copy of the model on each of {cards} (DistributedDataParallel{library}){once}"
        if self.way == "zero1":
            return f"a copy of the model on each of {cards}, with divided optimizer state (ZeRO-1){once}"
        if self.way == "own":
            mesh = " x ".join(f"{name} {size}" for name, size in zip(self.dimensions, self.mesh, strict=True))
            return f"divided among {cards} ({mesh}) by your function {self.function}".rstrip()
        hybrid = len(self.mesh) > 1
        where = f"{self.mesh[0]} copies, each sharded over {self.mesh[1]}" if hybrid else f"sharded over {self.cards}"
        text = f"{where} cards (FSDP2{library})"
        if self.units:
            text += f", in units {module_listing((*self.units, *self.tail))}"
        if self.kept:
            text += f"; gathered once in a step: {module_listing(self.kept)}"
        return text + (", with the shards in host memory" if self.offload else "") + once


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
    needs_plain_tensors: ClassVar[bool] = True
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
            given = f"{self.micro_batches} micro-batches of {counted(self.micro_batch_size, 'sample')}"
            raise DecisionError(f"accumulation over {given}: needs at least 2 micro-batches of at least 1 sample")

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
