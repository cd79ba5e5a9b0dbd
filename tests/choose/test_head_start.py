"""The certificate of the plan is begun while the baseline is being rehearsed, and a wrong guess changes no plan."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

import planner
from planner import pipeline
from planner.choose import planning_session
from planner.choose.certificates import Certificates
from planner.choose.chooser import Chooser
from planner.choose.recordings import Recordings
from planner.errors import DecisionError
from planner.plan_types.decisions import Decision, Precision
from planner.plan_types.plan import Plan
from planner.search.milp import Search
from tests.support.stack import Stack

pytestmark = pytest.mark.slow

OPTIONS = {"gpu": "rtx-3060", "only": ("mixed-precision", "checkpoint"), "vram": "150MiB"}


def planned(way: str = "nothing") -> Plan:
    with torch.device("meta"):
        return planner.plan(Stack(way), torch.zeros(16384, 16), **OPTIONS)


def same(plan: Plan, other: Plan) -> bool:
    """True if the plans differ in nothing but the times that planning took."""
    plan, other = (dataclasses.replace(of, solver=dataclasses.replace(of.solver, seconds=0.0)) for of in (plan, other))
    return plan == other


@pytest.fixture(scope="module")
def without_head_start() -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "rehearse_baseline", lambda session, constraints, _: session.expect(constraints))
        return planned()


@pytest.fixture
def rehearsed(monkeypatch) -> list[tuple[str, tuple[Decision, ...]]]:
    """Returns the rehearsals of certificates in order: ('begin', decisions) and ('of', decisions)."""
    noted: list[tuple[str, tuple[Decision, ...]]] = []

    def noting(name: str):
        original = getattr(Certificates, name)

        def method(self, decisions, **options):
            noted.append((name, decisions))
            return original(self, decisions, **options)

        return method

    for name in ("begin", "of"):
        monkeypatch.setattr(Certificates, name, noting(name))
    return noted


def test_the_certificate_is_begun_before_the_baseline_is_known(without_head_start, rehearsed):
    assert same(planned(), without_head_start)
    first = rehearsed[1][1]
    assert first and rehearsed[:4] == [("begin", ()), ("begin", first), ("of", ()), ("of", first)]


def test_a_wrong_guess_changes_no_plan(without_head_start, monkeypatch):
    begin, wrong = Certificates.begin, []

    def begin_another(self, decisions):
        if decisions:
            wrong.append(decisions)
        begin(self, (Precision(dtype="fp16"),) if decisions else ())

    monkeypatch.setattr(Certificates, "begin", begin_another)
    assert same(planned(), without_head_start)
    assert wrong


def test_a_guess_that_cannot_be_made_changes_no_plan(without_head_start, monkeypatch):
    fastest, calls = Chooser.fastest, []

    def failing(self, *args, **options):
        calls.append(self)
        if len(calls) == 1:
            raise DecisionError("the guess fails")
        return fastest(self, *args, **options)

    monkeypatch.setattr(Chooser, "fastest", failing)
    assert same(planned(), without_head_start)


@pytest.mark.thorough
def test_recordings_of_the_guess_are_dropped_if_the_baseline_differs(monkeypatch):
    way = "it reads another tensor of the model"
    dropped = []
    confirm = Recordings.confirm
    monkeypatch.setattr(Recordings, "confirm", lambda self: (confirm(self), dropped.append(self.is_dropped)))
    plan = planned(way)
    monkeypatch.setattr(planning_session, "runs_to_shorten", lambda work: ())
    assert same(planned(way), plan)
    assert dropped == [True]  # without identical layers, nothing is guessed


@pytest.mark.thorough
def test_a_tradeoff_is_searched_again_if_recordings_are_wrong(monkeypatch):
    def found() -> list[tuple[int, int]]:
        with torch.device("meta"):
            model = Stack("no autocast")
        options = {"gpu": "rtx-3060", "only": ("mixed-precision", "checkpoint"), "force": "mixed-precision"}
        front = planner.tradeoff(model, torch.zeros(16384, 16), seconds=600, **options)
        assert front.complete
        return [(plan.peak.total_bytes, plan.peak.step_ns) for plan in front.points]

    dropped = []
    drop = Recordings.drop_if_wrong
    monkeypatch.setattr(Recordings, "drop_if_wrong", lambda *of: dropped.append(drop(*of)) or dropped[-1])
    points = found()
    assert any(dropped)
    monkeypatch.setattr(planning_session, "runs_to_shorten", lambda work: ())
    assert found() == points


def test_the_solver_time_includes_that_of_the_guess(monkeypatch):
    """The search after the baseline takes the answers of the guess, and solves nothing again."""
    solve, solved = Search.solve, []

    def slow(self, *arguments, **options):
        time.sleep(0.2)
        solved.append(arguments)
        return solve(self, *arguments, **options)

    monkeypatch.setattr(Search, "solve", slow)
    assert planned().solver.seconds >= 0.2 * len(solved) > 0
