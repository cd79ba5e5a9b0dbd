"""Plans for a user's loop that accumulates gradients: they exist before the step, which adds to them."""

from __future__ import annotations

import json

import pytest
import torch

import planner
from planner.cli import main
from planner.errors import DecisionError, WorkloadError
from planner.plan_types.decisions import StepInBackward
from planner.plan_types.plan import Plan
from planner.recording.rehearsal import Rehearsal
from planner.rewrite import certify
from planner.virtual_gpu.backend import Target
from planner.workload import cards

pytestmark = pytest.mark.slow

MODEL = """
import torch

def build(batch_size=64):
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(4)))
    return model, (torch.zeros(batch_size, 64), torch.zeros(batch_size, 64)), loss

def loss(output, batch):
    return torch.nn.functional.mse_loss(output, batch[-1])
"""


class Words(torch.nn.Module):
    """A model with tied weights, and a layer that no batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(400, 32)
        layers = [torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(3)]
        self.layers = torch.nn.Sequential(*layers)
        self.unused = torch.nn.Linear(300, 300)
        self.head = torch.nn.Linear(32, 400, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words):
        return self.head(self.layers(self.table(words)))


def words():
    batch = torch.zeros(24, 32, dtype=torch.int64), torch.zeros(24, 32, dtype=torch.int64)
    return (
        Words(),
        batch,
        lambda output, batch: torch.nn.functional.cross_entropy(output.flatten(0, 1), batch[-1].flatten()),
    )


def deep():
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(6)))
    batch = torch.zeros(512, 64), torch.zeros(512, 64)
    return model, batch, lambda output, batch: torch.nn.functional.mse_loss(output, batch[-1])


def planned(build, **options):
    model, batch, loss_fn = build()
    return planner.plan(model, batch, loss_fn=loss_fn, gpu="bare", gradients_alive=True, **options)


@pytest.mark.parametrize("build", [deep, words])
@pytest.mark.thorough
def test_what_is_promised_is_what_a_loop_that_accumulates_holds_at_its_peak(build):
    model, batch, loss_fn = build()
    called = batch[:-1]

    def prepare(model):
        optimizer = torch.optim.AdamW(model.parameters())

        def two_batches(batch):
            for _ in range(2):
                loss_fn(model(*batch[:-1]), batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        return two_batches, (optimizer,)

    loop = Rehearsal(
        model=model,
        batch=batch,
        batch_size=len(called[0]),
        prepare=prepare,
        target=Target(compute_capability=(8, 6)),
        micro_batch_sizes=(len(called[0]),),
        steps=2,
        primed=False,
        what_if=False,
    )
    found = planned(build, vram=None).baseline
    assert found.total_bytes == int(loop.start().result().live_bytes().max())
    assert found.total_bytes > planner.plan(model, batch, loss_fn=loss_fn, gpu="bare", vram=None).baseline.total_bytes


@pytest.mark.parametrize("build", [deep, words])
@pytest.mark.parametrize("share", [0.75])
@pytest.mark.thorough
def test_promise_and_certificate_are_the_same_to_the_byte(build, share):
    vram = int(share * planned(build, vram=None).baseline.total_bytes)
    plan = planned(build, vram=vram)
    model, batch, loss_fn = build()
    again = certify(plan, model, batch, loss_fn=loss_fn)
    assert plan.fits and plan.decisions
    assert plan.solver.promised_bytes == plan.solver.certified_bytes == again.certified_bytes
    assert again.footprint == plan.peak


@pytest.mark.parametrize("only", ["optimizer", "checkpoint", "accumulation", "precision"])
@pytest.mark.thorough
def test_every_technique_keeps_its_promise_beside_them(only):
    plan = planned(words, vram=1, only=only)
    assert not plan.fits
    assert plan.solver.promised_bytes == plan.solver.certified_bytes
    gradients = sum(p.numel() * 4 for name, p in Words().named_parameters() if not name.startswith("unused"))
    assert plan.peak.breakdown["gradients"] >= gradients


@pytest.mark.thorough
def test_a_step_in_backward_is_not_offered_and_cannot_be_forced():
    plan = planned(deep, vram=1)
    assert plan.decision(StepInBackward) is None
    assert any(note.startswith("no step in backward: the gradients of several batches") for note in plan.notes)
    with pytest.raises(DecisionError, match="step-in-backward is forced, but the gradients of several batches"):
        planned(deep, vram="1GiB", force="step-in-backward")


def test_sparse_gradients_are_refused():
    def build():
        model = torch.nn.EmbeddingBag(10, 4, sparse=True)
        return model, (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 4)), deep()[2]

    with pytest.raises(WorkloadError, match="sparse=False"):
        planned(build, vram=None, optimizer="sgd")


@pytest.mark.thorough
def test_the_plan_says_so_and_is_checked_again_as_it_was_made(tmp_path, monkeypatch, capsys):
    (tmp_path / "net.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cards, "_present_card", lambda: None)
    arguments = ["net.py:build", "--gpu", "bare", "--vram", "320KiB", "--gradients-alive"]
    assert main([*arguments, "--save", "plan.json", "--emit", "step.py", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["workload"]["gradients_alive"] and Plan.from_json(data).to_json() | {"seconds": data["seconds"]} == data
    assert "--accumulating-loop" in (tmp_path / "step.py").read_text()
    assert main(["plan.json", "--trust-reference", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"] == data["plan"]
    main(["plan.json", "--trust-reference"])
    assert "gradients of earlier batches are in memory before the step" in " ".join(capsys.readouterr().out.split())
    assert main(["plan.json", "--trust-reference", "--gradients-alive"]) == 2
    assert main([*arguments, "--tradeoff", "--json"]) == 0
