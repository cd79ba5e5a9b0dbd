"""Time limits: long computations check the time, and a search leaves the time for what follows it."""

from __future__ import annotations

import dataclasses
import re
import time
import types

import pytest
import torch

from examples import convnet
from planner import pipeline, profiles
from planner.choose import fitting, pareto_front, planning_session
from planner.choose.choice import Prediction
from planner.choose.planning_session import PlanningSession
from planner.choose.searches import Searches
from planner.estimate.footprint import AllocatingStep, measure, runs_within
from planner.estimate.kernel_notes import kernel_notes
from planner.estimate.roofline import op_times_ns
from planner.estimate.smallest_total import predicted_missing_bytes, smallest_of, smallest_total_bytes
from planner.plan_types.constraints import parse_constraints
from planner.plan_types.decision_base import Fidelity
from planner.plan_types.decisions import Allocator
from planner.plan_types.sizes import MIB
from planner.profiles import bare
from planner.progress import TimeIsUp, Watch
from planner.recompute import holds
from planner.recompute.units import units_of
from planner.rewrite.rehearse import certifying_graph
from planner.workload.budget import card_and_budget
from planner.workload.workload import workload
from tests.support.workloads import what_if

CONSTRAINTS = parse_constraints(fidelity="exact", force=(), forbid=("optimizer-kernel",))


class CountingWatch(Watch):
    """Counts the checks. The user ends planning at check number `last`."""

    def __init__(self, last: int | None = None, **options) -> None:
        super().__init__(**options)
        self.checks, self.last = 0, last

    def check(self) -> None:
        self.checks += 1
        if self.checks == self.last:
            self.end()
        super().check()


def work():
    net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()) for _ in range(6)))
    return workload(net, (torch.zeros(256, 16),), loss_fn=lambda output, batch: output.mean())


def planned(vram: str | None, watch: Watch, constraints=CONSTRAINTS):
    card, vram_bytes = card_and_budget("bare", vram)
    return pipeline.plan_workload(work(), card, vram_bytes=vram_bytes, constraints=constraints, watch=watch)


@pytest.fixture(scope="module")
def graph():
    return what_if(work())


def built(graph, watch: Watch | None = None):
    return units_of(graph, op_times_ns(graph, bare(), 1), granularity_bytes=512, watch=watch)


def test_the_checkpoint_problem_is_the_same_with_a_watch_and_ends_at_each_of_its_checks(graph, monkeypatch):
    monkeypatch.setattr(holds, "_BETWEEN_CHECKS", 8)
    watch = CountingWatch()
    assert built(graph, watch).units == built(graph).units
    modules_and_segments = {(unit.module, unit.segment) for unit in built(graph).units}
    assert watch.checks > len(modules_and_segments) + (len(graph.saves) + len(graph.storages)) // 8
    for last in range(1, watch.checks + 1):
        with pytest.raises(TimeIsUp):
            built(graph, CountingWatch(last))


def test_a_prediction_checks_the_time_before_each_replay_and_is_made_again_after_it_was_ended(graph):
    card, asked = card_and_budget("rtx-3090", "1GiB")[0], (1 << 20, ((),), True)
    watch, ended = CountingWatch(), CountingWatch(last=2)
    missing = predicted_missing_bytes(graph, card, *asked, watch)
    assert missing == predicted_missing_bytes(graph, card, *asked) > 0 and watch.checks > 2
    prediction = Prediction(lambda: graph, ended)
    with pytest.raises(TimeIsUp):
        prediction.missing_bytes(card, *asked)
    with ended.after_end():
        assert prediction.missing_bytes(card, *asked) == missing


def test_the_search_for_the_smallest_plan_leaves_the_time_to_measure_the_smallest_known_one(monkeypatch):
    whole = planned("4KiB", Watch(seconds=600))
    assert not whole.fits and not any("planning ended" in note for note in whole.notes)
    monkeypatch.setattr(PlanningSession, "seconds_to_measure_smallest", 1e6)
    watch = Watch(seconds=600)
    nearest = pipeline.fitting.nearest

    def late(*arguments):
        assert 250 < watch.left_seconds <= 300  # half of the time is left for the measurement
        monkeypatch.setattr(watch, "_deadlines", [time.monotonic() + 200])  # less than what is left for it
        return nearest(*arguments)

    monkeypatch.setattr(pipeline.fitting, "nearest", late)
    early = planned("4KiB", watch)
    assert not early.fits and "no plan that fits was found" in early.notes[0]


def test_the_time_to_measure_the_smallest_plan_follows_from_the_longest_measurement(monkeypatch):
    nearest, estimates = pipeline.fitting.nearest, []

    def slow(session, *arguments):
        session._seconds_to_measure.append(5.0)
        estimates.append(session.with_slower_algorithms().seconds_to_measure_smallest)
        return nearest(session, *arguments)

    monkeypatch.setattr(pipeline.fitting, "nearest", slow)
    planned("4KiB", Watch())
    assert estimates == [60.0]


def test_a_plan_that_fits_but_is_too_slow_is_reported_when_the_time_is_up_after_it_was_found(monkeypatch):
    constraints = dataclasses.replace(CONSTRAINTS, max_slowdown=1.0)
    whole = planned("150000B", Watch(), constraints)
    assert whole.decisions and whole.peak.total_bytes <= 150_000 and whole.slowdown > 1

    def ends(*arguments):
        nearest(*arguments)
        raise TimeIsUp

    nearest = pipeline.fitting.nearest
    monkeypatch.setattr(pipeline.fitting, "nearest", ends)
    early = planned("150000B", Watch(), constraints)
    assert early.decisions == whole.decisions and early.peak == whole.peak
    assert "with the best plan that was certified by then" in early.notes[0]


def test_no_relaxation_is_prepared_when_the_time_is_up(monkeypatch):
    def ends(progress) -> None:
        if progress.stage.startswith("trying changes that could make a plan fit (") and not watch.is_ended:
            watch.end()
            monkeypatch.delattr(PlanningSession, "search_space")  # a relaxation needs it

    watch = Watch(report=ends)
    plan = planned("4KiB", watch)
    assert not plan.fits and {relaxation.opens for relaxation in plan.shortfall.relaxations} == {None}


def test_a_trade_off_leaves_the_time_to_assemble_its_plans(monkeypatch):
    card, _ = card_and_budget("bare", None)
    asked, assemble = [], pipeline.assemble_plan

    def slow(*arguments, **options):
        time.sleep(0.3)
        return assemble(*arguments, **options)

    def front(session, constraints, **times):
        asked.append(times)
        return pareto_front.Front(points=(session.baseline,), complete=True)

    monkeypatch.setattr(pipeline, "assemble_plan", slow)
    monkeypatch.setattr(pipeline, "front", front)
    pipeline.tradeoff_workload(work(), card, vram_bytes=None, constraints=CONSTRAINTS)
    (times,) = asked
    assert 0.3 <= times["assembly_seconds"] < 3 and 0 < times["rehearsal_seconds"] < 60


@pytest.mark.parametrize("assembly_seconds", [250.0, 1e6])
def test_the_front_ends_when_only_the_time_to_assemble_it_is_left(assembly_seconds):
    """With 250 of 600 s for each plan, at most two plans and the baseline are certified."""
    card, _ = card_and_budget("bare", None)
    with pipeline.open_session(work(), card, None, Watch(seconds=600)) as session:
        session.expect(CONSTRAINTS)
        found = pareto_front.front(session, CONSTRAINTS, vram_bytes=None, assembly_seconds=assembly_seconds)
    assert not found.complete and len(found.points) <= 600 / assembly_seconds + 1


def test_a_search_for_the_smallest_total_that_is_ended_returns_a_total_in_which_the_step_runs(graph, monkeypatch):
    card, replay, replays = card_and_budget("rtx-3090", "1GiB")[0], AllocatingStep.replay, []

    def counted(*arguments, **options):
        replays.append(arguments)
        return replay(*arguments, **options)

    monkeypatch.setattr(AllocatingStep, "replay", counted)
    alternatives = ((), (Allocator(expandable_segments=True),))
    smallest, ended = smallest_of(graph, card, alternatives, within_bytes=1), Watch()
    ended.end()
    whole = len(replays)
    quick = smallest_of(graph, card, alternatives, within_bytes=1, until=ended)
    assert len(replays) - whole <= 2 < whole
    assert smallest <= quick <= measure(graph, card, vram_bytes=None).footprint.total_bytes
    assert any(runs_within(graph, card, quick, decisions) for decisions in alternatives)
    with ended.after_end():
        assert smallest_of(graph, card, alternatives, within_bytes=1, until=ended) == smallest


def test_the_smallest_known_plan_is_reported_soon_after_the_time_is_up(monkeypatch):
    """Half of the time that is left when nothing fits is used for the search, if the measurement may take longer."""
    asked, search = [], planning_session.smallest_of

    def watched(*arguments, until, **options):
        asked.append(until.left_seconds)
        return search(*arguments, until=until, **options)

    monkeypatch.setattr(planning_session, "smallest_of", watched)
    monkeypatch.setattr(PlanningSession, "seconds_to_measure_smallest", 1e6)
    watch = CountingWatch(seconds=600)
    plan = planned("4KiB", watch)
    assert not plan.fits and asked and all(seconds > 200 for seconds in asked)
    assert not any("planning ended" in note for note in plan.notes)


@pytest.fixture
def left_after_end(monkeypatch) -> list[float]:
    """Lets `fitting.nearest` and `fitting.smallest` run, then ends planning as Ctrl-C does and drops their results.

    Returns a list of the times in seconds that are left: at the beginning of each search, and afterwards, when the
    smallest total of the smallest known plan is searched for.
    """
    left: list[float] = []

    def ended_by_user(search):
        def ended(session, *arguments):
            left.append(session.watch.left_seconds)
            search(session, *arguments)
            session.watch.end()
            raise TimeIsUp

        return ended

    def watched(*arguments, until, **options):
        if until.is_ended:
            left.append(until.left_seconds)
        return smallest_of(*arguments, until=until, **options)

    for name in ("nearest", "smallest"):
        monkeypatch.setattr(fitting, name, ended_by_user(getattr(fitting, name)))
    monkeypatch.setattr(planning_session, "smallest_of", watched)
    return left


def test_after_ctrl_c_the_smallest_known_plan_is_still_measured(left_after_end):
    early = planned("4KiB", Watch(seconds=1000))
    assert not early.fits and "planning ended by Ctrl-C" in early.notes[0]
    assert len(left_after_end) == 3 and left_after_end[-1] > 500  # `nearest` calls `smallest`


def test_a_trade_off_leaves_the_time_to_measure_its_smallest_known_plan(left_after_end, monkeypatch):
    monkeypatch.setattr(PlanningSession, "seconds_to_measure_smallest", 400.0)
    card, _ = card_and_budget("rtx-3090", None)
    with pipeline.open_session(work(), card, None, Watch(seconds=1000)) as session:
        session.expect(CONSTRAINTS)
        found = pareto_front.front(session, CONSTRAINTS, vram_bytes=None)
    assert found.points and not found.complete
    assert len(left_after_end) == 2 and 400 < left_after_end[0] <= 600 < left_after_end[1]


@pytest.mark.slow
def test_notes_on_convolutions_leave_out_what_would_be_computed_after_the_end():
    card = profiles.load("a100-40gb")
    model, batch, loss_fn = convnet.build(batch_size=32, blocks_per_stage=(1, 1))
    graph = certifying_graph(workload(model, batch, loss_fn=loss_fn), (), card)
    whole_bytes = smallest_total_bytes(graph, card, fastest=True)

    def note(card, graph, vram_bytes: int | None, watch: Watch) -> str:
        measured = measure(graph, card, vram_bytes=vram_bytes)
        notes = kernel_notes(graph, measured, (), card, watch)
        return next((note for note in notes if re.search("run a slower|run their fastest|tries algorithms", note)), "")

    for vram_bytes, text in (whole_bytes - 4 * MIB, "run a slower"), (None, "run their fastest"):
        watch = CountingWatch()
        whole = note(card, graph, vram_bytes, watch)
        assert text in whole and whole.count(" GiB") + whole.count(" MiB") == (1 if vram_bytes else 2)
        assert watch.checks > 4
        for last in (1, 2, watch.checks):
            short = note(card, graph, vram_bytes, CountingWatch(last))
            assert short == ("" if vram_bytes is None else whole[: whole.rindex(", with which the step needs")])
    searching = dataclasses.replace(card, cudnn_benchmark=True)
    graph = certifying_graph(workload(model, batch, loss_fn=loss_fn), (), searching)
    ended = Watch()
    ended.end()
    assert "without cudnn.benchmark the step allocates" in note(searching, graph, None, Watch())
    assert note(searching, graph, None, ended).endswith("without cudnn.benchmark was computed")
    assert "PyTorch leaves out algorithms" in note(searching, graph, whole_bytes - 4 * MIB, Watch())
    for last in range(1, 4):
        short = note(searching, graph, whole_bytes - 4 * MIB, CountingWatch(last))
        assert (
            "Under the budget, PyTorch leaves out algorithms whose workspaces do not fit. Planning ended before"
            in short
        )


def test_programs_without_an_answer_count_for_the_constraints_of_their_plans():
    searches, limited = Searches(), dataclasses.replace(CONSTRAINTS, max_slowdown=1.2)
    relaxed = dataclasses.replace(CONSTRAINTS, fidelity=Fidelity.PARTIAL)
    for number, constraints in enumerate((CONSTRAINTS, limited, relaxed)):
        searches.add(constraints, types.SimpleNamespace(undecided=10**number))
    # If no plan is fast enough, one from a search without the limit is reported.
    assert [searches.undecided(asked) for asked in (CONSTRAINTS, limited, relaxed)] == [1, 11, 100]
