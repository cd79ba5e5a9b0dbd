"""`plan diff` says what differs between two saved plans, and its exit code says whether anything does."""

from __future__ import annotations

import dataclasses
import json

import pytest

from planner.cli import main
from planner.plan_types.decisions import Accumulation
from planner.plan_types.recompute_decisions import Checkpoint
from tests.plan_types.test_plan import example

pytestmark = pytest.mark.no_torch


@pytest.fixture
def diff(tmp_path, capsys, monkeypatch):
    """A function that saves two plans, compares them, and returns the exit code and what the command prints."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(first, second, *options):
        first.save(tmp_path / "a.json")
        second.save(tmp_path / "b.json")
        code = main(["diff", str(tmp_path / "a.json"), str(tmp_path / "b.json"), *options])
        return code, capsys.readouterr().out

    return run


def rows(text: str) -> list[str]:
    """Returns the lines of the answer, and the cells of a table separated by single spaces."""
    return [" ".join(line.replace("\u2502", " ").split()) for line in text.splitlines()]


def test_equal_plans_are_equal_whatever_time_planning_took(diff):
    assert diff(example(seconds=1.0), example(seconds=2.0)) == (0, "the plans are equal\n")
    code, text = diff(example(), example(), "--json")
    assert (code, json.loads(text)) == (0, {"equal": True, "changes": []})


@pytest.mark.parametrize(
    ("setting", "value", "row"),
    [
        ("cudnn_benchmark", True, "cudnn.benchmark - on"),
        ("alloc_conf", "expandable_segments:True", "allocator options - expandable_segments:True"),
    ],
    ids=["cudnn_benchmark", "alloc_conf"],
)
def test_plans_for_other_settings_of_the_process_are_not_equal(setting, value, row, diff):
    first = example(cudnn_benchmark=False, alloc_conf="")
    code, text = diff(first, dataclasses.replace(first, **{setting: value}))
    assert code == 1 and row in rows(text)


def test_sizes_facts_decisions_and_other_parts_that_differ_are_listed(diff):
    first = example(Checkpoint(modules=("a",)), vram_bytes=5 << 20)
    peak = dataclasses.replace(first.peak, total_bytes=3 << 20, breakdown={"gradients": 1 << 20}, step_ns=3_000_000)
    second = dataclasses.replace(
        first,
        peak=peak,
        decisions=(Accumulation(micro_batch_size=1, micro_batches=2),),
        vram_bytes=6 << 20,
        notes=("x",),
    )
    code, text = diff(first, second)
    lines = rows(text)
    assert code == 1
    for row in (
        "budget 5.0 MiB 6.0 MiB",
        "total of the plan 3 B 3.0 MiB +3.0 MiB",
        "gradients at the peak 0 B 1.0 MiB +1.0 MiB",
        "optimizer state at the peak 3 B 0 B -3 B",
        "step time of the plan 0.0 ms 3.0 ms 2000.00 x",
        "- activation checkpointing: a",
        "+ gradient accumulation: 2 micro-batches of 1",
        "also different: notes (--json shows them)",
    ):
        assert row in lines
    assert not [line for line in lines if line.startswith(("card", "model", "total of the baseline"))]


def test_json_has_each_field_that_differs(diff):
    first = example()
    second = dataclasses.replace(first, workload=dataclasses.replace(first.workload, batch_size=4))
    code, text = diff(first, second, "--json")
    changes = [{"field": "workload.batch_size", "first": 2, "second": 4}]
    assert (code, json.loads(text)) == (1, {"equal": False, "changes": changes})


def test_files_that_cannot_be_compared_are_refused(tmp_path, capsys):
    example().save(tmp_path / "a.json")
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "gone.json")]) == 2
    assert "gone.json' cannot be read" in capsys.readouterr().err
    assert main(["diff", str(tmp_path / "a.json")]) == 2
    assert "second.json; see plan --help" in capsys.readouterr().err
