"""`Plan`: what the planner hands to the rewriter. It is plain data with a schema version, without torch objects."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any, TypeVar

from planner.errors import PlanFileError
from planner.plan_types.decisions import Decision
from planner.plan_types.techniques import canonical_kind, decision_from_json

DecisionT = TypeVar("DecisionT", bound=Decision)

SCHEMA_VERSION = 1
"""Version of the JSON format. Plans of another version are refused."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint:
    """Memory at the peak of one training step on the card, and its time."""

    allocated_bytes: int
    """Largest number of bytes that tensors hold (`torch.cuda.max_memory_allocated`)."""
    reserved_bytes: int
    """Largest number of bytes that the caching allocator took from the driver."""
    total_bytes: int
    """`reserved_bytes` plus context and libraries: what `nvidia-smi` shows for the process."""
    phase: str
    """The phase in which `allocated_bytes` peaks: 'forward', 'backward', 'recompute' or 'optimizer'."""
    module: str
    """Name of the module at the peak; empty outside of any module."""
    op: str
    """The op at the peak, for example 'aten.mm.default'."""
    breakdown: dict[str, int]
    """Bytes by category at the peak; the values sum to `total_bytes`."""
    step_ns: int
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
        """Inverse of `to_json`."""
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
    """The model as named on the command line; None for a live object."""
    name: str
    """Class of the model."""
    parameters: int
    fingerprint: str
    """SHA-256 over names, shapes and dtypes of parameters and buffers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnLoss:
    """The labels over which the loss that the model itself computes is a mean."""

    shifted: bool
    """True if the first label of each sample does not count, as in next-token losses."""
    ignored: int
    """The label that does not count (`ignore_index`)."""
    divides: bool
    """True if the model divides the sum of the losses by `num_items_in_batch`, provided that the batch has this key."""


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
    """True if gradients of earlier batches exist before the step, and the step adds its own gradients to them."""
    own_loss: OwnLoss | None = None
    """None if a loss function was given, or if the loss is not a mean over labels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SolverFacts:
    """How the plan was found, the peak that the search promised, and the peak of the rehearsal."""

    status: str
    """'optimal', 'time limit', or 'not needed' when nothing had to be chosen."""
    gap: float
    """Maximum share of the step time by which another selection of units could be faster."""
    seconds: float
    """Time spent in the solver."""
    promised_bytes: int
    """Peak of allocated tensors that the search promised for the plan."""
    certified_bytes: int
    """Peak of allocated tensors in the rehearsal of the rewritten step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextStep:
    """A relaxation of the constraints that would make training fit, and its price."""

    relax: str
    """The change of options: for example 'allow checkpoint' or '--fidelity rounded'."""
    decisions: tuple[Decision, ...]
    total_bytes: int
    slowdown: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relaxation:
    """A technique or fidelity that the constraints rule out, and whether a plan would fit if it was allowed."""

    relax: str
    """The change of options: for example 'allow checkpoint' or '--fidelity rounded'."""
    opens: bool | None
    """True if a plan fits with the relaxation; None if there was no time to find out."""
    why: str
    """The reason why no plan fits with the relaxation; empty if a plan fits."""
    fidelity: str | None
    """Fidelity of the plan that fits with the relaxation; None if no plan fits."""
    next_step: NextStep | None
    """The price of the relaxation; None if no plan fits with it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shortfall:
    """Why no plan fits: the smallest allowed plan still needs `missing_bytes` more.

    If a plan fits but is slower than allowed, that plan is reported instead, and `missing_bytes` is 0.
    """

    missing_bytes: int
    binding: str
    """The largest category at the peak of the reported plan."""
    binding_bytes: int
    next_step: NextStep | None
    """The cheapest of the relaxations."""
    relaxations: tuple[Relaxation, ...] = ()
    """Each technique and fidelity that is not allowed. A lower fidelity is listed only if no higher one helps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A certified way to run one training step inside a budget."""

    model: ModelFacts
    workload: WorkloadFacts
    card: str
    card_source: str
    """The source of the card's numbers, for example 'datasheet'."""
    vram_bytes: int | None
    """The budget for `total_bytes`; None if the step was only rehearsed."""
    fidelity: str
    forced: tuple[str, ...]
    forbidden: tuple[str, ...]
    baseline: Footprint
    peak: Footprint
    decisions: tuple[Decision, ...]
    fits: bool
    certified: bool
    """True only if `peak` was measured in a rehearsal of the rewritten step itself."""
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

    def decision(self, kind: type[DecisionT]) -> DecisionT | None:
        """The plan's decision of this class, or None."""
        return next((decision for decision in self.decisions if isinstance(decision, kind)), None)

    def to_json(self) -> dict[str, object]:
        """The plan as JSON-able data; `peak` is written as 'plan'."""
        data: dict[str, object] = {"schema_version": SCHEMA_VERSION}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            data[field.name] = _plain(value)
        data["plan"] = data.pop("peak")
        data["slowdown"] = self.slowdown
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """Inverse of `to_json`, for former names of techniques too.

        Raises:
            PlanFileError: the schema version is not supported, or a field is missing or has the wrong type.
        """
        if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
            found = data.get("schema_version") if isinstance(data, dict) else type(data).__name__
            raise PlanFileError(
                f"plan has schema_version {found!r}, this version reads {SCHEMA_VERSION}: make the plan again"
            )
        try:
            _check_types(data)
            shortfall = data["shortfall"]
            return cls(
                model=ModelFacts(**data["model"]),
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
            raise PlanFileError(f"plan is not complete ({error}): make the plan again") from error

    def save(self, path: str | pathlib.Path) -> None:
        """Write the plan as JSON. The file appears complete or not at all."""
        write_text_atomically(pathlib.Path(path), json.dumps(self.to_json(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Plan:
        """Read a file that `save` wrote. Raises `PlanFileError` if it is not a plan."""
        try:
            data = json.loads(pathlib.Path(path).read_text())
        except OSError as error:
            raise PlanFileError(f"plan file '{path}' cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise PlanFileError(f"plan file '{path}' is not JSON ({error}): give a file made by --save") from error
        return cls.from_json(data)


def write_text_atomically(path: pathlib.Path, text: str) -> None:
    """Write to a temporary file in the same folder and rename it, so that a reader never sees half a file."""
    neighbour = path.with_name(f".{path.name}.part")
    try:
        neighbour.write_text(text)
        neighbour.replace(path)
    except OSError as error:
        neighbour.unlink(missing_ok=True)
        raise PlanFileError(f"'{path}' cannot be written: {error.strerror}") from error


def _check_types(data: dict[str, Any]) -> None:
    """Check the types of values that later code relies on: a plan that was edited by hand may hold anything."""
    vram, reference = data["vram_bytes"], data["model"]["reference"]
    if vram is not None and (type(vram) is not int or vram < 0):
        raise TypeError(f"vram_bytes is {vram!r}, not a number of bytes")
    slowdown = data["max_slowdown"]
    if slowdown is not None and (type(slowdown) not in (int, float) or slowdown <= 0):
        raise TypeError(f"max_slowdown is {slowdown!r}, not a factor above zero")
    if reference is not None and not isinstance(reference, str):
        raise TypeError(f"model.reference is {reference!r}, not a text")
    for name in ("card", "fidelity"):
        if not isinstance(data[name], str):
            raise TypeError(f"{name} is {data[name]!r}, not a text")
    if not isinstance(data["workload"]["optimizer"], str):
        raise TypeError(f"workload.optimizer is {data['workload']['optimizer']!r}, not a text")


def _workload_from_json(data: dict[str, Any]) -> WorkloadFacts:
    batch, own_loss = tuple((p, tuple(s), d) for p, s, d in data["batch"]), data["own_loss"]
    return WorkloadFacts(**{**data, "batch": batch, "own_loss": None if own_loss is None else OwnLoss(**own_loss)})


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
    """The value as JSON-able data."""
    if isinstance(value, (Decision, Footprint)):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value
