"""While a search runs, a plan that recomputes all layers is certified. It is the result if the time is up."""

from __future__ import annotations

import gc
import os
import time

import pytest
import torch

from planner import pipeline
from planner.choose.certificates import Certificates
from planner.choose.chooser import Chooser
from planner.choose.head_start import Fallback
from planner.choose.planning_session import PlanningSession
from planner.choose.searches import Searches
from planner.errors import PlannerError, RehearsalError
from planner.plan_types.constraints import parse_constraints
from planner.plan_types.decision_base import Decision
from planner.plan_types.decisions import Checkpoint
from planner.plan_types.plan import Plan
from planner.progress import Progress, Watch
from planner.recording.step_graph import StepGraph
from planner.workload.budget import card_and_budget
from planner.workload.workload import workload

pytestmark = pytest.mark.slow

ROWS = 4096
TIGHT = {6: "50MiB", 18: "120MiB"}
"""Budgets in which some layers must be recomputed. Keys are the numbers of layers."""


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(128, 256), torch.nn.Linear(256, 128)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def net(layers: int) -> torch.nn.Module:
    with torch.device("meta"):
        return torch.nn.Sequential(*(Layer() for _ in range(layers)))


def planned(layers: int, vram: str | None = None, watch: Watch | None = None, **options) -> Plan:
    card, vram_bytes = card_and_budget("bare", vram or TIGHT[layers])
    given = {
        "fidelity": "exact",
        "force": (),
        "forbid": (),
        "only": ("checkpoint", "segment-checkpoint", "offload"),
        **options,
    }
    batch = (torch.zeros(ROWS, 128, device="meta"),)
    work = workload(net(layers), batch, loss_fn=lambda output, batch: output.mean())
    return pipeline.plan_workload(
        work, card, vram_bytes=vram_bytes, constraints=parse_constraints(**given), watch=watch
    )


def same(plan: Plan, other: Plan) -> bool:
    return (plan.decisions, plan.peak, plan.fits) == (other.decisions, other.peak, other.fits)


@pytest.fixture
def begun(monkeypatch) -> list[tuple[Decision, ...]]:
    """Returns the decisions that are rehearsed in the background. Each rehearsal is ready before the search goes on."""
    noted: list[tuple[Decision, ...]] = []
    begin = Certificates.begin_in_background

    def begin_and_wait(self, decisions):
        noted.append(decisions)
        begin(self, decisions)
        while not self._in_background[decisions].is_ready:
            time.sleep(0.01)

    monkeypatch.setattr(Certificates, "begin_in_background", begin_and_wait)
    return noted


@pytest.fixture
def without_fallback(monkeypatch):
    def planned_without(layers: int) -> Plan:
        with monkeypatch.context() as patch:
            patch.setattr(Fallback, "prepare", lambda self, guessing, space: None)
            return planned(layers)

    return planned_without


@pytest.mark.parametrize("layers", [6, 18])  # with 18 layers, recordings have only a few of them
def test_it_is_reported_before_the_search_ends_and_changes_no_plan(begun, without_fallback, layers):
    reports: list[Progress] = []
    plan = planned(layers, watch=Watch(report=reports.append))
    ((fallback,),) = begun
    assert isinstance(fallback, Checkpoint) and sorted(fallback.modules, key=int) == [*map(str, range(layers))]
    found = next(report for report in reports if report.best_total_bytes is not None)
    assert found.stage != "certifying a plan" and found.best_total_bytes < plan.peak.total_bytes
    assert same(plan, without_fallback(layers)) and plan.decisions != begun[0]


def test_it_is_the_plan_if_the_time_is_up(begun, monkeypatch):
    monkeypatch.setattr(Searches, "promised", lambda self, constraints: ())  # as if the search had found nothing
    watch = Watch(report=lambda progress: progress.best_total_bytes is not None and watch.end())
    plan = planned(6, watch=watch)
    assert plan.fits and plan.decisions == begun[0]
    assert plan.solver.promised_bytes == plan.solver.certified_bytes > 0
    assert plan.solver.status == "time limit" and plan.solver.gap == 1
    assert any("planning ended by Ctrl-C" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("vram", "options"),
    [
        ("2GiB", {}),  # the unchanged step fits
        ("5MiB", {"only": ("checkpoint", "step-in-backward")}),  # the fallback keeps all gradients, so it cannot fit
        (TIGHT[6], {"only": ("segment-checkpoint", "offload")}),  # whole modules may not be checkpointed
        (TIGHT[6], {"only": ("checkpoint", "accumulation"), "force": ("accumulation",)}),
    ],
)
def test_it_is_not_begun_if_it_cannot_help(begun, vram, options):
    planned(6, vram, **options)
    assert begun == []


def test_a_fallback_that_cannot_be_rehearsed_changes_no_plan(monkeypatch, without_fallback):
    asked: list[tuple[Decision, ...]] = []

    class Failing:
        is_ready = True

        def result(self):
            asked.append(())
            raise RehearsalError("it fails")

        def end(self) -> None: ...

    def begin(self, decisions):
        self._in_background[decisions] = Failing()

    monkeypatch.setattr(Certificates, "begin_in_background", begin)
    assert same(planned(6), without_fallback(6))
    assert asked == [()]


def test_an_error_of_the_function_that_receives_progress_ends_planning(begun):
    raised: list[Progress] = []

    def report(progress: Progress) -> None:
        if progress.best_total_bytes is not None and not raised:
            raised.append(progress)
            raise PlannerError("enough")

    with pytest.raises(PlannerError, match="enough"):
        planned(6, watch=Watch(report=report))


def test_plans_that_follow_from_wrong_recordings_are_forgotten(begun, monkeypatch):
    noted, note = [], PlanningSession.note

    def noting(self, certified, constraints):
        note(self, certified, constraints)
        if certified.choice.decisions == begun[0]:
            before = self.best_known(constraints)
            self.recordings.shortening.is_dropped = True
            after = self.best_known(constraints)
            self.recordings.shortening.is_dropped = False
            noted.append((before, after))

    monkeypatch.setattr(PlanningSession, "note", lambda *of: noting(*of) if begun else note(*of))
    planned(6)
    ((before, after),) = noted
    assert before.choice.decisions == begun[0] and after is None


def test_it_is_not_noted_after_recordings_were_dropped(begun, monkeypatch):
    decide, noted, note = Fallback._decide, [], PlanningSession.note

    def decide_and_drop(self, guessing, space):
        decide(self, guessing, space)
        if begun:
            guessing.recordings.shortening.is_dropped = True

    monkeypatch.setattr(Fallback, "_decide", decide_and_drop)
    monkeypatch.setattr(PlanningSession, "note", lambda self, plan, of: noted.append(plan) or note(self, plan, of))
    planned(6)
    assert begun and not any(plan.choice.decisions == begun[0] for plan in noted)


def test_it_ends_with_the_session_if_it_is_not_ready(monkeypatch):
    ended: list[bool] = []

    class Endless:
        is_ready = False

        def end(self) -> None:
            ended.append(True)

    def begin(self, decisions):
        self._in_background[decisions] = Endless()

    monkeypatch.setattr(Certificates, "begin_in_background", begin)
    assert planned(6).fits
    assert ended == [True]


def test_a_session_that_has_ended_is_in_no_cycle():
    """Recordings are freed at once, although Python's garbage collector does not run while planning."""
    planned(18)
    gc.collect()
    gc.disable()
    try:
        planned(18)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = {type(thing) for thing in gc.garbage}
        assert not kinds & {StepGraph, PlanningSession, Certificates, Chooser}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="this system has no process priorities")
def test_its_process_has_a_low_priority(begun, monkeypatch):
    priorities = []
    is_ready = Certificates.is_ready

    def noting(self, decisions):
        child = self._in_background.get(decisions)
        if child is not None:
            priorities.append(os.getpriority(os.PRIO_PROCESS, child._process._pid))
        return is_ready(self, decisions)

    monkeypatch.setenv("PLANNER_RECORDINGS", "none")
    monkeypatch.setattr(Certificates, "is_ready", noting)
    planned(6)
    assert priorities and min(priorities) > os.getpriority(os.PRIO_PROCESS, 0)
