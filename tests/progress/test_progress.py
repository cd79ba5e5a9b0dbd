"""Progress and time limits: what is reported, where it is shown, and what is known when the time is up."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import signal
import sys
import threading
import time
import types

import pytest
import torch

import planner
from planner import pipeline
from planner.choose.planning_session import PlanningSession
from planner.cli import main
from planner.cli.report import provenance
from planner.errors import TimeLimitError, WorkloadError
from planner.plan_types.constraints import parse_constraints
from planner.progress import Progress, TimeIsUp, Watch
from planner.progress.display import Lines, shown
from planner.progress.durations import parse_duration
from planner.workload.budget import card_and_budget
from planner.workload.workload import workload

ROWS = 256


def net() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()) for _ in range(4)))


def mean(output, batch):
    return output.mean()


def planned(watch: Watch, vram: str):
    card, vram_bytes = card_and_budget("bare", vram)
    constraints = parse_constraints(fidelity="exact", force=(), forbid=("optimizer-kernel",))
    work = workload(net(), (torch.zeros(ROWS, 16),), loss_fn=mean)
    return pipeline.plan_workload(work, card, vram_bytes=vram_bytes, constraints=constraints, watch=watch)


def ending_at(stage: str) -> Watch:
    """A watch whose user ends planning as soon as a stage begins."""
    watch = Watch(report=lambda progress: progress.stage == stage and watch.end())
    return watch


def moment(stage: str = "searching", **fields) -> Progress:
    return Progress(
        **{"stage": stage, "elapsed_seconds": 14.2, "best_total_bytes": None, "best_slowdown": None, **fields}
    )


# ---- the watch -----------------------------------------------------------------------------------------------------


def test_a_record_reads_as_one_line():
    assert str(moment()) == "searching, 14 s"
    best = moment(best_total_bytes=int(5.31 * 2**30), best_slowdown=1.12)
    assert str(best) == "searching: best so far 5.31 GiB at 1.12 x, 14 s"


def test_the_cause_names_the_second_of_ctrl_c(monkeypatch):
    watch, began = Watch(), time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + 16.2)
    watch.end()
    monkeypatch.setattr(time, "monotonic", lambda: began + 18.9)
    watch.end()
    assert watch.cause == "by Ctrl-C after 16 s"


def test_plans_of_searches_apart_are_not_the_best_plan():
    records: list[Progress] = []
    watch = Watch(report=records.append)
    watch.stage("searching")
    watch.found(100, 1.5)
    sizes = [64]
    with watch.apart(lambda: f"{sizes[-1]} samples"):
        watch.found(90, 1.1)
        watch.stage("searching")
        sizes.append(128)
        watch.stage("searching")
    watch.found(95, 1.4)
    assert [(r.stage, r.best_total_bytes) for r in records] == [
        ("searching", None),
        ("searching", 100),
        ("64 samples", None),
        ("64 samples: searching", None),
        ("128 samples: searching", None),
        ("searching", 95),
    ]


def test_changes_are_reported_and_a_slower_plan_is_none(monkeypatch):
    records: list[Progress] = []
    watch = Watch(report=records.append)
    watch.stage("searching")
    watch.stage("searching")
    watch.found(100, 1.5)
    watch.found(90, 2.0)
    watch.check()
    assert [(r.stage, r.best_total_bytes) for r in records] == [("searching", None), ("searching", 100)]
    later = time.monotonic() + 2
    monkeypatch.setattr(time, "monotonic", lambda: later)
    watch.check()
    assert len(records) == 3 and records[-1].elapsed_seconds >= 2


def test_a_part_may_have_less_time_than_the_whole_but_not_more():
    watch = Watch(seconds=60)
    with watch.at_most(0), pytest.raises(TimeIsUp):
        watch.check()
    watch.check()
    with watch.at_most(1e6):
        assert watch.left_seconds <= 60
    with watch.until_found(0), watch.at_most(30):
        with pytest.raises(TimeIsUp):
            watch.check()
        watch.found(100, 1.5)
        assert 0 < watch.left_seconds <= 30
    left_over = [10.0]
    with watch.leaving(lambda: left_over[0]):
        assert 49 < watch.left_seconds <= 50
        left_over[0] = 60.0
        with pytest.raises(TimeIsUp):
            watch.check()
    with watch.leaving(lambda: 10), watch.leaving(lambda: 20):
        assert 29 < watch.left_seconds <= 30
    assert 59 < watch.left_seconds <= 60
    watch.check()
    watch.end()
    with pytest.raises(TimeIsUp):
        watch.check()
    with watch.after_end():
        watch.check()


def test_each_check_calls_the_work_of_meanwhile():
    watch, done = Watch(seconds=60), []

    def work() -> None:
        watch.check()  # does not repeat the work
        done.append("work")

    with watch.meanwhile(work):
        watch.check()
        with watch.meanwhile(lambda: done.append("other work")):
            watch.check()
        watch.check()
    watch.check()
    assert done == ["work", "other work", "work"]


def test_the_time_limit_does_not_end_the_work_of_meanwhile_and_its_error_is_raised():
    watch, done = Watch(seconds=60), []

    def work() -> None:
        watch.end()
        watch.check()
        done.append("work")
        raise ValueError("the work fails")

    with watch.meanwhile(work):
        with pytest.raises(ValueError, match="the work fails"):
            watch.check()
        with pytest.raises(TimeIsUp):  # no work is begun when the time is up
            watch.check()
    assert done == ["work"]


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("2 min", 120), ("1.5h", 5400), ("7", 7), (0.5, 0.5)])
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "0s", "-1", "30 days", "nan", float("inf"), True, None])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(WorkloadError, match=r"write a text such as 30s or 2min"):
        parse_duration(text)


def test_a_wait_is_reported_from_another_thread(monkeypatch):
    monkeypatch.setattr("planner.progress._HEARTBEAT_SECONDS", 0.01)
    records, arrived = [], threading.Event()
    watch = Watch(report=lambda progress: (records.append(progress), len(records) > 2 and arrived.set()))
    watch.stage("training on the CPU")
    with watch.reporting():
        assert arrived.wait(10)
    assert {progress.stage for progress in records} == {"training on the CPU"}
    ended = len(records)
    time.sleep(0.05)
    assert len(records) == ended


# ---- where it is shown ---------------------------------------------------------------------------------------------


def test_without_a_terminal_a_line_is_written_every_ten_seconds():
    out = io.StringIO()
    lines = Lines(out)
    for seconds in (0.1, 9.9, 10.2, 11.0, 19.0, 20.3):
        lines(moment(elapsed_seconds=seconds))
    assert out.getvalue() == "plan: searching, 10 s\nplan: searching, 20 s\n"


def test_a_terminal_gets_a_live_line_that_is_cleared(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with shown(True) as report:
        report(moment("rehearsing the step"))
        time.sleep(0.3)
    assert "rehearsing the step, 14 s" in terminal.getvalue()
    assert terminal.getvalue().rstrip().endswith("\x1b[2K")


def test_a_notebook_shows_it_unasked_and_a_script_does_not(monkeypatch):
    shown_texts: list[str] = []
    handle = types.SimpleNamespace(update=lambda text: shown_texts.append(repr(text)))
    module = types.ModuleType("IPython")
    module.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    module.display = types.ModuleType("IPython.display")
    module.display.display = lambda text, display_id: handle
    with shown(None) as report:
        assert report is None
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", module.display)
    with shown(None) as report:
        report(moment())
    assert shown_texts == ["searching, 14 s", ""]
    with shown(False) as report:
        assert report is None


# ---- what is known when the time is up -----------------------------------------------------------------------------


def test_an_end_during_the_search_returns_the_step_that_fits_and_names_what_was_not_tried():
    plan = planned(ending_at("searching"), "1GiB")
    assert plan.fits and plan.certified and plan.decisions == () and plan.solver.status == "time limit"
    assert re.match(r"planning ended by Ctrl-C after \d+ s with the best plan that was certified", plan.notes[0])
    assert (
        "not tried: activation checkpointing or offloading without other techniques; optimizer step in backward"
        in plan.notes[0]
    )


@pytest.mark.slow
def test_an_end_before_the_first_certificate_still_certifies_the_best_choice():
    records: list[Progress] = []
    complete = planned(Watch(report=records.append), "110000B")
    early = planned(ending_at("certifying a plan"), "110000B")
    assert complete.decisions and complete.fits
    stages = list(dict.fromkeys(record.stage for record in records))
    assert stages == ["rehearsing the step", "searching", "certifying a plan"]
    assert records[-1].best_total_bytes == complete.peak.total_bytes
    assert records[-1].best_slowdown == pytest.approx(complete.slowdown)
    assert early.decisions == complete.decisions and early.peak == complete.peak and early.certified
    assert (early.solver.status, early.solver.gap) == ("time limit", 1) and "ended by Ctrl-C" in early.notes[0]
    assert "solver: time limit, gap not known, " in provenance(early).plain
    assert early.notes[0].endswith("the search for a faster plan was not finished")
    assert not any("ended by" in note for note in complete.notes)


@pytest.mark.slow
def test_ending_early_certifies_the_best_choice_even_if_the_baseline_fits(monkeypatch):
    """The search is interrupted before it certifies its first choice."""
    card, vram_bytes = card_and_budget("rtx-3090", "4GiB")
    constraints = parse_constraints(fidelity="rounded", force=(), forbid=("optimizer-kernel", "8bit-optimizer"))
    layers = torch.nn.Sequential(torch.nn.Linear(2048, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 2048))
    work = workload(layers, (torch.zeros(4096, 2048),), loss_fn=mean)
    settings = {"vram_bytes": vram_bytes, "constraints": constraints}
    complete = pipeline.plan_workload(work, card, **settings)
    promised, watch = [], Watch()

    def interrupted(self, choice, **options):
        promised.append(choice)
        if len(promised) == 1:
            watch.end()
            watch.check()
        return certify(self, choice, **options)

    certify = PlanningSession.certify
    monkeypatch.setattr(PlanningSession, "certify", interrupted)
    early = pipeline.plan_workload(work, card, **settings, watch=watch)
    assert complete.decisions and complete.fits and complete.slowdown < 1
    assert early.decisions == complete.decisions and "ended by Ctrl-C" in early.notes[0]


def test_an_end_while_nothing_fits_reports_the_smallest_plan_so_far():
    plan = planned(ending_at("searching for the smallest plan"), "4KiB")
    assert not plan.fits and plan.certified
    assert "no plan that fits was found" in plan.notes[0]
    whys = {relaxation.why for relaxation in plan.shortfall.relaxations if relaxation.opens is None}
    assert any("not tried: planning ended by Ctrl-C" in why for why in whys)


def test_a_rehearsal_that_hangs_is_ended_in_time():
    def hangs(output, batch):
        time.sleep(60)

    began = time.monotonic()
    with pytest.raises(TimeLimitError, match=r"after the time limit of 0\.5 s before any plan was certified"):
        planner.plan(net(), (torch.zeros(ROWS, 16),), vram="1GiB", loss_fn=hangs, gpu="bare", time_limit=0.5)
    assert time.monotonic() - began < 3


# ---- the command ---------------------------------------------------------------------------------------------------

MODEL = f"""
import os, signal, time, torch

def build():
    return torch.nn.Linear(16, 16), (torch.zeros({ROWS}, 16),), lambda output, batch: output.mean()

def interrupted():
    user = os.getpid()
    def loss(output, batch):
        if not os.path.exists("interrupted"):
            open("interrupted", "w").close()
            os.kill(user, signal.SIGINT)
        time.sleep(60)
    return torch.nn.Linear(16, 16), (torch.zeros({ROWS}, 16),), loss
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)


def test_the_command_says_that_nothing_was_certified_and_exits_with_2(folder, capsys):
    code = main(["net.py:build", "--gpu", "bare", "--vram", "1GiB", "--time-limit", "0.001s", "--json"])
    out, err = capsys.readouterr()
    assert code == 2
    assert json.loads(out)["error"]["type"] == "TimeLimitError"
    assert err.count("\n") == 1 and "give more time (--time-limit)" in err


def test_ctrl_c_ends_planning_like_the_time_limit(folder, capfd):
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of parallel tests ignore interrupts
    began = time.monotonic()
    try:
        code = main(["net.py:interrupted", "--gpu", "bare", "--vram", "1GiB"])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)
    err = capfd.readouterr().err
    assert code == 2 and time.monotonic() - began < 30
    assert "ending with the best plan so far; Ctrl-C again ends at once" in err
    assert "planning ended by Ctrl-C after" in err


@pytest.mark.parametrize(
    ("function", "words", "message"),
    [
        ("planner.cli.page.outputs.rehearse_plan", ("--snapshot", "s.pickle"), "not everything was written"),
        ("planner.cli.training_lines.training_lines", ("--for", "loop"), "not everything was written"),
        ("planner.cli.report.render", (), ""),
        ("planner.rewrite.on_cpu.verification.cpu_verification", ("--verify",), "the plan was not verified"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_after_planning_loses_neither_the_answer_nor_what_was_written(
    folder, capsys, monkeypatch, function, words, message, as_json
):
    folder_name, _, name = function.rpartition(".")
    original = getattr(importlib.import_module(folder_name), name)

    def interrupted(*arguments, **options):
        signal.raise_signal(signal.SIGINT)
        return original(*arguments, **options)

    monkeypatch.setattr(function, interrupted)
    monkeypatch.setattr("planner.workload.cards.has_cuda_card", lambda: False)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        output = ["--json"] if as_json else []
        code = main(["net.py:build", "--gpu", "rtx-2060", "--vram", "1GiB", "--save", "plan.json", *words, *output])
    finally:
        signal.signal(signal.SIGINT, handler)
    out, err = capsys.readouterr()
    assert code == 2 * bool(message) and err.endswith(f"plan: interrupted: {message}\n" if message else "")
    assert json.loads(out)["fits"] if as_json else "certified by rehearsal" in out
    is_saved = "--for" not in words  # lines to paste come before files
    assert "s.pickle" not in os.listdir() and ("plan.json" in os.listdir()) == is_saved
    assert as_json or ("wrote plan.json" in err) == is_saved


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--time-limit", "soon"], "time limit 'soon' is not a duration above zero"),
        (["--tradeoff", "--time-limit", "9s", "--seconds", "9"], "--seconds cannot be combined with --time-limit"),
    ],
)
def test_a_time_limit_that_cannot_be_used_is_refused(folder, capsys, words, message):
    assert main(["net.py:build", "--gpu", "bare", *words]) == 2
    assert message in capsys.readouterr().err
