"""`Plan`: the hinge between planner and rewriter. Text, versioned, without a torch object in it."""

from __future__ import annotations

import dataclasses
import json
import pathlib

from planner.errors import PlanFileError
from planner.plan_types.decisions import Decision, decision_from_json

SCHEMA_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint:
    """What one training step takes on the card: memory at its peak, and time."""

    allocated_bytes: int
    """Largest number of bytes that tensors hold (`torch.cuda.max_memory_allocated`)."""
    reserved_bytes: int
    """Largest number of bytes that the caching allocator took from the driver."""
    total_bytes: int
    """`reserved_bytes` plus context and libraries: what `nvidia-smi` shows for the process."""
    phase: str
    """Where the peak of `allocated` is: 'forward', 'backward', 'recompute' or 'optimizer'."""
    module: str
    op: str
    breakdown: dict[str, int]
    """Bytes by category at that moment; the values sum to `total_bytes`."""
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
    def from_json(cls, data: dict) -> Footprint:
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
    """Which model the plan is for, and how to get it again."""

    reference: str | None
    """As given on the command line; None for a live object."""
    name: str
    """Class of the model."""
    parameters: int
    fingerprint: str
    """SHA-256 over names, shapes and dtypes of parameters and buffers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnLoss:
    """What a loss that the model takes by itself, of `labels`, is a mean over."""

    shifted: bool
    """Whether each sample's first label is left out, as next-token losses do."""
    ignored: int
    """The label that is left out."""
    divides: bool
    """Whether it is a sum divided by `num_items_in_batch`, where a batch has that."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkloadFacts:
    """What one optimizer step consumes."""

    batch_size: int
    seq_len: int | None
    batch: tuple[tuple[str, tuple[int, ...], str], ...]
    """Path, shape and dtype of every tensor of the batch."""
    calling: str
    """How the batch meets the model: a name of `planner.workload.call_convention.Calling`."""
    has_loss_fn: bool
    optimizer: str
    """'adamw', 'sgd', ... or the qualified name of the user's own."""
    gradients_alive: bool = False
    """Whether the step finds gradients of earlier batches, and adds to them."""
    own_loss: OwnLoss | None = None
    """None: a loss function is given, or the loss is not a mean over labels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SolverFacts:
    """How the plan was found, and the square: what was promised, and what rehearsing it gave."""

    status: str
    """'optimal', 'time limit', 'infeasible', or 'not needed' when nothing had to be chosen."""
    gap: float
    seconds: float
    promised_bytes: int
    """Peak of allocated tensors that the integer program promised for the plan."""
    certified_bytes: int
    """The same quantity from rehearsing the rewritten step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextStep:
    """A relaxation that would make training fit, and its price."""

    relax: str
    """What to allow: for instance 'fidelity rounded' or '--forbid checkpoint lifted'."""
    decisions: tuple[Decision, ...]
    total_bytes: int
    slowdown: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relaxation:
    """Something that is not allowed, and whether a plan fits if it is."""

    relax: str
    """What to allow: 'allow checkpoint', '--fidelity rounded'."""
    opens: bool | None
    """Whether a plan then fits; None: there was no time to find out."""
    why: str
    """Where it does not open the budget: why not."""
    fidelity: str | None
    """Of the plan that then fits."""
    next_step: NextStep | None
    """The plan that then fits, and its price."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shortfall:
    """Why nothing fits: the smallest plan that was allowed still needs `missing_bytes` more.

    Where a plan fits that is slower than allowed, it is told instead, and nothing is missing.
    """

    missing_bytes: int
    binding: str
    """Largest category at the peak of the plan that is told."""
    binding_bytes: int
    next_step: NextStep | None
    """The cheapest of the relaxations."""
    relaxations: tuple[Relaxation, ...] = ()
    """Each technique and fidelity that is not allowed; what is less faithful still, only if nothing nearer helps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A certified way to run one training step inside a budget."""

    model: ModelFacts
    workload: WorkloadFacts
    card: str
    card_source: str
    """Where the card's numbers come from, for instance 'datasheet'."""
    vram_bytes: int | None
    """The budget, about `total_bytes`; None when nothing was to be chosen."""
    fidelity: str
    forced: tuple[str, ...]
    forbidden: tuple[str, ...]
    baseline: Footprint
    peak: Footprint
    decisions: tuple[Decision, ...]
    fits: bool
    certified: bool
    """True only if the rewritten step itself was rehearsed and `peak` came out."""
    solver: SolverFacts
    shortfall: Shortfall | None
    notes: tuple[str, ...]
    """What was assumed, and what a user should know."""
    versions: dict[str, str]
    seconds: float
    max_slowdown: float | None = None
    """The limit of `slowdown` that was given."""

    @property
    def slowdown(self) -> float:
        """Step time with the plan over step time without it."""
        return self.peak.step_ns / max(self.baseline.step_ns, 1)

    def decision(self, kind: type[Decision]) -> Decision | None:
        """The plan's decision of this type, if it has one."""
        return next((decision for decision in self.decisions if isinstance(decision, kind)), None)

    def to_json(self) -> dict[str, object]:
        data: dict[str, object] = {"schema_version": SCHEMA_VERSION}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            data[field.name] = _plain(value)
        data["plan"] = data.pop("peak")
        data["slowdown"] = self.slowdown
        return data

    @classmethod
    def from_json(cls, data: dict) -> Plan:
        """Inverse of `to_json`. Raises `PlanFileError` on another schema version or a missing field."""
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
                forced=tuple(data["forced"]),
                forbidden=tuple(data["forbidden"]),
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
        """Write the plan as JSON. The file appears whole or not at all."""
        write_text_atomically(pathlib.Path(path), json.dumps(self.to_json(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Plan:
        try:
            data = json.loads(pathlib.Path(path).read_text())
        except OSError as error:
            raise PlanFileError(f"plan file '{path}' cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise PlanFileError(f"plan file '{path}' is not JSON ({error}): give a file made by --save") from error
        return cls.from_json(data)


def write_text_atomically(path: pathlib.Path, text: str) -> None:
    """Write through a temporary neighbour, so that a reader never sees half a file."""
    neighbour = path.with_name(f".{path.name}.part")
    try:
        neighbour.write_text(text)
        neighbour.replace(path)
    except OSError as error:
        neighbour.unlink(missing_ok=True)
        raise PlanFileError(f"'{path}' cannot be written: {error.strerror}") from error


def _check_types(data: dict) -> None:
    """The few values that later code relies on; a hand-edited plan may hold anything."""
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


def _workload_from_json(data: dict) -> WorkloadFacts:
    batch, own_loss = tuple((p, tuple(s), d) for p, s, d in data["batch"]), data["own_loss"]
    return WorkloadFacts(**{**data, "batch": batch, "own_loss": None if own_loss is None else OwnLoss(**own_loss)})


def _shortfall_from_json(data: dict) -> Shortfall:
    relaxations = tuple(
        Relaxation(**{**relaxation, "next_step": _next_step_from_json(relaxation["next_step"])})
        for relaxation in data.get("relaxations", ())
    )
    return Shortfall(**{**data, "next_step": _next_step_from_json(data["next_step"]), "relaxations": relaxations})


def _next_step_from_json(data: dict | None) -> NextStep | None:
    if data is None:
        return None
    return NextStep(**{**data, "decisions": tuple(decision_from_json(d) for d in data["decisions"])})


def _plain(value: object) -> object:
    if isinstance(value, (Decision, Footprint)):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value
