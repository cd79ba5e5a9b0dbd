"""`Plan`: the planner's result, which the rewriter applies. It is plain data without torch objects."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any, TypeVar

from planner.errors import PlanFileError
from planner.plan_types import plan_summary
from planner.plan_types.adapter import Adapter
from planner.plan_types.decisions import Decision
from planner.plan_types.techniques import canonical_kind, decision_from_json

DecisionT = TypeVar("DecisionT", bound=Decision)

SCHEMA_VERSION = 1
"""Version of the JSON format. Plan files with another version are refused."""


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

    def to_json(self) -> dict[str, object]:
        return {
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes,
            "total_bytes": self.total_bytes,
            "at": {"phase": self.phase, "module": self.module, "op": self.op},
            "breakdown": self.breakdown,
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
            breakdown=dict(data["breakdown"]),
            step_ns=round(data["step_seconds"] * 1e9),
            flops=data["flops"],
        )


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
    adapter: Adapter | None = None
    """LoRA adapters that the planner added to the model."""
    architecture: str | None = None
    """Name of the class of the model without its adapters; None if the planner added none."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelFacts:
        """Returns the facts from their JSON form."""
        adapter = data.get("adapter")
        if adapter is not None:
            adapter = Adapter(**{**adapter, "targets": tuple(adapter["targets"])})
        return cls(**{**data, "adapter": adapter})


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkloadFacts:
    """The inputs of one optimizer step: batch, loss function and optimizer."""

    batch_size: int
    seq_len: int | None
    batch: tuple[tuple[str, tuple[int, ...], str], ...]
    """Path, shape and dtype of every tensor of the batch."""
    calling: str
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
    """'optimal', 'time limit', or 'not needed' if there was nothing to search."""
    gap: float
    """Proven distance to the optimum: another selection of units could save at most this fraction of the step time."""
    seconds: float
    """Time in seconds that the solver took."""
    promised_bytes: int
    """Peak of the allocated bytes that the search predicted for the plan."""
    certified_bytes: int
    """Peak of the allocated bytes in the rehearsal of the rewritten step."""


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

    The plan that has a shortfall is the smallest allowed plan; or, if a plan is inside the budget but slower than
    allowed, the fastest such plan.
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


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """The decisions with which one training step is rewritten, with the certified memory and the predicted time.

    A plan that does not fit the budget has `fits` False and a `shortfall`.
    """

    model: ModelFacts
    workload: WorkloadFacts
    card: str
    card_source: str
    """Source of the numbers in the card's profile, for example 'datasheet'."""
    vram_bytes: int | None
    """The budget for `total_bytes`; None if the step was only rehearsed."""
    fidelity: str
    forced: tuple[str, ...]
    forbidden: tuple[str, ...]
    baseline: Footprint
    """Memory and time of the step without any decision."""
    peak: Footprint
    """Memory and time of the step with the plan's decisions."""
    decisions: tuple[Decision, ...]
    fits: bool
    certified: bool
    """True if `peak` comes from a rehearsal of the rewritten step, not from a prediction."""
    solver: SolverFacts
    shortfall: Shortfall | None
    notes: tuple[str, ...]
    """Assumptions of the plan, and other remarks for the user."""
    versions: dict[str, str]
    seconds: float
    max_slowdown: float | None = None
    """The maximum `slowdown` that the user allowed; None for no limit."""

    @property
    def slowdown(self) -> float:
        """Step time with the plan, divided by the step time of the baseline."""
        return self.peak.step_ns / max(self.baseline.step_ns, 1)

    def summary(self) -> str:
        """One line that says whether the plan fits, with memory, step time and techniques."""
        return plan_summary.summary(self)

    def __repr__(self) -> str:
        return f"<Plan: {self.summary()}>"

    def _repr_html_(self) -> str:
        return plan_summary.html_table(self)

    def decision(self, kind: type[DecisionT]) -> DecisionT | None:
        """The plan's decision of class `kind`; None if the plan has no such decision."""
        return next((decision for decision in self.decisions if isinstance(decision, kind)), None)

    def to_json(self) -> dict[str, object]:
        """The plan as a dict for JSON. The key of the field `peak` is 'plan', and 'slowdown' is added."""
        data: dict[str, object] = {"schema_version": SCHEMA_VERSION}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            data[field.name] = _plain(value)
        data["plan"] = data.pop("peak")
        data["slowdown"] = self.slowdown
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """Reads what `to_json` returned. Former names of techniques are accepted, too.

        Raises:
            PlanFileError: the schema version is not supported, or a field is missing or has the wrong type.
            DecisionError: a decision is unknown, or one of its fields is not allowed.
        """
        if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
            found = data.get("schema_version") if isinstance(data, dict) else type(data).__name__
            raise PlanFileError(
                f"plan has schema_version {found!r}, this version of the planner reads {SCHEMA_VERSION}: make the plan "
                "again"
            )
        try:
            _check_types(data)
            shortfall = data["shortfall"]
            return cls(
                model=ModelFacts.from_json(data["model"]),
                workload=_workload_from_json(data["workload"]),
                baseline=Footprint.from_json(data["baseline"]),
                peak=Footprint.from_json(data["plan"]),
                decisions=tuple(decision_from_json(d) for d in data["decisions"]),
                solver=SolverFacts(**data["solver"]),
                shortfall=None if shortfall is None else _shortfall_from_json(shortfall),
                forced=tuple(map(canonical_kind, data["forced"])),
                forbidden=tuple(map(canonical_kind, data["forbidden"])),
                notes=tuple(data["notes"]),
                max_slowdown=data["max_slowdown"],
                **{
                    name: data[name]
                    for name in (
                        "card",
                        "card_source",
                        "vram_bytes",
                        "fidelity",
                        "fits",
                        "certified",
                        "versions",
                        "seconds",
                    )
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanFileError(f"plan has a missing or wrong field ({error}): make the plan again") from error

    def save(self, path: str | pathlib.Path) -> None:
        """Write the plan as JSON to a file. The file is replaced at once, so that it is never incomplete.

        Raises:
            PlanFileError: the file cannot be written.
        """
        write_atomically(pathlib.Path(path), json.dumps(self.to_json(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Plan:
        """Read a plan file that `save` wrote. Raises `PlanFileError` if it cannot be read or is not a plan."""
        try:
            data = json.loads(pathlib.Path(path).read_text())
        except OSError as error:
            raise PlanFileError(f"plan file '{path}' cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise PlanFileError(f"plan file '{path}' is not JSON ({error}): give a file made by --save") from error
        return cls.from_json(data)


def write_atomically(path: pathlib.Path, data: bytes | str) -> None:
    """Write a file at once: to a temporary file in the same folder, which is then renamed to `path`.

    Raises:
        PlanFileError: the file cannot be written.
    """
    neighbour = path.with_name(f".{path.name}.part")
    try:
        neighbour.write_bytes(data.encode() if isinstance(data, str) else data)
        neighbour.replace(path)
    except OSError as error:
        neighbour.unlink(missing_ok=True)
        raise PlanFileError(f"'{path}' cannot be written: {error.strerror}") from error


def _check_types(data: dict[str, Any]) -> None:
    """Raise `TypeError` if a field has a type that later code cannot use, as in a plan that was edited by hand."""
    vram, reference = data["vram_bytes"], data["model"]["reference"]
    if vram is not None and (type(vram) is not int or vram < 0):
        raise TypeError(f"vram_bytes is {vram!r}, not a whole number of bytes")
    slowdown = data["max_slowdown"]
    if slowdown is not None and (type(slowdown) not in (int, float) or slowdown <= 0):
        raise TypeError(f"max_slowdown is {slowdown!r}, not a factor above zero")
    if reference is not None and not isinstance(reference, str):
        raise TypeError(f"model.reference is {reference!r}, not a string")
    for name in ("card", "fidelity"):
        if not isinstance(data[name], str):
            raise TypeError(f"{name} is {data[name]!r}, not a string")
    if not isinstance(data["workload"]["optimizer"], str):
        raise TypeError(f"workload.optimizer is {data['workload']['optimizer']!r}, not a string")


def _workload_from_json(data: dict[str, Any]) -> WorkloadFacts:
    batch, own_loss = tuple((p, tuple(s), d) for p, s, d in data["batch"]), data["own_loss"]
    own_loss = None if own_loss is None else OwnLoss(**own_loss)
    return WorkloadFacts(
        **{**data, "batch": batch, "own_loss": own_loss, "not_by_sample": tuple(data.get("not_by_sample", ()))}
    )


def _shortfall_from_json(data: dict[str, Any]) -> Shortfall:
    relaxations = tuple(
        Relaxation(**{**relaxation, "next_step": _next_step_from_json(relaxation["next_step"])})
        for relaxation in data.get("relaxations", ())
    )
    return Shortfall(**{**data, "next_step": _next_step_from_json(data["next_step"]), "relaxations": relaxations})


def _next_step_from_json(data: dict[str, Any] | None) -> NextStep | None:
    if data is None:
        return None
    return NextStep(**{**data, "decisions": tuple(decision_from_json(d) for d in data["decisions"])})


def _plain(value: object) -> object:
    """Converts a value to what `json` can write."""
    if isinstance(value, (Decision, Footprint)):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value
