"""The blocks of each op: reading the allocator's events, and running the programs on the CPU and the meta device."""

from __future__ import annotations

import pytest
import torch

from benchmarks.card.op_blocks import judged, measured_blocks, run_program
from benchmarks.card.programs import NEEDS_A_CARD, PROGRAMS
from benchmarks.workspaces_gpu import rows_of, summary
from planner import profiles

H100 = profiles.load("h100")
ONE_OF_EACH_KIND = (
    "linear-768x3072-fp32",
    "layernorm-65537x64-bf16",
    "batchnorm2d-32x2048x7x7-fp32",
    "cross-entropy-32x1000-fp32",
    "attention-math-8x12x12x512x64-causal-bf16",
    "reduce-8192x768-over-0-float32",
    "embedding-50257x768-4096",
    "resnet-conv-64-64-3-1-56-fp32",
    "lstm-1x256-fp32",
    "optimizer-clip",
    "index-10000x256-1000",
    "order-64x128-float32",
    "products-heads-inside-bfloat16",
)


def test_blocks_are_distinguished_by_what_becomes_of_them():
    events = [
        ("alloc", 100, 1000),
        ("segment_alloc", 4096, 2 << 20),
        ("alloc", 200, 5000),
        ("alloc", 300, 600),
        ("free_requested", 200, 5000),
        ("free_completed", 200, 5000),
        ("alloc", 200, 700),
        ("free_completed", 200, 700),
        ("alloc", 400, 33),
        ("free_completed", 999, 1),
    ]
    found = measured_blocks(events, outputs=[300, 100])
    assert [block[:2] for block in found["blocks"]] == [
        [1000, "output 1"],
        [5000, "scratch"],
        [600, "output 0"],
        [700, "scratch"],
        [33, "kept"],
    ]
    assert found["scratch"] == [5000, 700] and found["scratch_peak_bytes"] == 5120
    assert not found["births_in_order"]


def test_scratch_that_is_alive_together_adds_up():
    events = [("alloc", 1, 512), ("alloc", 2, 1024), ("free_completed", 1, 512), ("free_completed", 2, 1024)]
    assert measured_blocks(events, outputs=[])["scratch_peak_bytes"] == 1536


def test_a_formula_is_right_if_its_blocks_are_the_measured_ones_rounded():
    assert judged([1000, 4], [1024, 512])["equal"] is True
    assert judged([1000], [])["equal"] is False
    assert judged([1000], None) == {"formula": None, "equal": None}


def test_events_around_an_op_are_its_own():
    """The events are invented: every op seems to take its result and one block of scratch memory."""
    events: list = []

    def program(device: str) -> torch.Tensor:
        return torch.ones(4, device=device).add(1)

    def read() -> list:
        events.extend([("alloc", 7, 999), ("free_completed", 7, 999)])
        return list(events)

    rows = run_program(program, "cpu", read, H100)
    assert [row["op"] for row in rows] == ["aten.ones.default", "aten.add.Tensor"]
    assert all(row["scratch"] == [999] and row["equal"] is False for row in rows)
    text = summary([{**row, "error": None} for row in rows])
    assert "aten.add.Tensor" in text and "'different': 2" in text


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_a_program_runs_and_its_ops_are_asked_for_their_formulas(name):
    rows = list(rows_of(name, "meta", None, H100, lambda: None))
    assert rows and all(row["error"] is None for row in rows)
    assert all("formula" in row and "equal" not in row for row in rows)


def test_a_formula_speaks_where_there_is_one():
    rows = list(rows_of("embedding-50257x768-4096", "meta", None, H100, lambda: None))
    (backward,) = [row for row in rows if row["op"] == "aten.embedding_dense_backward.default"]
    assert len(backward["formula"]) == 7 and backward["arguments"][0] == "float32[4096, 768]"


def test_a_program_that_fails_is_a_row_and_the_others_go_on():
    (row,) = rows_of("sizes-from-values", "meta", None, H100, lambda: None)
    assert row["op"] is None and row["error"] and {"sizes-from-values"} <= NEEDS_A_CARD <= set(PROGRAMS)
    assert "programs that failed: 1" in summary([row])
