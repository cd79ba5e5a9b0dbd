"""The parts of a `Plan`: facts about model, workload and solver, memory of the step, and the shortfall."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from planner.plan_types.adapter import Adapter
from planner.plan_types.categories import Category
from planner.plan_types.decisions import Decision
from planner.plan_types.techniques import as_tuples
from planner.plan_types.words import CallingName, ProgramName


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint:
    """Memory of one training step on the card, where it peaks, and the time of the step."""

    allocated_bytes: int
    """Peak of the bytes that tensors hold (`torch.cuda.max_memory_allocated`)."""
    reserved_bytes: int
    """Peak of the bytes that the caching allocator holds (`torch.cuda.max_memory_reserved`)."""
    total_bytes: int
    """`reserved_bytes` plus the CUDA context and libraries, as `nvidia-smi` shows for the process."""
    phase: str
    """The phase in which `allocated_bytes` peaks: 'forward', 'backward', 'recompute' or 'optimizer'."""
    module: str
    """Name of the module whose op runs at the peak; empty if the op belongs to no module."""
    op: str
    """The op that runs at the peak, for example 'aten.mm.default'."""
    breakdown: dict[str, int]
    """Bytes by category at the peak; the values sum to `total_bytes`."""
    step_ns: int
    """Predicted time of the step in nanoseconds."""
    flops: int
    most: dict[str, int] = dataclasses.field(default_factory=dict)
    """For each category of tensors the largest number of bytes that it has at any moment of the step. Empty in plans of
    older versions."""

    def to_json(self) -> dict[str, object]:
        return {
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes,
            "total_bytes": self.total_bytes,
            "at": {"phase": self.phase, "module": self.module, "op": self.op},
            "breakdown": _by_key(self.breakdown),
            "most": _by_key(self.most),
            "step_seconds": self.step_ns / 1e9,
            "flops": self.flops,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Footprint:
        """Reads what `to_json` returned."""
        return cls(
            allocated_bytes=data["allocated_bytes"],
            reserved_bytes=data["reserved_bytes"],
            total_bytes=data["total_bytes"],
            **data["at"],
            breakdown=_by_name(data["breakdown"]),
            most=_by_name(data["most"]),
            step_ns=round(data["step_seconds"] * 1e9),
            flops=data["flops"],
        )


CATEGORY_OF_KEY = {category.key: str(category) for category in Category}
"""Names of the categories by their keys in JSON."""


def _by_key(sizes: Mapping[str, int]) -> dict[str, int]:
    """Converts sizes by name of their category to sizes by its key in JSON."""
    return {Category(name).key: size for name, size in sizes.items()}


def _by_name(sizes: Mapping[str, int]) -> dict[str, int]:
    """Converts what `_by_key` returned back."""
    return {CATEGORY_OF_KEY[key]: size for key, size in sizes.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveTensor:
    """Tensors that are alive at the peak, and that are the same except for the numbers in their names and modules."""

    category: str
    name: str
    """Name of the parameter or buffer, also for its gradient and its optimizer state; empty for other tensors. Numbers
    that differ between the tensors are written as `*`."""
    module: str
    """Name of the module whose op made the tensor, with `*` for numbers that differ; empty if no module made it."""
    source: str
    """Line of the model's code that made the tensor, as 'path:line'; empty if it is not known."""
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    """Size of one of the tensors, rounded up as the allocator does."""
    count: int
    """Number of such tensors."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingProgram:
    """The program for whose config a plan was made, and how it prepares the model. It trains by its own loop."""

    name: ProgramName
    """'axolotl' or 'llama-factory'."""
    gradient_checkpointing: bool
    """True if it enables transformers' own gradient checkpointing, for all layers."""
    attention: str = "sdpa"
    """The implementation of attention in the rehearsed model, as transformers names it."""
    targets: tuple[str, ...] = ()
    """Names of the layers that get adapters, as peft found them; empty without adapters."""


def names_code(reference: str) -> bool:
    """Returns True if MODEL is a Python function or class, so that loading it runs code."""
    return ":" in reference and not os.path.exists(reference)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The model that the plan is for, and how to load it again."""

    reference: str | None
    """MODEL as given on the command line; None for a model object that was passed in Python."""
    name: str
    """Name of the model's class."""
    parameters: int
    fingerprint: str
    """SHA-256 over names, shapes and dtypes of parameters and buffers."""
    dtype: str = "float32"
    """Dtype of most of the floating-point weights, such as 'bfloat16'."""
    trained_parameters: int | None = None
    """Number of parameters that are trained; None in plans of older versions."""
    arguments: tuple[str, ...] = ()
    """Arguments for the user's script, which the command got after `--`."""
    adapter: Adapter | None = None
    """LoRA adapters that the planner added to the model."""
    architecture: str | None = None
    """Name of the class of the model without its adapters; None if the planner added none."""
    program: TrainingProgram | None = None
    """The program for whose config the plan was made; None for a training loop of the user's own."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelFacts:
        """Returns the facts from their JSON form."""
        adapter = data.get("adapter")
        if adapter is not None:
            adapter = Adapter(**{**adapter, "targets": as_tuples(adapter["targets"])})
        program = data.get("program")
        if program is not None:
            program = TrainingProgram(**{**program, "targets": as_tuples(program["targets"])})
        arguments = as_tuples(data.get("arguments", ()))
        return cls(**{**data, "adapter": adapter, "program": program, "arguments": arguments})


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnLoss:
    """How the loss that the model itself computes averages over the labels of a batch."""

    shifted: bool
    """True if the first label of each sample does not count, as in next-token prediction."""
    ignored: int
    """The label value that does not count (`ignore_index`)."""
    divides: bool
    """True if the model divides the sum of the losses by `num_items_in_batch`, should the batch contain this key."""
    certain: bool = True
    """False if the source text of the model leaves open which labels count, so that the other fields are a guess.

    A training step of `rewrite.apply` checks the guess. An emitted file requires the argument `loss_terms` instead.
    """
    balances_experts: bool = False
    """True if the loss has a term that balances the experts of the model, which is not divided by
    `num_items_in_batch`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkloadFacts:
    """The inputs of one optimizer step: batch, loss function and optimizer."""

    batch_size: int
    seq_len: int | None
    batch: tuple[tuple[str, tuple[int, ...], str], ...]
    """Path, shape and dtype of every tensor of the batch."""
    calling: CallingName
    """How the batch is passed to the model: the name of a `planner.workload.call_convention.Calling`."""
    has_loss_fn: bool
    optimizer: str
    """'adamw', 'sgd', ..., or the qualified name of the user's own optimizer."""
    gradients_alive: bool = False
    """True if gradients of earlier batches are in memory before the step, which adds its own gradients to them."""
    own_loss: OwnLoss | None = None
    """How the model's own loss averages; None if a loss function was given, or if it is not a mean over labels."""
    not_by_sample: tuple[str, ...] = ()
    """Paths of the tensors of the batch that are the same for all samples. In all others, dimension 0 is the batch
    dimension if it has the size of the batch."""
    input_shapes: Any = None
    """JSON data from which the batch was made (`--input-shapes`); None if it was not made from such data."""
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Numbers that the user stated (`--value`), by line of code; see `Answers.values`."""
    worst_case: bool = True
    """True if the masks of the batch were taken as full and its lengths as the longest one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SolverFacts:
    """How the plan was found, and the peak of tensors: predicted by the search, and measured in the rehearsal."""

    status: str
    """'optimal', 'time limit' (of planning or an integer program), or 'not needed' if there was nothing to search."""
    gap: float
    """Maximum fraction of the step time that another selection could save.

    1 means that it is not known, because planning ended early or an integer program had no answer in time.
    """
    promised_bytes: int
    """Peak of the allocated bytes that the search predicted for the plan."""
    certified_bytes: int
    """Peak of the allocated bytes in the rehearsal of the rewritten step."""
    seconds: float | None = dataclasses.field(default=None, compare=False)
    """Time in seconds that the solver took; None in a plan that was read from a file, which holds no times."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextStep:
    """A relaxation of the constraints with which a plan fits, and that plan: its decisions, memory and slowdown."""

    relax: str
    """The change of the options, for example 'allow checkpoint' or '--fidelity rounded'."""
    decisions: tuple[Decision, ...]
    total_bytes: int
    slowdown: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relaxation:
    """One technique or fidelity that the constraints rule out, and whether a plan would fit if it were allowed."""

    relax: str
    """The change of the options, for example 'allow checkpoint' or '--fidelity rounded'."""
    opens: bool | None
    """True if a plan fits with the relaxation, else False; None if there was no time to try it."""
    why: str
    """The reason why no plan fits with the relaxation; empty if a plan fits."""
    fidelity: str | None
    """Fidelity of the plan that fits with the relaxation; None if no plan was found."""
    next_step: NextStep | None
    """The plan that fits with the relaxation; None if no plan was found."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shortfall:
    """Explains why no plan is both inside the budget and fast enough, and what would help.

    The plan that has a shortfall is the smallest allowed plan that was found; or, if a plan is inside the budget but
    slower than allowed, the fastest such plan.
    """

    missing_bytes: int
    """Bytes by which the plan is over the budget; 0 if it is only too slow."""
    binding: str
    """The category of memory with the most bytes at the peak of the plan, except for the allocator's slack."""
    binding_bytes: int
    next_step: NextStep | None
    """The relaxation whose plan has the smallest slowdown; None if no relaxation helps."""
    relaxations: tuple[Relaxation, ...] = ()
    """One item for each technique and fidelity that is not allowed. A lower fidelity is tried only if no higher one
    helps."""


LOADING, TRAINING_STEP = "loading the model", "training step"
"""Names of the first two moments of a run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunMoment:
    """The memory of a training step or of an activity, such as an evaluation, in a whole run."""

    name: str
    """`LOADING`, `TRAINING_STEP`, or the name of an activity between steps."""
    tensor_bytes: int
    """Maximum of the bytes of all tensors while it happens, for the longest batch."""
    new_bytes: int
    """Memory that the allocator takes from the card while it happens, all times together. It keeps this memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunChange:
    """A change of the run that reduces its memory or its time, with its price."""

    change: str
    """Description, for example 'the longest batch first'."""
    total_bytes: int
    """Memory of the process in the changed run, if it has no limit."""
    relative_time: float
    """Time of all steps of the changed run, divided by that of the run."""


MOST_SAMPLES = 10**7
"""Maximum number of samples of a run. To shuffle this number of samples takes about a minute."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSource:
    """The user's description of a run, from which it can be simulated again, and which a training loop has to follow.

    `lengths` has pairs of a length and its number of samples, and is empty if all batches are alike. Batches are padded
    to a `multiple`. `eval_batch_size` is None without an evaluation, which keeps the logits of `eval_samples` samples.
    """

    lengths: tuple[tuple[int, int], ...]
    multiple: int
    eval_batch_size: int | None
    eval_samples: int
    between: tuple[str, ...]

    def __post_init__(self) -> None:
        if any(length < 1 or count < 1 for length, count in self.lengths):
            raise ValueError("run.source.lengths has a length or a number of samples below 1")
        if sum(count for _, count in self.lengths) > MOST_SAMPLES:
            raise ValueError(f"run.source.lengths has more than {MOST_SAMPLES:,} samples")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The memory of a whole run in the simulated allocator: the steps, and what happens between them."""

    steps: int
    """Number of simulated steps, in each order."""
    shapes: int
    """Number of different shapes of batches."""
    lengths: tuple[int, int]
    """Smallest and largest length of a batch."""
    samples: tuple[int, int]
    """Smallest and largest number of samples in a batch."""
    order: str
    """The order of the batches, for example 'random, seeds 0 and 1'."""
    predicted_shapes: int
    """Number of shapes for which the step was predicted from others. The step was rehearsed for all other shapes."""
    total_bytes: int
    """Maximum of the memory of the process, in the order that needs most, under the budget if there is one."""
    settled: int
    """Number of the step after which reserved memory no longer grows."""
    retries: int
    """Number of times that the allocator has to empty its cache to stay inside the budget. Each makes a step wait."""
    fits: bool
    """True if the run does not run out of memory under the budget, or if there is none."""
    binding: str
    """Name of the moment in which the memory of the process reaches its maximum, or runs out."""
    moments: tuple[RunMoment, ...]
    changes: tuple[RunChange, ...]
    source: RunSource | None = None
    """None if the batches or activities are the user's own, which no file holds, and in plans of older versions."""
