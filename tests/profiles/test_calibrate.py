"""Calibration: from measurements, made up here, to a profile that can be read back."""

from __future__ import annotations

import json
import sys
import types

import pytest

from planner import profiles
from planner.profiles import calibrate, process_memory
from planner.profiles.device import MIB, read

pytestmark = pytest.mark.no_torch


class MadeUpCard:
    """A card of round numbers."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self.asked: list[str] = []
        self._capability = capability

    def begin(self) -> None:
        self.asked.append("begin")

    def facts(self) -> calibrate.Facts:
        return calibrate.Facts(
            cuda_name="H100 80GB HBM3",
            compute_capability=self._capability,
            sm_count=132,
            max_threads_per_sm=2048,
            vram_bytes=84_943_044_608,
            driver="580.159.04",
            torch_version="2.11.0+cu130",
            cuda_version="13.0",
        )

    def after_stage(self, stage: str) -> tuple[int, str]:
        self.asked.append(stage)
        return 400 * MIB + 20 * MIB * len(self.asked), "nvml"

    def copy_seconds(self, size_bytes: int) -> float:
        return 2 * size_bytes / 3e12

    def product_seconds(self, dtype: str, width: int) -> float:
        return 2 * width**3 / {"fp32": 50e12, "fp64": 60e12, "tf32": 400e12, "fp16": 800e12, "bf16": 790e12}[dtype]

    def small_ops_seconds(self, count: int) -> float:
        return count * 4e-6

    def host_copy_seconds(self, size_bytes: int, *, back: bool) -> float:
        return size_bytes / (2.5e10 if back else 5e10)

    def workspace_bytes(self) -> int:
        return 33_562_624

    def allocator(self) -> str:
        return "native, expandable_segments:True"

    def new_segments(self, count: int, size_bytes: int) -> list[int]:
        return [(1 << 40) - number * size_bytes for number in range(count)]


def test_a_calibrated_profile_reads_back_as_measured(tmp_path, capsys):
    out = tmp_path / "my-card.toml"
    calibrate.main(MadeUpCard(), ["--out", str(out), "--json", str(tmp_path / "all.json")])
    card = read(out)
    assert card.name == "my-card" and card.title == "H100 SXM5 80 GB"
    assert card.source.startswith("calibrated 20") and "torch 2.11.0+cu130" in card.source and "580.159" in card.source
    assert card.context_bytes == 500 * MIB and "440 MiB after a first kernel" in card.context_source
    assert card.context_source.startswith("measured")
    assert card.launch_ns == 4000 and card.host_link_bytes_per_s == round(10**11 / 3)  # the mean time of both ways
    assert card.memory_bandwidth_bytes_per_s == 3 * 10**12
    assert card.flops_per_s["fp16"] == 800 * 10**12 and card.native_dtypes == ("bf16", "fp16")
    assert card.segment_addresses == "descending"
    assert json.loads((tmp_path / "all.json").read_text())["context_bytes"]["training step"] == 500 * MIB
    printed = capsys.readouterr()
    assert printed.out == out.read_text() and printed.err == f"written to {out}\n"
    assert "33_562_624 bytes; allocator: native, expandable_segments:True" in printed.out


def test_without_a_file_planning_finds_it_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PLANNER_DEVICES", str(tmp_path / "own"))
    calibrate.main(MadeUpCard(), [])
    found = profiles.matching("NVIDIA H100 80GB HBM3")
    assert found.name == str(tmp_path / "own" / "h100-80gb-hbm3.toml") and found.source.startswith("calibrated")


class SmallCard(MadeUpCard):
    """Without room for the large copy, or a product in bf16."""

    def copy_seconds(self, size_bytes: int) -> float:
        raise RuntimeError("CUDA out of memory\nand more")

    def product_seconds(self, dtype: str, width: int) -> float:
        if dtype == "bf16":
            raise RuntimeError("no kernel")
        return super().product_seconds(dtype, width)


def test_what_cannot_be_measured_is_reported_and_taken_from_the_datasheet(tmp_path, capsys):
    out = tmp_path / "small.toml"
    calibrate.main(SmallCard(), ["--out", str(out)])
    card, known = read(out), profiles.load("h100")
    assert card.memory_bandwidth_bytes_per_s == known.memory_bandwidth_bytes_per_s
    assert card.flops_per_s["bf16"] == known.flops_per_s["bf16"] and card.flops_per_s["fp16"] == 800 * 10**12
    assert "not measured (bandwidth: CUDA out of memory): as the datasheet says" in out.read_text()
    assert capsys.readouterr().err.splitlines()[1:] == [
        "not measured: bandwidth (CUDA out of memory)", "not measured: products in bf16 (no kernel)",
    ]  # fmt: skip


def test_the_context_is_measured_before_anything_else_and_grows_from_stage_to_stage():
    card = MadeUpCard()
    found = calibrate.calibrate(card)
    assert card.asked == ["begin", *calibrate.CONTEXT_STAGES]
    assert list(found.context_bytes.values()) == sorted(found.context_bytes.values())


@pytest.mark.parametrize(
    ("addresses", "order"),
    [([1, 2, 3, 4, 5, 6], "ascending"), ([9, 8, 7, 6, 5, 4, 5], "descending"), ([5, 6, 4, 7, 3, 8], "unknown")],
)
def test_most_new_segments_decide_which_way_the_driver_goes(monkeypatch, addresses, order):
    card = MadeUpCard()
    monkeypatch.setattr(card, "new_segments", lambda count, size_bytes: addresses)
    assert calibrate.calibrate(card).segment_addresses == order


def test_bf16_is_not_native_before_8_however_fast_it_seems():
    found = calibrate.calibrate(MadeUpCard(capability=(7, 5)))
    assert 'native_dtypes = ["fp16"]' in calibrate.as_toml(found, "a card")


def nvml_with(processes: list, used: int = 900 * MIB) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(used=used),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: processes,
        nvmlSystemGetDriverVersion=lambda: b"580.1",
    )


@pytest.mark.parametrize(
    ("processes", "size", "source"),
    [
        ([types.SimpleNamespace(pid=7, usedGpuMemory=600 * MIB)], 600 * MIB, "nvml"),
        ([types.SimpleNamespace(pid=7, usedGpuMemory=None)], 890 * MIB, "difference"),
        ([types.SimpleNamespace(pid=8, usedGpuMemory=5)], 890 * MIB, "difference"),
    ],
)
def test_a_process_that_the_driver_does_not_list_is_measured_by_difference(monkeypatch, processes, size, source):
    monkeypatch.setitem(sys.modules, "pynvml", nvml_with(processes))
    found = process_memory.process_memory(used_before_bytes=10 * MIB, pid=7)
    assert (found.process_bytes, found.source) == (size, source)
    assert process_memory.driver_version() == "580.1"


def test_without_the_binding_nvidia_smi_is_asked(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    answers = {"--query-compute-apps=pid,used_memory": "7, 612\n9, 5\n", "--query-gpu=memory.used": "700\n"}
    monkeypatch.setattr(process_memory, "_smi", lambda query: answers[query])
    found = process_memory.process_memory(used_before_bytes=0, pid=7)
    assert (found.process_bytes, found.source) == (612 * MIB, "nvidia-smi")
    assert process_memory.process_memory(used_before_bytes=100 * MIB, pid=1).process_bytes == 600 * MIB
