"""The promise driver with invented plans and runs: the contents of its rows, and the work that it does only once."""

from __future__ import annotations

import dataclasses
import io
import time

import pytest
import torch
from rich.console import Console

import planner
from benchmarks import promise
from benchmarks.card.budgets import CASES, pairs
from benchmarks.card.environment import software
from benchmarks.card.plan_case import AS_IT_IS
from planner.errors import MeasurementError
from planner.rewrite.on_gpu.worker import RanOut
from planner.workload.loading import load_workload
from tests.rewrite.on_gpu.test_verification import made_up

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plan():
    net = torch.nn.Linear(4, 4)
    whole = planner.plan(net, (torch.ones(2, 4),), vram=None, gpu="bare", loss_fn=lambda output, batch: output.sum())
    peak = dataclasses.replace(whole.peak, allocated_bytes=90, reserved_bytes=95, total_bytes=99)
    return dataclasses.replace(whole, peak=peak, vram_bytes=100)


@pytest.fixture
def settings(tmp_path):
    return promise.Settings(
        out=tmp_path, gpu="h100", until=time.monotonic() + 600, workers=1, about={**software(), "driver": "1.0"}
    )


def rows(plan, settings, train, wanted, fits=lambda budget: True):
    asked = []

    def make(case, budget, _):
        asked.append((case.name, budget))
        return dataclasses.replace(plan, fits=fits(budget))

    return list(promise.run_pairs(wanted, settings, make, train)), asked


def test_a_pair_that_keeps_its_promise_says_how_close_and_the_plain_step_runs_once_a_model(plan, settings):
    gpt2 = CASES["gpt2"]
    found, asked = rows(
        plan, settings, lambda plan, options: made_up(step_ms=3.0 if options else 2.0), [(gpt2, "80%"), (gpt2, "60%")]
    )
    assert [row["kept"] for row in found] == [True, True] and all(row["error"] is None for row in found)
    assert found[0]["measured"]["slowdown"] == 1.5 and found[0]["pair"] == "gpt2 at 80%"
    assert asked.count(("gpt2", AS_IT_IS)) == 1
    assert found[0]["driver"] == "1.0" and found[0]["torch"] == torch.__version__
    text = drawn(found)
    assert "2 of 2 promises kept" in text and "+0.00%" in text and "/ 1.50" in text


def test_what_is_broken_what_fails_and_what_runs_out_are_distinguished(plan, settings):
    gpt2, unet = CASES["gpt2"], CASES["unet"]
    ran_out = RanOut(device="x", step=2, message="tried to allocate")
    answers = iter(
        [made_up(), made_up(allocated_bytes=95), MeasurementError("the driver is gone"), made_up(), ran_out, ran_out]
    )

    def train(plan, options):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    broken, failed, out = rows(plan, settings, train, [(gpt2, "80%"), (gpt2, "60%"), (unet, "80%")])[0]
    assert broken["kept"] is False and broken["measured"]["allocated_bytes"] == 95
    assert failed["error"] == "the driver is gone" and "kept" not in failed
    assert out["kept"] is False and out["measured"] is None and out["out_of_memory"]["step"] == 2
    text = drawn([broken, failed, out])
    assert "0 of 2 promises kept" in text and "BROKEN" in text and "OUT OF MEMORY" in text and "the driver is" in text


def test_a_budget_that_holds_no_plan_is_an_answer_and_nothing_is_trained(plan, settings):
    def train(plan, options):
        raise AssertionError("nothing is to be trained")

    (row,), asked = rows(plan, settings, train, [(CASES["gpt2"], "35%")], fits=lambda budget: False)
    assert row["error"] is None and row["kept"] is None and asked == [("gpt2", "35%")]
    assert "0 of 0 promises kept; no plan fits 1 of the budgets" in drawn([row])


def test_nothing_is_begun_when_time_is_up(plan, settings):
    late = dataclasses.replace(settings, until=0.0)
    assert rows(plan, late, None, [(CASES["gpt2"], "80%")]) == ([], [])


def test_there_are_sixty_pairs_and_each_model_can_be_made_as_large_as_it_says():
    assert len(pairs()) >= 60 and len(set(map(str, pairs()))) == len(pairs())
    assert [case.name for case, _ in pairs()[: len(CASES)]] == list(CASES)
    for case in CASES.values():
        work = load_workload(case.reference, batch_size=case.batch_size, seq_len=case.seq_len, optimizer="adamw")
        assert work.batch_size == case.batch_size and next(work.model.parameters()).is_meta


def drawn(found) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(promise.table(found))
    return console.export_text()
