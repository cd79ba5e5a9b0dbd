"""`Explanation`: why a request did not fit, or why a run took more memory than planned, and what would have helped."""

from __future__ import annotations

import dataclasses

from planner.plan_types.sizes import format_size
from planner.snapshot.explain.contents import Group, Part
from planner.snapshot.explain.moment import Moment
from planner.snapshot.explain.steps import place_of
from planner.snapshot.explain.trials import Trial

SCHEMA_VERSION = 1
"""Version of the JSON form."""
MOST_GROUPS = 8
"""Number of places in the program that an explanation lists."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """The facts of a snapshot about the moment at which memory ran out, or at which most memory was in use."""

    device: int
    """Index of the CUDA device."""
    events: int
    """Number of events in the record."""
    is_exact: bool | None
    """True if the simulated allocator gives every address of the record; None if the record could not be replayed."""
    moment: Moment
    causes: tuple[str, ...]
    """Sentences: why the request did not fit, and why free memory could not be used."""
    trials: tuple[Trial, ...]
    """Settings and techniques, each replayed: those that pass first."""
    more_memory_bytes: int | None
    """Additional memory with which every request would have fit; None if that is not known."""
    parts: tuple[Part, ...]
    """Memory that was allocated, by purpose."""
    groups: tuple[Group, ...]
    """Memory that was allocated, by the place in the program that allocated it; largest first."""
    findings: tuple[str, ...]
    """Sentences that compare the run with the plan. Empty without a plan."""
    exceeds_plan: bool | None
    """True if the run took more memory than the plan has; None without a plan."""
    notes: tuple[str, ...]
    """Sentences that name what the record or the replays leave out."""

    @property
    def is_surprise(self) -> bool:
        """True if a request failed, or if the run took more memory than planned."""
        return self.moment.failed or bool(self.exceeds_plan)

    @property
    def advice(self) -> tuple[Trial, ...]:
        """The trials that pass."""
        return tuple(trial for trial in self.trials if trial.passes)

    def headline(self) -> str:
        """Returns a sentence that names the moment."""
        moment = self.moment
        where = ", called by ".join(text for text in place_of(moment.frames) if text)
        where = f" at {where}" if where else ""
        if moment.failed:
            return f"a request of {format_size(moment.asked_bytes)} did not fit{where} (event {moment.event})"
        if moment.event is None:
            return "the snapshot has no events, so only the state in which it was written can be explained"
        return f"no request failed; most memory was allocated{where} (event {moment.event})"

    def state(self) -> str:
        """Returns a line with the memory that was allocated, reserved and free at the moment."""
        moment = self.moment
        texts = [f"{format_size(moment.allocated_bytes)} allocated", f"{format_size(moment.reserved_bytes)} reserved"]
        if moment.device_free_bytes is not None:
            texts.append(f"{format_size(moment.device_free_bytes)} of the card free")
        if moment.limit_bytes is not None:
            texts.append(f"limit {format_size(moment.limit_bytes)} ({moment.limit_source})")
        return ", ".join(texts)

    def __str__(self) -> str:
        moment = self.moment
        lines = [self.headline(), self.state(), *self.causes]
        if self.trials:
            lines += ["replayed with other settings:", *(f"  {describe(trial, moment)}" for trial in self.trials)]
        if self.more_memory_bytes:
            lines.append(f"with {format_size(self.more_memory_bytes)} more memory the request would have fit")
        lines += ["alive at that moment:", *(f"  {_part(part)}" for part in self.parts)]
        lines += [f"    {describe_group(group)}" for group in self.groups[:MOST_GROUPS]]
        return "\n".join([*lines, *self.findings, *(f"note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, object]:
        """Returns the explanation as a dict for JSON. Sizes are in bytes."""
        moment = dataclasses.asdict(self.moment)
        moment["frames"] = [frame._asdict() for frame in self.moment.frames]
        groups = [{k: v for k, v in dataclasses.asdict(group).items() if k != "numbers"} for group in self.groups]
        return {
            "schema_version": SCHEMA_VERSION,
            "device": self.device,
            "events": self.events,
            "is_exact": self.is_exact,
            "is_surprise": self.is_surprise,
            "exceeds_plan": self.exceeds_plan,
            "moment": moment,
            "causes": list(self.causes),
            "trials": [dataclasses.asdict(trial) for trial in self.trials],
            "more_memory_bytes": self.more_memory_bytes,
            "parts": [dataclasses.asdict(part) for part in self.parts],
            "groups": groups[: 4 * MOST_GROUPS],
            "findings": list(self.findings),
            "notes": list(self.notes),
        }


def describe(trial: Trial, moment: Moment) -> str:
    """Returns a line for a trial: its name, whether every request fits, and the memory to spare."""
    if moment.limit_bytes is None:
        return f"{trial.name}: {format_size(trial.peak_reserved_bytes)} reserved at most"
    if not trial.passes:
        return f"{trial.name}: does not fit"
    if trial.spare_bytes is None:
        return f"{trial.name}: fits"
    return f"{trial.name}: fits, with {format_size(trial.spare_bytes)} to spare"


def _part(part: Part) -> str:
    planned = "" if part.planned_bytes is None else f" (plan: at most {format_size(part.planned_bytes)})"
    asked = f" and the request of {format_size(part.asked_bytes)}" if part.asked_bytes else ""
    return f"{part.purpose}: {format_size(part.total_bytes)}{asked}{planned}"


def describe_group(group: Group) -> str:
    """Returns a line for blocks of one place: their size, number, purpose and place."""
    count = "" if group.blocks == 1 else f" in {group.blocks} blocks"
    place = ", called by ".join(text for text in (group.place, group.caller) if text) or "no stack trace"
    return f"{format_size(group.total_bytes)}{count}, {group.purpose}: {place}"
