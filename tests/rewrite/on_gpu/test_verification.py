"""A plan's promise against a run in a fresh process, here on a CPU that counts its bytes and has a limit."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import sys

import pytest
import torch

from planner import pipeline
from planner.cli import command
from planner.errors import MeasurementError
from planner.plan_types.constraints import parse_constraints
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import MIB
from planner.rewrite.on_gpu import verification as verifying
from planner.rewrite.on_gpu.cuda import Cuda
from planner.rewrite.on_gpu.verification import Verification, run_in_process, verification
from planner.rewrite.on_gpu.worker import Ran, RanOut, outcome_from_json, outcome_to_json
from planner.rewrite.parity.result import Parity, Row, failed
from planner.workload import cards
from planner.workload.budget import card_and_budget
from planner.workload.loading import load_workload
from tests.support.counting_device import CountingCpu

pytestmark = pytest.mark.slow

TESTS = pathlib.Path(__file__).parents[2]
COUNTED = functools.partial(run_in_process, command=(sys.executable, str(TESTS / "support" / "counting_device.py")))
NET = """
import torch

def net(batch_size=1024):
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)) for _ in range(6)]
    batch = (torch.randn(batch_size, 64), torch.randn(batch_size, 64))
    return torch.nn.Sequential(*layers), batch, lambda output, batch: torch.nn.functional.mse_loss(output, batch[1])
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("nets") / "net.py"
    path.write_text(NET)
    return f"{path}:net"


def planned(reference: str, share: float | None, *, optimizer: str = "sgd", alive: bool = False, **constraints) -> Plan:
    """Return a plan for a bare card, within a fraction of the baseline's peak."""
    work = load_workload(reference, batch_size=None, seq_len=None, optimizer=optimizer, gradients_alive=alive)
    card, _ = card_and_budget("bare", None)
    allowed = parse_constraints(**{"fidelity": "exact", "force": (), "forbid": ("offload",), **constraints})
    whole = pipeline.plan_workload(work, card, vram_bytes=None, constraints=allowed)
    if share is None:
        return whole
    return pipeline.plan_workload(work, card, vram_bytes=int(share * whole.baseline.total_bytes), constraints=allowed)


def made_up(**changes) -> Ran:
    given = dict(
        device="NVIDIA H100 80GB HBM3", allocated_bytes=90, reserved_bytes=95, total_bytes=99, total_source="nvml",
        peaks=((1, 2), (90, 95)), losses=(1.0, 0.5, 0.25), skipped=0, step_ms=3.0, step_ms_spread=0.1,
    )  # fmt: skip
    return Ran(**{**given, **changes})


def of(plan: Plan, ran: Ran | RanOut, **others) -> Verification:
    plain = {"plain": made_up(step_ms=2.0), "parity": None, **others}
    return Verification(plan=plan, cap_bytes=plan.vram_bytes, planned=ran, **plain)


def promising(plan: Plan, **peak) -> Plan:
    return dataclasses.replace(plan, peak=dataclasses.replace(plan.peak, **peak))


@pytest.mark.thorough
def test_a_plan_runs_under_its_cap_in_what_it_promised_to_the_byte_and_trains_alike(reference):
    plan = planned(reference, 0.8, forbid=("offload", "accumulation"))
    assert plan.fits and plan.decisions
    found = verification(plan, run=COUNTED)
    assert found.kept and found.parity.passed and found.parity.rows
    assert found.cap_bytes == plan.vram_bytes
    assert found.planned.allocated_bytes == plan.peak.allocated_bytes
    assert len(found.planned.losses) == 3 and found.planned.losses[2] < found.planned.losses[0]
    slowdown = next(quantity for quantity in found.quantities if quantity.name == "slowdown")
    assert slowdown.measured == found.planned.step_ms / found.plain.step_ms


def test_the_allocator_gets_the_budget_less_the_context(reference):
    plan, asked = promising(planned(reference, None), total_bytes=500 * MIB, reserved_bytes=80 * MIB), []

    def run(plan, options):
        asked.append(tuple(options))
        return made_up()

    found = verification(dataclasses.replace(plan, vram_bytes=600 * MIB), run=run, beside_plain=False)
    assert found.cap_bytes == 180 * MIB
    assert asked == [("--cap", str(180 * MIB))]


@pytest.mark.thorough
def test_gradients_that_are_alive_before_the_step_are_alive_when_it_is_measured(reference):
    plan, usual = planned(reference, None, alive=True), planned(reference, None)
    found = verification(plan, run=COUNTED, beside_plain=False)
    assert found.kept and found.planned.allocated_bytes == plan.peak.allocated_bytes > usual.peak.allocated_bytes


@pytest.mark.thorough
def test_without_a_budget_the_baseline_is_measured(reference):
    plan = planned(reference, None)
    found = verification(plan, run=COUNTED)
    assert found.kept and found.cap_bytes is None and found.plain is found.planned
    assert found.parity is None and "is the baseline" in found.why_no_parity


@pytest.mark.thorough
def test_out_of_memory_is_a_broken_promise_that_names_the_op_and_what_was_alive(reference):
    plan = planned(reference, 0.8, optimizer="sgd-momentum", forbid=("offload", "accumulation"))
    found = verification(dataclasses.replace(plan, vram_bytes=plan.peak.total_bytes - 1), run=COUNTED)
    assert not found.kept and isinstance(found.planned, RanOut) and found.plain is None
    assert "made up: tried to allocate" in found.planned.message and "\n" not in found.planned.message
    place = found.planned.place
    assert place["op"].startswith("aten.") and place["phase"] in ("forward", "backward", "recompute", "optimizer")
    assert place["alive"]["parameters"] == plan.peak.breakdown["parameters"]
    assert found.to_json()["out_of_memory"] is True


@pytest.mark.parametrize(("cap_bytes", "phase"), [(1_500_000, "forward"), (4_400_000, "backward")])
@pytest.mark.thorough
def test_the_place_where_memory_ran_out_knows_its_phase(reference, cap_bytes, phase):
    found = COUNTED(planned(reference, None), ("--cap", str(cap_bytes), "--find-op"))
    assert found.step == 1 and found.place["phase"] == phase
    assert bool(found.place["module"]) is (phase == "forward")


@pytest.mark.thorough
def test_a_model_that_does_not_fit_the_card_is_reported(reference):
    found = COUNTED(planned(reference, None), ("--cap", "1000", "--find-op"))
    assert isinstance(found, RanOut) and found.step == 0 and found.place is None


@pytest.mark.parametrize(
    ("peak", "vram_bytes", "kept"),
    [
        ({}, 100, True),
        ({"allocated_bytes": 89}, 100, False),
        ({"reserved_bytes": 94}, 100, False),
        ({"total_bytes": 98}, 100, False),
        ({}, 98, False),
        ({}, None, True),
    ],
)
def test_a_promise_is_kept_only_if_each_number_is(reference, peak, vram_bytes, kept):
    """A promise is kept within 1 %, which is less than a byte of these numbers; the budget is exact to the byte."""
    promise = {"allocated_bytes": 90, "reserved_bytes": 95, "total_bytes": 99, **peak}
    plan = dataclasses.replace(promising(planned(reference, None), **promise), vram_bytes=vram_bytes)
    assert of(plan, made_up()).kept is kept


def test_a_plan_that_trains_otherwise_is_broken_however_little_it_takes(reference):
    plan = promising(planned(reference, None), allocated_bytes=90, reserved_bytes=95, total_bytes=99)
    same = Row(comparison="as planned", kind="loss", name="1", bound=0.0, measured=0.0, bit_equal=True, passed=True)
    assert of(plan, made_up(), parity=Parity(rows=(same,))).kept
    assert not of(plan, made_up(), parity=Parity(rows=(same, failed("as planned", "loss", "2", "is not finite")))).kept


def test_on_another_card_the_total_is_not_promised(reference):
    plan = promising(planned(reference, None), allocated_bytes=90, reserved_bytes=95, total_bytes=10)
    assert not of(plan, made_up()).kept
    assert of(plan, made_up(), same_card=False).kept


@pytest.mark.thorough
def test_copies_that_do_not_fit_the_card_are_not_compared_and_other_failures_count(reference):
    plan = planned(reference, 0.7)
    no_room = failed("in double", "run", "comparison", "could not run: OutOfMemoryError: CUDA out of memory")
    wrong = failed("as planned", "gradient", "0.weight", "is not finite")

    def run(rows, plan, options):
        return Parity(rows=rows) if "--parity" in options else made_up()

    found = verification(plan, run=functools.partial(run, (no_room,)))
    assert found.parity is None and "on the host" in found.why_no_parity
    assert verification(plan, run=functools.partial(run, (no_room, wrong))).parity.failures[-1] == wrong


def test_outcomes_survive_as_json():
    row = Row(comparison="as planned", kind="loss", name="1", bound=0.0, measured=0.5, bit_equal=True, passed=True)
    for outcome in (made_up(), RanOut(device="x", step=2, message="no"), Parity(rows=(row,), notes=("a",))):
        assert outcome_from_json(json.loads(json.dumps(outcome_to_json(outcome)))) == outcome


@pytest.mark.thorough
def test_the_error_of_a_failed_process_quotes_its_last_lines(reference):
    live = dataclasses.replace(planned(reference, None))
    live = dataclasses.replace(live, model=dataclasses.replace(live.model, reference=None))
    with pytest.raises(MeasurementError, match="live model"):
        verification(live, run=COUNTED)


@pytest.mark.thorough
def test_without_a_card_there_is_nothing_to_measure_on(reference):
    if torch.version.cuda is not None and torch.cuda.is_available():
        pytest.skip("there is a card")
    with pytest.raises(MeasurementError, match="no CUDA card"):
        Cuda().begin(MIB)
    with pytest.raises(MeasurementError, match="no CUDA card"):
        verification(planned(reference, None))


@pytest.mark.thorough
def test_the_command_says_whether_the_promise_is_kept(reference, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cards, "has_cuda_card", lambda: True)
    monkeypatch.setattr(verifying, "run_in_process", COUNTED)
    asked = [reference, "--vram", "3MiB", "--gpu", "bare", "--forbid", "offload", "--optimizer", "sgd", "--verify"]
    path = tmp_path / "plan.json"
    assert command.main([*asked, "--json", "--save", str(path)]) == command.FITS
    found = json.loads(capsys.readouterr().out)["verification"]
    assert found["kept"] and found["parity"]["passed"] and found["planned"]["device"] == CountingCpu().title()
    too_much = made_up(allocated_bytes=10**9)
    monkeypatch.setattr(
        verifying, "run_in_process", lambda plan, options: Parity(rows=()) if "--parity" in options else too_much
    )
    assert command.main([str(path), "--trust-reference", "--verify"]) == command.DOES_NOT_FIT
    reported = capsys.readouterr().out
    assert "the promise is BROKEN" in reported and "allocated" in reported and "in place of bare" in reported
    ran_out = RanOut(device="x", step=2, message="tried to allocate", place=PLACE)
    monkeypatch.setattr(verifying, "run_in_process", lambda plan, options: ran_out)
    assert command.main([str(path), "--trust-reference", "--verify"]) == command.DOES_NOT_FIT
    reported = capsys.readouterr().out
    assert "out of memory in step 2: tried to allocate" in reported and "at aten.mm, recompute of 3.fc" in reported


PLACE = {"op": "aten.mm", "phase": "recompute", "module": "3.fc", "alive": {"parameters": 100}}


def test_nothing_is_measured_where_nothing_fits(reference):
    plan = dataclasses.replace(planned(reference, None), fits=False)
    assert command._verify(plan, argparse.Namespace(verify=True), None) is None


def test_a_batch_with_weights_is_as_large_as_asked_for_and_holds_tokens(reference):
    roberta = str(TESTS / "fixtures" / "roberta")
    work = load_workload(roberta, batch_size=3, seq_len=7, optimizer="adamw", with_weights=True)
    assert not any(tensor.is_meta for tensor in (*work.model.parameters(), *work.batch.values()))
    tokens = work.batch["input_ids"]
    assert tokens.shape == (3, 7) and tokens.min() >= 0 and 1 < tokens.max() < work.model.config.vocab_size
    assert torch.isfinite(work.model(**work.batch).loss)
    resized = load_workload(reference, batch_size=5, seq_len=None, optimizer="sgd", with_weights=True)
    assert resized.batch[0].shape == (5, 64)
