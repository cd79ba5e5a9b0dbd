"""Planning in a process of its own: when it is needed, what is sent there, and that nothing else changes."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pickle
import threading

import pytest
import torch

import planner
from planner.errors import PlannerError, RehearsalProcessError
from planner.plan_types.fingerprint import fingerprint
from planner.progress import Watch
from planner.rewrite import certify
from planner.safe_process import in_safe_process
from planner.spawned import CannotBeSentError, NewProcess
from planner.spawned.structure import send
from planner.virtual_gpu.forked_process import BackwardInForkError


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(300, 300), torch.nn.Linear(300, 300)
        self.second.weight = self.first.weight
        torch.nn.utils.parametrizations.weight_norm(self.second, "bias", dim=0)
        self.register_buffer("ids", torch.arange(10))
        self.register_buffer("large", torch.zeros(300, 300))
        self.scale = lambda x: 2 * x
        self.first.weight.note = "an attribute"
        self.first.bias.register_hook(lambda gradient: gradient)
        self.first.bias.requires_grad_(False).requires_grad_(True)

    def forward(self, x, target):
        return torch.nn.functional.mse_loss(self.second(self.scale(self.first(x))), target)


def there(value):
    return pickle.loads(send(value))


def test_a_model_arrives_without_its_weights_but_with_everything_that_a_rehearsal_reads():
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    sent = send((model, optimizer))
    copy, same = pickle.loads(sent)
    assert len(sent) < 20_000 < model.first.weight.nbytes
    assert fingerprint(copy) == fingerprint(model)
    assert all(parameter.is_meta for parameter in copy.parameters())
    assert copy.second.weight is copy.first.weight is same.param_groups[0]["params"][0]
    assert copy.first.weight.note == "an attribute"
    assert copy.ids.tolist() == list(range(10))
    assert copy.large.device.type == "cpu" and copy.scale(3) == 6
    assert len(copy.first.bias._backward_hooks) == 1
    assert same.defaults["lr"] == 0.5


class TwoPartsError(PlannerError):
    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)  # pickle calls the class with this argument only


def fail_with_two_parts(send) -> None:
    raise TwoPartsError("a text", 2)


def test_an_answer_that_cannot_be_read_is_an_error():
    with pytest.raises(RehearsalProcessError, match="the answer of the new process cannot be read: TypeError"):
        NewProcess(fail_with_two_parts).wait(Watch(seconds=60).check, lambda kind, value: None)


@pytest.mark.parametrize("kind", ["strided", "slice", "sparse", "grad"])
def test_tensors_of_a_batch_keep_their_values(kind):
    data = torch.arange(1_000_000)
    tensor = {
        "strided": torch.tensor([[3, 1], [2, 0]]).t(),
        "slice": data[:4],
        "sparse": torch.eye(3).to_sparse(),
        "grad": torch.ones(2, requires_grad=True),
    }[kind]
    sent = send(tensor)
    copy = pickle.loads(sent)
    assert len(sent) < 4_000
    assert torch.equal(copy.to_dense(), tensor.to_dense()) and copy.requires_grad == tensor.requires_grad


def test_what_cannot_be_sent_is_named():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].lock = threading.Lock()
    with pytest.raises(CannotBeSentError, match=r"'0\.lock' of type lock \(TypeError: cannot pickle '_thread.lock'"):
        send(model)


@pytest.fixture
def locked(tmp_path, monkeypatch):
    """A module of the user's with a loss that needs a lock, which a thread of this process holds."""
    text = (
        "import threading\nLOCK = threading.Lock()\ndef loss(output, batch):\n    with LOCK:\n        return output\n"
    )
    (tmp_path / "locked_loss.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    module, done = importlib.import_module("locked_loss"), threading.Event()
    held = threading.Event()

    def hold() -> None:
        with module.LOCK:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    yield module.loss
    done.set()
    thread.join()


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.zeros(8, 300), "target": torch.zeros(8, 300)}


@pytest.mark.slow
@pytest.mark.thorough
def test_while_a_thread_holds_a_lock_planning_runs_in_a_process_of_its_own(locked, monkeypatch):
    stages: list[str] = []
    options = {"vram": None, "gpu": "bare", "time_limit": "60s"}
    forked = planner.plan(Tied(), batch(), **options)
    monkeypatch.setenv("PLANNER_START_METHOD", "auto")
    spawned = planner.plan(
        Tied(), batch(), loss_fn=locked, progress=lambda record: stages.append(record.stage), **options
    )
    assert stages[0] == "starting a process for planning" and "rehearsing the step" in stages
    assert spawned.baseline.breakdown == forked.baseline.breakdown
    assert spawned.model == dataclasses.replace(forked.model)


@pytest.mark.slow
def test_with_cuda_initialized_the_errors_of_the_process_arrive(monkeypatch):
    plan = planner.plan(Tied(), batch(), vram=None, gpu="bare")
    monkeypatch.setenv("PLANNER_START_METHOD", "auto")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(planner.errors.PlanFileError, match="the plan is for batches of 8 samples, this one has 4"):
        certify(plan, Tied(), {name: tensor[:4] for name, tensor in batch().items()})


def test_a_model_that_cannot_be_sent_is_planned_in_a_fork_unless_cuda_is_initialized(monkeypatch):
    model = Tied()
    model.lock = threading.Lock()
    stages: list[str] = []
    asked = {"vram": None, "gpu": "bare", "progress": lambda record: stages.append(record.stage)}
    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait)
    thread.start()
    monkeypatch.setenv("PLANNER_START_METHOD", "auto")
    try:
        assert planner.plan(model, batch(), **asked).certified
    finally:
        waiting.set()
        thread.join()
    assert "rehearsing in forks of a process with" in stages[0]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(
        RehearsalProcessError,
        match=r"because CUDA is initialized in this process, and 'model.lock' of type lock .* cannot be sent there: ",
    ) as failure:
        planner.plan(model, batch(), **asked)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("reason", ["backward", "asked for"])
def test_other_reasons_for_a_process_of_its_own(monkeypatch, reason):
    def refused(watch):
        raise BackwardInForkError("a backward has run in this process")

    monkeypatch.setenv("PLANNER_START_METHOD", "auto" if reason == "backward" else "spawn")
    monkeypatch.setattr("planner.safe_process.other_threads", list)
    monkeypatch.setattr("planner.safe_process._spawned", lambda function, watch: "spawned")
    assert in_safe_process(refused if reason == "backward" else lambda watch: "forked", Watch()) == "spawned"


@pytest.mark.slow
@pytest.mark.thorough
def test_on_a_system_without_fork_each_rehearsal_gets_a_new_process(monkeypatch):
    options = {"vram": None, "gpu": "bare", "loss_fn": lambda output, batch: 2 * output}
    forked = planner.plan(Tied(), batch(), **options)
    monkeypatch.delattr(os, "fork")
    monkeypatch.setenv("PLANNER_START_METHOD", "auto")
    assert planner.plan(Tied(), batch(), **options).baseline == forked.baseline
    model = torch.nn.Linear(2, 2)
    model.lock = threading.Lock()
    with pytest.raises(
        RehearsalProcessError, match=r"cannot fork one, and 'model.lock' of type lock .*: remove it from"
    ):
        planner.plan(model, (torch.zeros(2, 2),), vram=None, gpu="bare", loss_fn=len)
