"""The speed driver: its search for the largest micro-batch, its rows, and a real step of each method."""

from __future__ import annotations

import dataclasses
import io
import time

import pytest
import torch
from rich.console import Console

from benchmarks import speed
from benchmarks.card import models, peer_run
from benchmarks.card.budgets import CASES, Case
from benchmarks.card.peer_run import WAYS
from benchmarks.promise import NoAnswerError, Settings
from tests.support.counting_device import CountingCpu

pytestmark = pytest.mark.slow

NET = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))

    def forward(self, x):
        return x + self.layers(x)

def net(batch_size=512):
    batch = (torch.randn(batch_size, 64), torch.randn(batch_size, 64))
    blocks = torch.nn.Sequential(*[Block() for _ in range(6)])
    return blocks, batch, lambda output, batch: torch.nn.functional.mse_loss(output, batch[1])
"""


def run(tmp_path, way: str, micro_batch: int, cap_bytes: int | None = None):
    (tmp_path / "net.py").write_text(NET)
    case = Case(name="net", reference=f"{tmp_path / 'net.py'}:net", batch_size=512)
    device = CountingCpu()
    try:
        return peer_run.run(case, way, micro_batch, device, cap_bytes=cap_bytes)
    finally:
        device.end()


@pytest.mark.thorough
def test_each_way_trains_the_same_and_checkpoints_or_micro_batches_take_less(tmp_path):
    plain = run(tmp_path, "baseline", 512)
    checkpointed = run(tmp_path, "gradient checkpointing", 512)
    halves = run(tmp_path, "baseline", 200)
    assert (
        plain["allocated_bytes"] > checkpointed["allocated_bytes"]
        and plain["allocated_bytes"] > halves["allocated_bytes"]
    )
    assert plain["losses"][0] > plain["losses"][-1]
    for other in (checkpointed, halves):
        assert other["losses"] == pytest.approx(plain["losses"], rel=1e-2) and other["step_ms"] > 0


def test_running_out_of_memory_is_an_answer(tmp_path):
    assert "made up: tried to allocate" in run(tmp_path, "baseline", 512, cap_bytes=100)["out_of_memory"]


def test_the_blocks_of_a_model_without_a_switch_are_found():
    with torch.device("meta"):
        unet, resnet = (peer_run.repeated_blocks(build()[0]) for build in (models.unet, models.resnet50))
    assert {type(block).__name__ for block in unet} == {"ResidualBlock"}
    assert len(resnet) == 16 and {type(block).__name__ for block in resnet} == {"Bottleneck"}


def settings(tmp_path) -> Settings:
    return Settings(out=tmp_path, gpu="h100", until=time.monotonic() + 600, workers=1, about={"torch": "2"})


def survives(most: int):
    def run_peer(case, way, micro_batch, cap_bytes):
        if micro_batch > most:
            return {"out_of_memory": "tried to allocate"}
        return {"step_ms": 10.0, "allocated_bytes": 1}

    return run_peer


def test_the_largest_micro_batch_that_survives_is_looked_for_from_above():
    case = CASES["roberta_84m"]
    found = speed.largest_that_fits(case, "baseline", 1, survives(20))
    assert found["micro_batch"] == 16 and found["ran_out_at"] == [64, 32] and found["step_ms"] == 10.0
    none = speed.largest_that_fits(case, "baseline", 1, survives(0))
    assert none["step_ms"] is None and none["ran_out_at"][-1] == 1


def test_halves_of_an_odd_batch_are_rounded_up():
    case = dataclasses.replace(CASES["roberta_84m"], batch_size=25)
    found = speed.largest_that_fits(case, "baseline", 1, survives(6))
    assert found["micro_batch"] == 4 and found["ran_out_at"] == [25, 13, 7]


def test_the_allocator_gets_the_cap_less_the_context(tmp_path):
    asked = []

    def run_peer(case, way, micro_batch, cap_bytes):
        asked.append(cap_bytes)
        return {"step_ms": 10.0}

    wanted = [one for one in speed.asked(["unet"]) if one.way == "baseline"]
    list(speed.run_all(wanted, settings(tmp_path), 1 << 29, None, run_peer))
    assert asked == [(3 << 30) - (1 << 29)]


def test_a_table_says_how_much_slower_each_way_is(tmp_path):
    wanted = [one for one in speed.asked(["unet"])]
    assert [one.way for one in wanted] == [speed.OURS, *WAYS]

    def run_peer(case, way, micro_batch, cap_bytes):
        if way == "gradient checkpointing":
            raise NoAnswerError("the driver is gone")
        return survives(0 if "0.3" in way else 8)(case, way, micro_batch, cap_bytes)

    rows = list(speed.run_all(wanted, settings(tmp_path), 1 << 29, lambda one, _: {"step_ms": 8.0}, run_peer))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(speed.table(rows))
    text = console.export_text()
    assert "10.0 (1.25), micro-batch 8" in text and "out of memory" in text and "failed" in text
    assert rows[1]["error"] == "the driver is gone" and all(row["torch"] == "2" for row in rows)
