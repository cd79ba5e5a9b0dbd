"""Explains a snapshot of a run that failed or took more memory than planned: `explain(snapshot, plan)`."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from planner.errors import SnapshotError
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import format_size, parse_size
from planner.snapshot.explain.comparison import Comparison, causes
from planner.snapshot.explain.contents import KEPT, OUTSIDE, Contents, contents_of
from planner.snapshot.explain.explanation import Explanation, describe_group
from planner.snapshot.explain.moment import Moment, failed_event, moment_of, peak_event
from planner.snapshot.explain.program import RecordedBlock, read_program
from planner.snapshot.explain.steps import step_starts
from planner.snapshot.explain.trials import Trial, Trials
from planner.snapshot.file import load
from planner.snapshot.history import Action, History, Sources
from planner.snapshot.replay import replay_history
from planner.snapshot.result import ReplayResult

__all__ = ["Explanation", "explain"]


def explain(
    snapshot: str | os.PathLike[str] | Mapping[str, Any],
    plan: Plan | str | os.PathLike[str] | None = None,
    *,
    device: int | None = None,
    capacity: str | int | None = None,
) -> Explanation:
    """Explain why a run ran out of memory or took more than planned, from a snapshot of the caching allocator.

    The moment that is explained is the last request that failed, or else the one at which most bytes were allocated.
    Settings of the allocator are replayed on the recorded requests in the simulated allocator.

    Args:
        snapshot: the file that `torch.cuda.memory._dump_snapshot` wrote, or what `torch.cuda.memory._snapshot()`
            returns. With `torch.cuda.memory._record_memory_history()` before the program, it holds the history of all
            requests; without it, only the state at the end can be explained.
        plan: the plan of the run, or its file; None if there is none.
        device: index of the CUDA device; None for the first one on which a request failed, or else that has events.
        capacity: the most memory that the allocator could hold on the card, such as "23GiB"; None to take it from the
            record: what was reserved when the request failed, and what the card had free.

    Raises:
        planner.errors.PlannerError: the snapshot or the plan cannot be read.
    """
    if plan is not None and not isinstance(plan, Plan):
        plan = Plan.load(pathlib.Path(plan))
    limit = None
    if capacity is not None:
        limit = parse_size(capacity, device_bytes=None if plan is None else plan.card_bytes)
    record = _Record(load(snapshot, device=device, needs_events=False))
    moment = moment_of(record.history, record.program, record.replayed, record.event, limit)
    if limit is not None and limit < moment.peak_reserved_bytes:
        raise SnapshotError(
            f"the allocator of the record held {format_size(moment.peak_reserved_bytes)}, which is more than the "
            f"capacity of {format_size(limit)}: give the memory that it could hold (--capacity)"
        )
    step = max((start for start in record.steps if record.event is not None and start < record.event), default=None)
    event = -1 if record.event is None else record.event
    asked = None
    if moment.failed:
        asked = RecordedBlock(
            address=0, requested_bytes=moment.asked_bytes, born=event, freed=None, frames=moment.frames
        )
    contents = contents_of(record.program, event, step, plan, record.history.settings, asked)
    trials, more_bytes, notes = _trials(record, moment, contents, has_plan=plan is not None)
    compared = Comparison(plan, moment, contents, record.history.settings)
    return Explanation(
        device=record.history.device,
        events=len(record.history.events),
        is_exact=None if record.replayed is None else record.replayed.is_equal,
        moment=moment,
        causes=tuple(causes(moment, record.history, plan)),
        trials=tuple(trials),
        more_memory_bytes=more_bytes,
        parts=contents.parts,
        groups=contents.groups,
        findings=tuple(compared.findings()),
        exceeds_plan=compared.exceeds,
        notes=(*record.history.notes, *record.notes, *notes),
    )


_LEAST_LEFT_OUT = 0.05
"""Least size of blocks that are left out in a replay, as a part of the request that failed."""
_MOST_LEFT_OUT = 3
"""Number of places in the program whose blocks are left out in a replay."""


class _Record:
    """A history with its moment, and with its replay if it has one."""

    def __init__(self, history: History) -> None:
        self.notes: list[str] = []
        self.replayed: ReplayResult | None = None
        self.event: int | None = None
        """Index of the event that is explained, -1 for the state before the first one; None without events."""
        self.history, self.program = history, read_program(dataclasses.replace(history, events=(), sources=Sources()))
        try:
            self.program = read_program(history)
        except SnapshotError as error:
            self.notes.append(f"only the state at the end is explained, because the history is not complete: {error}")
            self.history = history = dataclasses.replace(history, events=())
        if history.events:
            failed = failed_event(history)
            self.event = peak_event(self.program) if failed is None else failed
            self._replay(failed)
        self.steps = step_starts(self.program, len(history.events))

    def _replay(self, failed: int | None) -> None:
        """Replay the history, and note what that shows about its replays under other settings."""
        try:
            self.replayed = replay_history(self.history, look_at=self.event)
        except SnapshotError as error:
            self.notes.append(f"free memory and its pieces are not known: {error}")
            return
        self.program = read_program(self.history, self.replayed.emptied)
        if not self.replayed.is_equal:
            self.notes.append(
                "the replays are not exact: the simulated allocator differs from the record in "
                f"{len(self.replayed.addresses)} addresses and {len(self.replayed.driver)} exchanges with the driver "
                "(python -m planner.snapshot shows them)"
            )
        if self.replayed.start:
            self.notes.append(
                "the record starts in the middle of the run: with expandable_segments or max_split_size_mb, the "
                "replays assume that what was alive then has no gaps"
            )
        failures = sum(event.action is Action.OOM for event in self.history.events)
        if failures > 1:
            self.notes.append(f"{failures} requests failed in the record; the last one is explained")
        if failed is not None and any(event.action is Action.ALLOC for event in self.history.events[failed:]):
            self.notes.append("the program went on after this request")


def _trials(
    record: _Record, moment: Moment, contents: Contents, *, has_plan: bool
) -> tuple[list[Trial], int | None, list[str]]:
    """Returns the replays under other circumstances, the memory that would have helped, and notes."""
    if record.event is None:
        return [], None, []
    until = record.event if moment.failed else len(record.history.events) - 1
    trials = Trials(record.program, record.replayed, record.history.settings, moment, until=until, steps=record.steps)
    if not moment.failed:
        recorded = trials.recorded()
        return [recorded, *(trial for trial in trials.settings() if _saves(trial, recorded))], None, []
    if trials.unchanged().failed_event is None:
        note = (
            "the replay with this limit does not run out of memory, also without any change, so replays with other "
            "settings say nothing"
        )
        return [], None, [note]
    found = trials.settings()
    is_curable = any(trial.passes for trial in found)
    if contents.scale is not None and contents.scale > 1.01:
        found += trials.scaled("tensors of the step as large as planned", 1 / contents.scale)
    removable = (KEPT, OUTSIDE) if has_plan else (OUTSIDE,)  # Without a plan, parameters may be among what is kept.
    avoidable = [group for group in contents.groups if group.unplanned_bytes or group.purpose in removable]
    large = [group for group in avoidable if group.place and group.total_bytes >= _LEAST_LEFT_OUT * moment.asked_bytes]
    for group in large[:_MOST_LEFT_OUT]:
        found.append(trials.without(f"without the {describe_group(group)}", group.numbers))
    if not is_curable:
        found += trials.smaller_batches()
    notes = ["the replays end with this request: the record does not show what the program would have asked for next"]
    return sorted(found, key=lambda trial: not trial.passes), trials.more_memory_bytes(), notes


def _saves(trial: Trial, recorded: Trial) -> bool:
    """True if a run in which no request failed would have needed less memory than as recorded, by at least 1 %."""
    if trial.spare_bytes is None or recorded.spare_bytes is None:
        return trial.passes and trial.peak_reserved_bytes < 0.99 * recorded.peak_reserved_bytes
    return trial.spare_bytes > recorded.spare_bytes + 0.01 * recorded.peak_reserved_bytes
