"""`--report` and `--snapshot` as users call them."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from planner.cli import main
from planner.plan_types.sizes import format_size
from planner.snapshot import load, replay_history

pytestmark = pytest.mark.slow

MODEL = """
import torch

def build(batch_size=4096):
    layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(6)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(256, 4))
    return model, (torch.randn(batch_size, 256), torch.randn(batch_size, 4)), loss

def loss(output, batch):
    return torch.nn.functional.mse_loss(output, batch[-1])
"""
WORKLOAD = ("net.py:build", "--gpu", "rtx-3090", "--fidelity", "exact")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, capsys) -> tuple[int, dict, str]:
    code = main([*arguments, "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


def data_of(path: str) -> dict:
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', pathlib.Path(path).read_text(), re.S)
    return json.loads(block[1])


@pytest.mark.thorough
def test_the_files_of_a_plan_show_its_peaks(folder, capsys):
    techniques = ("--only", "accumulation", "--force", "accumulation")
    files = ("--report", "r.html", "--snapshot", "s.pickle")
    code, data, _ = run(*WORKLOAD, "--vram", "1GiB", *techniques, *files, capsys=capsys)
    assert code == 0 and data["decisions"]
    for name, key in (("s.pickle", "plan"), ("s.baseline.pickle", "baseline")):
        result = replay_history(load(name))
        assert result.is_equal
        assert result.simulated.peak_reserved_bytes == data[key]["reserved_bytes"]
        assert result.simulated.peak_allocated_bytes == data[key]["allocated_bytes"]
    text = pathlib.Path("r.html").read_text()
    assert f"Fits in 1.00 GiB: peak {format_size(data['plan']['total_bytes'])}" in text
    assert set(data_of("r.html")["recordings"]) == {"baseline", "plan"}


def test_without_a_budget_there_is_one_recording_and_one_snapshot(folder, capsys):
    for _ in range(2):  # files of their own kind are replaced
        code, _, _ = run(*WORKLOAD, "--report", "r.html", "--snapshot", "s.pickle", capsys=capsys)
        assert code == 0
    assert set(data_of("r.html")["recordings"]) == {"baseline"}
    assert sorted(path.name for path in folder.glob("*.pickle")) == ["s.pickle"]


def test_the_page_of_a_tradeoff_draws_the_front_and_the_plan_inside_the_budget(folder, capsys):
    arguments = (*WORKLOAD, "--tradeoff", "--seconds", "4", "--vram", "1GiB", "--report", "t.html")
    code, data, _ = run(*arguments, capsys=capsys)
    text = pathlib.Path("t.html").read_text()
    assert code == 0
    assert "<svg" in text and "Memory against step time" in text and "this plan" in text
    peak = data["points"][data["chosen"]]["plan"]["total_bytes"]
    assert f"Fits in 1.00 GiB: peak {format_size(peak)}" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "bare", "--snapshot", "s.pickle"), "--snapshot cannot be combined with --gpu bare"),
        (("--snapshot", "net.py"), "'net.py' exists and is not a memory snapshot"),
        (("--snapshot", "s.pickle", "--report", "s.baseline.pickle"), "name the same file"),
        (("--tradeoff", "--snapshot", "s.pickle"), "--snapshot cannot be combined with --tradeoff"),
    ],
)
def test_what_cannot_be_written_is_refused_before_planning(folder, capsys, arguments, message):
    code, data, _ = run("net.py:build", *arguments, capsys=capsys)
    assert code == 2
    assert message in data["error"]["message"]
    assert [path.name for path in folder.iterdir()] == ["net.py"]
