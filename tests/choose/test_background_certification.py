"""The plans of a trade-off are certified while the search goes on, and those certified before it ends are returned."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch

import planner
from planner import pipeline
from planner.choose import background_certification, fitting, pareto_front
from planner.choose.background_certification import BackgroundCertification
from planner.choose.certificates import Certificates
from planner.choose.choice import Certified, Choice
from planner.choose.pareto_front import Front, front
from planner.choose.searches import Searches
from planner.errors import MachineError, StepError
from planner.plan_types.constraints import parse_constraints
from planner.plan_types.decisions import Allocator
from planner.plan_types.recompute_decisions import Checkpoint
from planner.progress import TimeIsUp, Watch
from planner.workload.budget import card_and_budget
from planner.workload.workload import workload
from tests.recompute.test_left_out import FORBIDDEN, RefusesTapes

pytestmark = pytest.mark.slow


def net() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)))


def mean(output, batch):
    return output.mean()


def late(*of):
    raise TimeIsUp


def found(watch: Watch | None = None, vram_bytes: int | None = None) -> Front:
    card, _ = card_and_budget("bare", None)
    constraints = parse_constraints(fidelity="exact", force=(), forbid=("optimizer-kernel",))
    work = workload(net(), (torch.zeros(2048, 64),), loss_fn=mean)
    with pipeline.open_session(work, card, None, watch) as session:
        session.expect(constraints)
        return front(session, constraints, vram_bytes=vram_bytes)


def bytes_and_ns(points) -> list[tuple[int, int]]:
    return [(point.measured.footprint.total_bytes, point.measured.footprint.step_ns) for point in points]


@pytest.fixture(scope="module")
def whole() -> Front:
    return found()


def test_plans_certified_before_the_user_ends_the_search_are_returned(whole, monkeypatch):
    certified: list[Choice] = []
    finish = BackgroundCertification._finish_measurement

    def finish_and_end(self, found):
        finish(self, found)
        certified.append(found.choice)
        if len(certified) == 3:
            watch.end()

    watch = Watch()
    monkeypatch.setattr(BackgroundCertification, "_finish_measurement", finish_and_end)
    early = found(watch)
    assert whole.complete and not early.complete
    assert len(certified) == 3 and {choice.decisions for choice in certified if choice.decisions} <= {
        point.choice.decisions for point in early.points
    }
    for total_bytes, step_ns in bytes_and_ns(early.points):
        assert any(size <= total_bytes and ns <= step_ns for size, ns in bytes_and_ns(whole.points))


def test_the_search_ends_in_time_for_the_certificates_of_what_it_has_found(whole, monkeypatch):
    """With a reserve of all the time that is left, nothing is searched after the first plans."""
    monkeypatch.setattr(BackgroundCertification, "needed_seconds", property(lambda self: 1e6 * (len(self._added) > 2)))
    early = found(Watch(seconds=600))
    assert not early.complete
    assert 2 <= len(early.points) < len(whole.points)
    assert all(point.choice.decisions for point in early.points[1:])


def test_the_plan_at_the_budget_of_the_user_is_measured_under_the_smallest_budget_too(whole, monkeypatch):
    events, add, best = [], BackgroundCertification.add, fitting.best
    monkeypatch.setattr(BackgroundCertification, "add", lambda self, choice: events.append(choice) or add(self, choice))
    monkeypatch.setattr(fitting, "best", lambda *of: events.append(best(*of)) or events[-1])
    monkeypatch.setattr(fitting, "smallest", late)
    total_bytes = bytes_and_ns(whole.points)[0][0]
    found(vram_bytes=int(0.6 * total_bytes))
    (number,) = (number for number, event in enumerate(events) if isinstance(event, Certified))
    assert events[number].choice.decisions and events[number + 1] is events[number].choice


def test_a_plan_that_cannot_be_rehearsed_leaves_its_technique_out():
    def points(*forbid: str) -> list[tuple[int, int]]:
        torch.manual_seed(0)
        batch, model = {"x": torch.randn(4096, 64)}, RefusesTapes(4)
        options = {"gpu": "bare", "progress": False, "seconds": 600}
        front = planner.tradeoff(model, batch, forbid=[*FORBIDDEN, *forbid], **options)
        assert front.complete
        kinds = {decision.kind for plan in front.points for decision in plan.decisions}
        assert "checkpoint" in kinds and "segment-checkpoint" not in kinds
        return [(plan.peak.total_bytes, plan.peak.step_ns) for plan in front.points]

    assert points() == points("segment-checkpoint")


def test_an_error_while_a_plan_is_measured_ends_the_search(monkeypatch):
    def killed(*args, **options):
        raise MachineError("the process was ended")

    monkeypatch.setattr(background_certification, "smallest_of", killed)
    with pytest.raises(MachineError, match="the process was ended"):
        found()


def test_plans_that_follow_from_wrong_recordings_are_forgotten(whole, monkeypatch):
    check, before = fitting.check_recordings, []

    def drop_once(session, certified):
        check(session, certified)
        if len(before) < 3 and bytes_and_ns([certified])[0] in bytes_and_ns(whole.points[1:-1]):
            before.append(certified)
            if len(before) == 3:
                session.recordings.shortening.is_dropped = True
                raise fitting._DroppedError

    monkeypatch.setattr(Certified, "is_as_promised", False)
    monkeypatch.setattr(fitting, "check_recordings", drop_once)
    again = found()
    assert len(before) == 3 and not any(point is old for point in again.points for old in before)
    assert bytes_and_ns(again.points) == bytes_and_ns(whole.points)


def test_a_tradeoff_is_searched_again_if_a_search_within_it_drops_recordings(whole, monkeypatch):
    smallest, calls = fitting.smallest, []

    def dropping(session, space, constraints):
        calls.append(session)
        session.recordings.shortening.is_dropped = True
        return smallest(session, space, constraints)

    monkeypatch.setattr(fitting, "smallest", dropping)
    assert bytes_and_ns(found().points) == bytes_and_ns(whole.points)
    assert len(calls) == 2


def test_a_plan_is_not_returned_before_its_recordings_are_checked(whole, monkeypatch):
    monkeypatch.setattr(Certified, "is_as_promised", False)
    monkeypatch.setattr(fitting, "check_recordings", late)
    baseline = bytes_and_ns(whole.points[:1])
    assert bytes_and_ns(found().points) == baseline
    assert bytes_and_ns(found(vram_bytes=int(0.6 * baseline[0][0])).points) == baseline


def test_a_choice_with_what_was_left_out_meanwhile_is_dropped(monkeypatch):
    """Else the technique would be left out for more modules than those that fail."""
    certified = []
    monkeypatch.setattr(fitting, "certify", lambda session, choice: certified.append(choice))
    searches = Searches()
    certification = BackgroundCertification(types.SimpleNamespace(searches=searches), 1.0)
    old, other, new = (
        Choice(decisions=(Checkpoint(modules=paths),), peak_bytes=1, step_ns=1, status="", gap=0.0)
        for paths in (("0.0", "1"), ("1",), ("0", "1"))
    )
    certification.add(old)
    certification.add(other)
    searches.leave_out({Checkpoint(modules=("0.0",)): StepError("it fails")}, ((), False), net())
    certification.add(new)
    certification._failed += [old, other, new]
    certification.raise_errors()
    assert certified == [new, other]


def test_the_smallest_plan_so_far_is_returned_if_the_time_is_up_before_it_is_compared(monkeypatch):
    monkeypatch.setattr(pareto_front, "_no_larger", late)
    monkeypatch.setattr(BackgroundCertification, "add", lambda self, choice: None)
    noted, smallest = [], fitting.smallest
    monkeypatch.setattr(fitting, "smallest", lambda *of: noted.append(smallest(*of)) or noted[-1])
    assert found().points[-1] is noted[0]


def test_each_choice_is_certified_once_and_the_baseline_is_not_rehearsed_again(monkeypatch):
    begun, begin = [], Certificates.begin_in_background

    def noting(self, decisions):
        if not self._is_known(decisions):
            begun.append(decisions)
        begin(self, decisions)

    monkeypatch.setattr(Certificates, "begin_in_background", noting)
    monkeypatch.setattr(fitting, "smallest", late)  # it certifies plans on its own
    points = found().points
    assert all(begun) and len(begun) == len(set(begun))
    assert {point.choice.decisions for point in points} <= {(), *begun}
    assert any(isinstance(decision, Checkpoint) for decisions in begun for decision in decisions)


def test_a_rehearsal_that_the_search_ends_is_begun_again(whole, monkeypatch):
    ended, begin = [], Certificates.begin_in_background

    def begin_and_end(self, decisions):
        if decisions in ended:
            begin(self, decisions)
        elif not self._is_known(decisions):
            ended.append(decisions)
            self.begin(decisions)
            self._end_begun()

    monkeypatch.setattr(Certificates, "begin_in_background", begin_and_end)
    again = found(Watch(seconds=60))
    assert ended and again.complete
    assert bytes_and_ns(again.points) == bytes_and_ns(whole.points)


def test_the_estimate_counts_each_choice_that_is_unfinished_and_one_more():
    certification = BackgroundCertification(types.SimpleNamespace(searches=Searches()), 10.0)
    assert certification.needed_seconds == 5.0
    one, other = (
        Choice(decisions=(Checkpoint(modules=(path,)),), peak_bytes=1, step_ns=1, status="", gap=0.0)
        for path in ("one", "other")
    )
    with_options = dataclasses.replace(one, decisions=(*one.decisions, Allocator(expandable_segments=True)))
    for choice in (one, other, one, with_options, None):
        certification.add(choice)
    assert certification.needed_seconds == 15.0
    certification._seconds += [6.0, 4.0]
    assert certification.needed_seconds == 7.5
