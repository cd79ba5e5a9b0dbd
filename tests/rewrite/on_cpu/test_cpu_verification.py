"""`--verify` without a CUDA card: plans are trained with on the CPU, and compared with a rehearsal of that step."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner import pipeline
from planner.cli import command
from planner.errors import MeasurementError
from planner.plan_types.constraints import parse_constraints
from planner.plan_types.decisions import Accumulation, Optimizer, OptimizerKernel, Precision, StepInBackward
from planner.plan_types.plan import Plan
from planner.plan_types.recompute_decisions import Checkpoint, Offload
from planner.rewrite.on_cpu import verification as verifying
from planner.rewrite.on_cpu import worker
from planner.rewrite.on_cpu.prediction import predicted
from planner.rewrite.on_cpu.run import CpuRun, CpuStep, run_from_json
from planner.rewrite.on_cpu.verification import CpuVerification, cpu_verification
from planner.rewrite.parity.result import Parity, Row, failed
from planner.virtual_gpu.forked_process import run_in_child
from planner.workload import cards
from planner.workload.budget import card_and_budget
from planner.workload.workload import Workload, workload

pytestmark = pytest.mark.slow

NET = """
import torch

def net(batch_size=256):
    blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)) for _ in range(6)]
    batch = (torch.randn(batch_size, 64), torch.randn(batch_size, 64))
    return torch.nn.Sequential(*blocks), batch, lambda output, batch: torch.nn.functional.mse_loss(output, batch[1])
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("nets") / "net.py"
    path.write_text(NET)
    return f"{path}:net"


@pytest.fixture
def no_card(monkeypatch):
    monkeypatch.setattr(cards, "has_cuda_card", lambda: False)


class Words(nn.Module):
    """Attention, normalization and dropout over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(3))
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recurrent(nn.Module):
    """An LSTM, for which oneDNN has its own kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0])


class Pooled(nn.Module):
    """Pools over tokens after a normalization, whose gradient is therefore transposed.

    The peak is where the gradient of `second` is computed: the rehearsal must not copy the gradient there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(16)
        self.words, self.head = nn.Linear(16, 16), nn.Linear(16, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        x = self.norm(x + self.second(self.first(x)))
        return self.head(F.adaptive_avg_pool1d(x.transpose(1, 2), 1).flatten(1))


class NormedTokens(nn.Module):
    """Normalizes transposed tokens over the batch. The CPU's kernel returns a contiguous tensor, which `parts` copy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 50)
        self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        return self.head(sum(part(x).tanh().mean(1) for part in self.parts))


def convolutional() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), nn.GELU()]
    return nn.Sequential(nn.Sequential(*layers), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 50))


def classified(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), batch[1].flatten())


def work_of(name: str) -> Workload:
    torch.manual_seed(0)
    if name == "words":
        return workload(Words(), (torch.randint(50, (6, 12)), torch.randint(50, (6, 12))), loss_fn=classified)
    if name == "words, sgd":
        return dataclasses.replace(work_of("words"), optimizer="sgd")
    if name == "recurrent":
        return workload(Recurrent(), (torch.randn(6, 5, 16), torch.randint(50, (6, 5))), loss_fn=classified)
    if name == "group norm":
        layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU()) for _ in range(3)]
        model = nn.Sequential(nn.Conv2d(3, 8, 3), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 50))
        return workload(model, (torch.randn(6, 3, 24, 24), torch.randint(50, (6,))), loss_fn=classified)
    if name == "batch norm of tokens":
        return workload(NormedTokens(), (torch.randn(6, 40, 16), torch.randint(50, (6,))), loss_fn=classified)
    if name == "pooled":
        return workload(Pooled(), (torch.randn(6, 200, 16), torch.randint(50, (6,))), loss_fn=classified)
    batch = (torch.randn(6, 3, 12, 12), torch.randint(50, (6,)))
    return workload(convolutional(), batch, loss_fn=classified)


def plan_with(work: Workload, *decisions) -> Plan:
    """Return a plan with given decisions, which need not be a good one."""
    card, _ = card_and_budget("bare", None)
    allowed = parse_constraints(fidelity="exact", force=(), forbid=())
    return dataclasses.replace(
        pipeline.plan_workload(work, card, vram_bytes=None, constraints=allowed), decisions=decisions
    )


def run_here(name: str, *decisions) -> CpuRun:
    """Plan and train in a child process, whose allocations are not mixed with those of other tests."""
    plan = plan_with(work_of(name), *decisions)
    return run_in_child(lambda: worker.run(plan, lambda with_weights: work_of(name)))


@pytest.mark.parametrize(
    ("name", "decisions"),
    [
        ("words", ()),
        ("words", (Checkpoint(modules=("blocks.0", "blocks.1")),)),
        ("words", (Precision(dtype="bf16"),)),
        ("words", (Optimizer(),)),
        ("words", (OptimizerKernel(kernel="fused"),)),
        ("words, sgd", (OptimizerKernel(kernel="fused"),)),
        ("words", (Accumulation(micro_batch_size=2, micro_batches=3),)),
        ("words", (StepInBackward(),)),
        ("words", (Offload(modules=("blocks.1",), inputs_of=(), from_bytes=1),)),
        ("pooled", ()),
        ("batch norm of tokens", ()),
        ("group norm", (Precision(dtype="bf16"),)),
        ("recurrent", (Checkpoint(modules=("cells",)),)),
        ("convolutional", (Checkpoint(modules=("0",)),)),
        ("convolutional", (Precision(dtype="bf16"),)),
    ],
)
@pytest.mark.thorough_after(1)
def test_bytes_of_tensors_at_each_peak_are_those_of_the_rehearsal(name, decisions):
    run = run_here(name, *decisions)
    assert [step.measured_bytes for step in run.steps] == [step.predicted_bytes for step in run.steps]
    assert [step.why for step in run.steps] == [""] * worker.STEPS
    assert (run.parity is not None and run.parity.passed) if decisions else run.parity is None
    assert bool(run.notes) is (name == "recurrent")


@pytest.mark.thorough
def test_gradients_of_earlier_batches_are_alive_from_the_second_step_on():
    def load(with_weights: bool = True) -> Workload:
        return dataclasses.replace(work_of("words"), gradients_alive=True)

    plan = plan_with(load())
    first, *later = run_in_child(lambda: worker.run(plan, load)).steps
    gradients_bytes = sum(parameter.nbytes for parameter in work_of("words").model.parameters())
    assert first.predicted_bytes - first.measured_bytes == gradients_bytes
    assert all(step.measured_bytes == step.predicted_bytes > first.predicted_bytes for step in later)


@pytest.mark.thorough
def test_a_rehearsal_that_misses_a_tensor_is_found_out():
    """The first step has no optimizer state at its peak, so it is no prediction for the later ones."""
    work = work_of("words")
    prediction = run_in_child(lambda: predicted(work, ()))
    wrong = dataclasses.replace(prediction, later=prediction.first)
    peaks = run_in_child(lambda: worker._measured(plan_with(work), lambda with_weights: work_of("words"), wrong))
    assert peaks[0].tensor_bytes == wrong.first.tensor_bytes
    assert peaks[1].tensor_bytes > wrong.later.tensor_bytes


def test_a_plan_that_needs_more_than_the_free_memory_is_refused_with_the_size(monkeypatch):
    monkeypatch.setattr(worker, "free_bytes", lambda: 1 << 10)
    with pytest.raises(MeasurementError, match=r"needs about .* [KM]iB, but 1.0 KiB of memory are free") as error:
        worker.run(plan_with(work_of("words")), lambda with_weights: work_of("words"))
    assert "\n" not in str(error.value)


def test_the_free_memory_of_this_machine_is_known():
    assert 1 << 20 < worker.free_bytes() < 1 << 50


def made_up(measured_bytes: int = 1000, parity: Parity | None = None, why: str = "") -> CpuRun:
    step = CpuStep(predicted_bytes=1000, measured_bytes=measured_bytes, kernel_bytes=5, outside_bytes=8, why=why)
    return CpuRun(steps=(step, step), parity=parity, notes=("a note",))


SAME = Row(comparison="as planned", kind="loss", name="1", bound=0.0, measured=0.0, bit_equal=True, passed=True)


@pytest.mark.parametrize(
    ("measured_bytes", "rows", "kept"),
    [
        (1000, (SAME,), True),
        (1010, (SAME,), True),
        (1011, (SAME,), False),
        (900, (SAME,), True),
        (1000, (SAME, failed("as planned", "loss", "2", "is not finite")), False),
    ],
)
def test_it_is_kept_if_no_step_takes_more_and_training_is_the_same(measured_bytes, rows, kept):
    plan = plan_with(work_of("convolutional"))
    found = cpu_verification(plan, run=lambda plan: made_up(measured_bytes, Parity(rows=rows)))
    assert found.kept is kept
    assert found.to_json()["kept"] is kept and found.to_json()["parity"]["quantities"] == len(rows)


def test_runs_survive_as_json():
    for run in (made_up(), made_up(parity=Parity(rows=(SAME,), notes=("b",)))):
        assert run_from_json(json.loads(json.dumps(dataclasses.asdict(run)))) == run


@pytest.mark.thorough
def test_a_live_model_cannot_be_built_in_another_process():
    plan = plan_with(work_of("convolutional"))
    with pytest.raises(MeasurementError, match="live model"):
        cpu_verification(plan)


@pytest.mark.thorough
def test_the_command_trains_on_the_cpu_where_there_is_no_card(reference, no_card, capsys, monkeypatch, tmp_path):
    asked = [reference, "--vram", "1MiB", "--gpu", "bare", "--forbid", "offload", "--optimizer", "sgd", "--verify"]
    path = tmp_path / "plan.json"
    assert command.main([*asked, "--json", "--save", str(path)]) == command.FITS
    found = json.loads(capsys.readouterr().out)["verification"]
    assert found["device"] == "cpu" and found["kept"] and found["parity"]["passed"]
    assert [step["measured_bytes"] for step in found["steps"]] == [step["predicted_bytes"] for step in found["steps"]]
    monkeypatch.setattr(verifying, "run_in_process", lambda plan: made_up(2000, why="aten.mm +1000 B"))
    assert command.main([str(path), "--trust-reference", "--verify"]) == command.DOES_NOT_FIT
    reported = " ".join(capsys.readouterr().out.split())
    for words in (
        "no CUDA card here",
        "does NOT agree",
        "not measured: times",
        "step 1: aten.mm +1000 B",
        "+1,000",
        "a note",
    ):
        assert words in reported
    assert "not checked: that training" not in reported


def test_a_refusal_is_one_sentence_and_exit_code_2(reference, no_card, capsys, monkeypatch):
    def refuse(plan: Plan) -> CpuRun:
        raise MeasurementError("it needs about 3.00 TiB")

    monkeypatch.setattr(verifying, "run_in_process", refuse)
    assert command.main([reference, "--vram", "1GiB", "--verify"]) == command.COULD_NOT_RUN
    assert capsys.readouterr().err.endswith("plan: it needs about 3.00 TiB\n")


def test_without_decisions_training_is_not_compared():
    plan = plan_with(work_of("convolutional"))
    assert "baseline itself" in CpuVerification(plan=plan, ran=made_up()).to_json()["why_no_parity"]
