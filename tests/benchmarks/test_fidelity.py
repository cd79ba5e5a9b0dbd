"""The measurements on a card, tested without one: everything except the CUDA calls."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
import time

import pytest

from benchmarks import fidelity, ledger
from benchmarks.card import history, measure_case, results, run_case
from benchmarks.card.by_op import differing
from benchmarks.card.cases import CASES
from benchmarks.card.comparing import compare_steps
from benchmarks.card.measuring import STEPS, measure
from benchmarks.card.predicting import predict
from benchmarks.card.processes import Processes
from planner import profiles
from planner.allocator.replay import replay
from planner.allocator.settings import AllocatorSettings
from planner.plan_types.recompute_decisions import Checkpoint
from tests.support.measuring import CONTEXT_BYTES, MIB, TINY, FakeDevice, snapshot_of

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
H100 = profiles.load("h100")


@pytest.fixture(scope="module")
def tiny():
    return predict(TINY["tiny"], H100)


def recorded_as(prediction) -> tuple[list[int], list[int]]:
    """Returns the rehearsed stream as if a card had recorded it, with the ends of the set-up and of the steps."""
    return list(prediction.sizes), [5, prediction.second_step_event, len(prediction.sizes)]


# ---- cases ----------------------------------------------------------------------------------------------------


def test_there_are_at_least_forty_cases_and_the_core_ones_come_first():
    core = [case.core for case in CASES.values()]
    assert len(CASES) >= 40 and sum(core) == 8 and core == sorted(core, reverse=True)
    assert sum(case.keep_history for case in CASES.values()) == 3


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.checkpoint is not None])
@pytest.mark.thorough_after(5)
def test_a_case_with_checkpoints_names_modules_that_the_model_has(name):
    work = CASES[name].workload("meta")
    checkpoint = next(decision for decision in CASES[name].decisions(work) if isinstance(decision, Checkpoint))
    assert len(checkpoint.modules) >= 4


# ---- measuring ------------------------------------------------------------------------------------------------


def test_three_steps_are_recorded_and_later_ones_are_only_timed():
    case = TINY["tiny"]
    device = FakeDevice([[1024, 2048], [4096, -4096], [512, -512], [1536], [10**6]])
    found = measure(case, case.workload("cpu"), device)
    assert device.began == 1 and STEPS == 3
    assert found.step_ends == [2, 4, 6, 7]
    assert history.signed(found.history) == [1024, 2048, 4096, -4096, 512, -512, 1536]
    assert found.context_bytes == CONTEXT_BYTES and found.step_ms == 2.0
    assert 0 < found.loss < 10 and found.scale is None
    assert found.taken_by_op["aten.addmm.default"] == 2 * 512


def test_a_row_is_what_the_ledger_takes(tiny, tmp_path):
    case = TINY["tiny"]
    measured = measure(case, case.workload("cpu"), FakeDevice([[1024, 2048], [4096, -4096], [512, -512]]))
    card = {"cuda_name": "H100", "vram_bytes": 1, "driver": "580", "cudnn": 91900, "cuda": "13.0"}
    about = {**run_case.facts(case, case.workload("meta"), H100), **run_case.software(), **card}
    found = run_case.answer(case, about, tiny, measured, time.perf_counter())
    row = json.loads(json.dumps(dataclasses.asdict(found)))["row"]
    assert row["measured"]["total_bytes"] == 20 * MIB + CONTEXT_BYTES
    assert row["errors"]["reserved_bytes"] == pytest.approx(tiny.reserved_bytes / (20 * MIB) - 1, abs=1e-6)
    assert row["replayed"] == {"allocated_bytes": 1024 + 2048 + 4096, "reserved_bytes": 2 * MIB}
    assert "aten.addmm.default" in row["by_op"]
    results.append(tmp_path / "fidelity.jsonl", row)
    results.append(tmp_path / "fidelity.jsonl", {"case": "x", "card": "h100", "error": "it broke"})
    for _ in range(2):
        said = ledger.take_over(tmp_path / "fidelity.jsonl", tmp_path / "ledger")
    (kept,) = results.rows(tmp_path / "ledger" / "h100.jsonl")
    assert said == ["left out: x: it broke"] and "by_op" not in kept
    assert _ledger_test().problems(kept) == []


def _ledger_test():
    import importlib.util

    spec = importlib.util.spec_from_file_location("ledger_test", ROOT / "tests/profiles/test_ledger.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- processes ------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_measurements(monkeypatch):
    script = str(ROOT / "tests/support/measuring.py")
    monkeypatch.setattr(run_case, "MEASURE", (sys.executable, script))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.thorough
def test_a_case_is_rehearsed_here_and_measured_in_another_process(fake_measurements, tmp_path):
    found = run_case.run(TINY["tiny"], H100, lock=tmp_path / "lock", predict_only=False)
    assert found.row["error"] is None
    assert found.sizes == [1024, 2048, 4096, -4096, 512, -512, 512, -512] and found.step_ends == [2, 4, 6, 8]
    assert found.history["events"][0][0] == "segment_alloc"


@pytest.mark.thorough
def test_where_micro_batches_are_left_out_of_the_rehearsal_the_streams_are_not_compared(fake_measurements, tmp_path):
    found = run_case.run(TINY["tiny-accumulate4"], H100, lock=tmp_path / "lock", predict_only=False)
    assert found.row["stream"]["matched_share"] is None and "by design" in found.row["stream"]["why"]
    assert "tiny-accumulate4" in fidelity.line(found.row)


@pytest.mark.thorough
def test_what_the_measuring_process_said_last_is_the_error(fake_measurements, tmp_path):
    broken = dataclasses.replace(TINY["tiny"], name="broken")
    with pytest.raises(run_case.MeasurementError, match="CUDA error: simulated"):
        run_case.run(broken, H100, lock=tmp_path / "lock", predict_only=False)


def test_a_process_that_nobody_asks_to_measure_ends_without_touching_the_card(monkeypatch, tmp_path):
    monkeypatch.setitem(CASES, "tiny", TINY["tiny"])
    monkeypatch.setattr(measure_case.sys, "stdin", (tmp_path / "empty").open("a+"))
    device = FakeDevice([[512]])
    assert measure_case.main("tiny", tmp_path / "result", device) == 3 and device.began == 0


@pytest.mark.thorough
def test_without_a_card_the_command_predicts_and_goes_on_where_it_stopped(tmp_path):
    command = [sys.executable, "-m", "benchmarks.fidelity", "--out", str(tmp_path), "--predict-only", "--gpu", "h100"]
    command += ["--cases", "mlp-batchnorm-bf16"]
    first, second = (subprocess.run(command, cwd=ROOT, capture_output=True, text=True) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr
    assert "1 of 1 cases to do" in first.stdout and "0 of 1 cases to do" in second.stdout
    (row,) = results.rows(tmp_path / "predicted.jsonl")
    assert row["promised"]["allocated_bytes"] > 0 and row["error"] is None


@pytest.mark.parametrize("arguments", [["DIR"], []])
def test_the_script_refuses_a_machine_without_a_card(arguments, tmp_path):
    arguments = [str(tmp_path / "out") for _ in arguments]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
    ran = subprocess.run(
        ["bash", str(ROOT / "benchmarks/gpu.sh"), *arguments], env=environment, capture_output=True, text=True
    )
    if ran.returncode == 0:
        pytest.skip("a card is here")
    assert ran.returncode == 2 and ("no CUDA card" in ran.stderr or "usage" in ran.stderr)


# ---- rows and files -------------------------------------------------------------------------------------------


def settings_for(folder: pathlib.Path, **changes) -> fidelity.Settings:
    made = fidelity.Settings(
        out=folder, gpu="h100", predict_only=False, until=time.monotonic() + 60, case_seconds=5, workers=2
    )
    return dataclasses.replace(made, **changes)


def test_rows_streams_and_histories_are_written_as_cases_end(tmp_path):
    def run(name, settings, folder):
        if name == "bad":
            return fidelity.failed(name, "it broke")
        whole = {"settings": {}, "segments_at_end": [], "events": []} if name == "a" else None
        return {"row": {"case": name, "error": None}, "step_ends": [0, 1], "sizes": [512, -512], "history": whole}

    rows = list(fidelity.run_cases(["a", "bad", "b"], settings_for(tmp_path), run))
    assert results.rows(tmp_path / "fidelity.jsonl") == rows and len(rows) == 3
    assert sorted(entry["case"] for entry in history.read_streams(tmp_path / "streams.jsonl.gz")) == ["a", "b"]
    assert [path.name for path in (tmp_path / "histories").iterdir()] == ["a.json.gz"]
    assert results.still_to_do(["new", "a", "bad", "b"], rows, "case") == ["new", "bad"]
    assert fidelity.line(rows[[row["case"] for row in rows].index("bad")]).endswith("it broke")


def test_no_case_is_begun_when_the_time_is_over(tmp_path):
    late = settings_for(tmp_path, until=time.monotonic() - 1)
    assert list(fidelity.run_cases(["a"], late, lambda *_: pytest.fail("begun"))) == []


def test_a_case_that_takes_too_long_is_ended_and_says_so(tmp_path):
    processes = Processes()
    with (tmp_path / "output").open("wb") as output:
        assert processes.run(["sleep", "30"], output=output, seconds=0.2) is None
        assert processes.run(["true"], output=output, seconds=20) == 0


def test_a_line_that_was_cut_short_is_measured_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    results.append(path, {"case": "a", "error": None})
    with path.open("a") as file:
        file.write('{"case": "b", "err')
    assert results.rows(path) == [{"case": "a", "error": None}]
    results.append(path, {"case": "b", "error": None})
    assert results.done(results.rows(path), "case") == {"a", "b"}


def test_a_history_holds_what_a_snapshot_says_and_replays(tmp_path):
    made = history.history_of(snapshot_of([3 * MIB, 700, -700, MIB, -3 * MIB]))
    history.write_history(tmp_path / "x.json.gz", made)
    assert made["settings"] == {"expandable_segments": False}
    assert made["segments_at_end"][0][:5] == [4096, 2048 * MIB, "large", 0, False]
    assert [event[0] for event in made["events"]][:4] == ["segment_alloc", "alloc", "alloc", "free_requested"]
    assert all(len(event) == 5 for event in made["events"])
    assert history.signed(made) == [3 * MIB, 1024, -1024, MIB, -3 * MIB]
    outcome = replay(history.numbered(made), AllocatorSettings(), None)
    assert outcome.peak_allocated_bytes == 4 * MIB


# ---- comparing ------------------------------------------------------------------------------------------------


def test_a_stream_that_was_rehearsed_exactly_matches_wholly(tiny):
    found = compare_steps(*recorded_as(tiny), tiny)
    assert found.matched_share == 1.0 and found.differences == []
    assert found.missing_bytes == found.surplus_bytes == 0


@pytest.mark.parametrize("step", [0, 1])
def test_scratch_memory_that_was_not_rehearsed_is_counted_against_its_op(tiny, step):
    sizes, ends = recorded_as(tiny)
    at = next(
        place
        for place, where in enumerate(tiny.places)
        if where.op == "aten.addmm.default" and where.step == step and tiny.sizes[place] > 0
    )
    sizes[at + 1 : at + 1] = [7 * MIB, -7 * MIB]
    ends = [ends[0], ends[1] + 2 * (step == 0), ends[2] + 2]
    found = compare_steps(sizes, ends, tiny)
    assert found.missing_by_op == {"aten.addmm.default": 7 * MIB} and found.surplus_bytes == 0
    assert found.differences[0]["recorded"] == [7 * MIB, -7 * MIB]
    assert f"step {step}" in found.differences[0]["after"]


def test_what_was_rehearsed_and_not_recorded_is_surplus_of_its_op(tiny):
    sizes, ends = recorded_as(tiny)
    at = next(
        place
        for place, where in enumerate(tiny.places)
        if where.op == "aten.threshold_backward.default" and where.step == 1 and tiny.sizes[place] > 0
    )
    taken = sizes.pop(at)
    found = compare_steps(sizes, [ends[0], ends[1], ends[2] - 1], tiny)
    assert found.surplus_by_op == {"aten.threshold_backward.default": taken}


def test_ops_that_took_other_bytes_are_listed_by_the_size_of_the_difference():
    assert differing({"a": 5, "b": 9, "c": 1}, {"a": 5, "b": 1, "d": 3}) == {"b": [9, 1], "d": [0, 3], "c": [1, 0]}
