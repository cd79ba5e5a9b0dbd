"""`Plan`: the planner's result, which the rewriter applies. It is plain data without torch objects."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any, TypeVar

from planner.errors import PlanFileError, PlannerError, plain_line
from planner.files import reading
from planner.files.fields import check_field_types
from planner.files.writing import write_atomically
from planner.plan_types import plan_summary
from planner.plan_types.categories import Category
from planner.plan_types.decisions import Decision
from planner.plan_types.plan_parts import (
    CATEGORY_OF_KEY,
    Footprint,
    LiveTensor,
    ModelFacts,
    NextStep,
    OwnLoss,
    Relaxation,
    RunChange,
    RunFacts,
    RunMoment,
    RunSource,
    Shortfall,
    SolverFacts,
    TrainingProgram,
    WorkloadFacts,
    names_code,
)
from planner.plan_types.techniques import as_tuples, canonical_kind, decision_from_json

__all__ = [
    "SCHEMA_VERSION",
    "Footprint",
    "LiveTensor",
    "ModelFacts",
    "NextStep",
    "OwnLoss",
    "Plan",
    "Relaxation",
    "RunChange",
    "RunFacts",
    "RunMoment",
    "RunSource",
    "Shortfall",
    "SolverFacts",
    "TrainingProgram",
    "WorkloadFacts",
    "names_code",
]

DecisionT = TypeVar("DecisionT", bound=Decision)

SCHEMA_VERSION = 2
"""Version of the JSON format. Plan files of version 1 are read, too; others are refused."""


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
    """Versions of this package, of Python and of libraries, by name."""
    tensors: tuple[LiveTensor, ...] = ()
    """The largest tensors alive at the peak of the plan, largest first. Equal tensors of repeated layers are one item.
    Empty in plans of older versions."""
    card_bytes: int | None = None
    """Memory that the card offers; None for a generic card, and in plans of older versions."""
    margin_bytes: int = 0
    """Memory of the card that the plan leaves free."""
    max_slowdown: float | None = None
    """The maximum `slowdown` that the user allowed; None for no limit."""
    run: RunFacts | None = None
    """The memory of the whole run; None if only one step was planned, and in plans of older versions."""
    alloc_conf: str = ""
    """Options of the caching allocator that the user has set, with which baseline and plan were simulated, in the
    notation of PYTORCH_ALLOC_CONF. Empty for PyTorch's defaults, and in plans of older versions."""
    cudnn_benchmark: bool = False
    """True if baseline and plan were simulated with `torch.backends.cudnn.benchmark = True`; False in plans of older
    versions."""
    link: str | None = None
    """The link between the cards of one machine, as `--link` takes it; None for one card, and in plans of older
    versions."""
    cards_per_node: int | None = None
    """Number of cards in a machine; None for one card, and in plans of older versions."""
    seconds: float | None = dataclasses.field(default=None, compare=False)
    """Time in seconds that planning took; None in a plan that was read from a file, which holds no times."""
    recalled: int = dataclasses.field(default=0, compare=False)
    """Number of recordings that earlier calls had made and kept; 0 in a plan that was read from a file."""

    @property
    def limit_bytes(self) -> int | None:
        """The budget, but at most the memory of the card; None without a budget."""
        return None if self.vram_bytes is None else min(self.vram_bytes, self.card_bytes or self.vram_bytes)

    @property
    def usable_bytes(self) -> int | None:
        """The largest total that a plan may have: `limit_bytes`, but at most the memory of the card without the margin.

        None without a budget.
        """
        if self.vram_bytes is None:
            return None
        return min(self.vram_bytes, (self.card_bytes or self.vram_bytes) - self.margin_bytes)

    @property
    def total_bytes(self) -> int:
        """Memory of the process: the maximum of the step's peak and, if the run was planned, of the whole run."""
        return self.peak.total_bytes if self.run is None else max(self.peak.total_bytes, self.run.total_bytes)

    @property
    def room_bytes(self) -> int | None:
        """Bytes of `limit_bytes` that the plan leaves free; negative if it does not fit, None without a budget."""
        return None if self.limit_bytes is None else self.limit_bytes - self.total_bytes

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
        """The plan as a dict for JSON. The key of the field `peak` is 'plan', and 'slowdown' is added.

        The dict holds no times that planning took, so that two runs give the same dict.
        """
        data: dict[str, object] = {"schema_version": SCHEMA_VERSION, **_fields(self)}
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
        if not isinstance(data, dict) or "schema_version" not in data:
            raise PlanFileError("this is not a saved plan: give a file made by --save")
        found = data["schema_version"]
        if type(found) is not int or found not in (1, SCHEMA_VERSION):
            raise PlanFileError(
                f"plan has schema_version {found!r}, this version of the planner reads 1 and {SCHEMA_VERSION}: make "
                "the plan again"
            )
        try:
            data = _upgraded(data) if found == 1 else data
            shortfall = data["shortfall"]
            plan = cls(
                model=ModelFacts.from_json(data["model"]),
                workload=_workload_from_json(data["workload"]),
                baseline=Footprint.from_json(data["baseline"]),
                peak=Footprint.from_json(data["plan"]),
                decisions=tuple(decision_from_json(d) for d in data["decisions"]),
                solver=SolverFacts(**data["solver"]),
                shortfall=None if shortfall is None else _shortfall_from_json(shortfall),
                forced=tuple(map(canonical_kind, data["forced"])),
                forbidden=tuple(map(canonical_kind, data["forbidden"])),
                notes=as_tuples(data["notes"]),
                tensors=tuple(LiveTensor(**{**t, "shape": tuple(t["shape"])}) for t in data["tensors"]),
                run=_run_from_json(data.get("run")),
                alloc_conf=data.get("alloc_conf", ""),
                cudnn_benchmark=data.get("cudnn_benchmark", False),
                link=data.get("link"),
                cards_per_node=data.get("cards_per_node"),
                **{name: data[name] for name in _PLAIN_FIELDS},
            )
            return _checked(plan)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            why = plain_line(str(error), 400)
            raise PlanFileError(f"plan has a missing or wrong field ({why}): make the plan again") from error

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
            data = reading.json_data(path)
        except OSError as error:
            raise PlanFileError(f"plan file '{path}' cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise PlanFileError(f"plan file '{path}' is not JSON ({error}): give a file made by --save") from error
        try:
            return cls.from_json(data)
        except PlannerError as error:
            raise type(error)(plain_line(f"plan file '{path}': {error}")) from error


_PLAIN_FIELDS = (
    "card card_source vram_bytes card_bytes margin_bytes fidelity fits certified versions max_slowdown".split()
)
"""Fields of a plan whose values are the same in JSON."""


def _upgraded(data: dict[str, Any]) -> dict[str, Any]:
    """Converts a plan of schema version 1 to the current version."""

    def footprint(old: dict[str, Any]) -> dict[str, Any]:
        return {**old, "breakdown": {Category(name).key: size for name, size in old["breakdown"].items()}, "most": {}}

    shortfall = data["shortfall"]
    return {
        **data,
        "baseline": footprint(data["baseline"]),
        "plan": footprint(data["plan"]),
        "shortfall": shortfall and {**shortfall, "binding": Category(shortfall["binding"]).key},
        "solver": {name: value for name, value in data["solver"].items() if name != "seconds"},
        "tensors": [],
        "card_bytes": None,
        "margin_bytes": 0,
    }


def _checked(plan: Plan) -> Plan:
    """Returns the plan. Raises `TypeError` if a field has a value that later code cannot use."""
    check_field_types(plan)
    if plan.max_slowdown is not None and plan.max_slowdown <= 0:
        raise TypeError(f"max_slowdown is {plan.max_slowdown!r}, not a factor above zero")
    return plan


def _workload_from_json(data: dict[str, Any]) -> WorkloadFacts:
    batch, own_loss = tuple((p, tuple(s), d) for p, s, d in data["batch"]), data["own_loss"]
    own_loss = None if own_loss is None else OwnLoss(**own_loss)
    return WorkloadFacts(
        **{**data, "batch": batch, "own_loss": own_loss, "not_by_sample": as_tuples(data.get("not_by_sample", ()))}
    )


def _shortfall_from_json(data: dict[str, Any]) -> Shortfall:
    binding = CATEGORY_OF_KEY[data["binding"]]
    relaxations = tuple(
        Relaxation(**{**relaxation, "next_step": _next_step_from_json(relaxation["next_step"])})
        for relaxation in data.get("relaxations", ())
    )
    return Shortfall(
        **{**data, "next_step": _next_step_from_json(data["next_step"]), "relaxations": relaxations, "binding": binding}
    )


def _run_from_json(data: dict[str, Any] | None) -> RunFacts | None:
    if data is None:
        return None
    moments, changes = (
        tuple(kind(**item) for item in data[name]) for name, kind in (("moments", RunMoment), ("changes", RunChange))
    )
    sizes = {name: as_tuples(data[name]) for name in ("lengths", "samples")}
    source = data.get("source")
    if source is not None:
        lengths = as_tuples(source["lengths"])
        source = RunSource(**{**source, "lengths": lengths, "between": as_tuples(source["between"])})
    return RunFacts(**{**data, **sizes, "moments": moments, "changes": changes, "source": source})


def _next_step_from_json(data: dict[str, Any] | None) -> NextStep | None:
    if data is None:
        return None
    return NextStep(**{**data, "decisions": tuple(decision_from_json(d) for d in data["decisions"])})


def _plain(value: object) -> object:
    """Converts a value to what `json` can write."""
    if isinstance(value, (Decision, Footprint)):
        return value.to_json()
    if isinstance(value, Shortfall):
        return {**_fields(value), "binding": Category(value.binding).key}
    if dataclasses.is_dataclass(value):
        return _fields(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _fields(value: Any) -> dict[str, object]:
    """Converts the fields of a dataclass, except for times that differ between two runs."""
    return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.compare}
