"""The second step of a rehearsal copies the gradients of the first one, unless it would compute them differently.

`test_truth_cpu.py` compares such rehearsals with real runs of two steps.
"""

from __future__ import annotations

import random

import pytest
import torch

from planner import profiles
from planner.errors import PlannerError
from planner.pipeline import record_step
from planner.plan_types.decisions import Accumulation, Precision
from planner.recording.repeats.second_step import _Gradients
from planner.workload.workload import workload
from tests.support.truth import CASES, deep, mean_square

pytestmark = pytest.mark.usefixtures("as_library")

BATCH = (torch.randn(6, 24), torch.randn(6, 8))
CARD = profiles.bare()


def recorded(model, decisions=(), *, loss_fn=mean_square, batch=BATCH, **options):
    return record_step(workload(model, batch, loss_fn=loss_fn, **options), CARD, decisions)


@pytest.fixture
def as_library(monkeypatch):
    """Treats the models of this file as models of a library, whose second step may get copied gradients."""
    monkeypatch.setattr("planner.rewrite.rehearse.runs_own_code", lambda workload: False)


@pytest.fixture
def computed_twice(monkeypatch):
    """Returns a function that records a step whose second gradients are computed, too."""

    def recorded_twice(*args, **options):
        with monkeypatch.context() as patches:
            patches.setattr(_Gradients, "can_be_repeated", lambda self, state: False)
            return recorded(*args, **options)

    return recorded_twice


@pytest.fixture
def refuse_repeating(monkeypatch):
    def repeat(self):
        raise AssertionError("gradients are repeated")

    monkeypatch.setattr(_Gradients, "repeat", repeat)


CASES_TO_REPEAT = {
    "adamw": (),
    "micro-batches": (Accumulation(micro_batch_size=2, micro_batches=3),),
    "autocast": (Precision(dtype="bf16"),),
}


@pytest.mark.parametrize("name", CASES_TO_REPEAT)
def test_repeated_gradients_leave_the_recording_that_computed_ones_leave(name, computed_twice):
    decisions = CASES_TO_REPEAT[name]
    assert recorded(deep(), decisions) == computed_twice(deep(), decisions)


@pytest.mark.parametrize("name", ["convolutions with batch norm", "in-place", "all losses", "frozen half"])
@pytest.mark.thorough_after(1)
def test_repeated_gradients_of_other_models_leave_the_same_recording(name, computed_twice):
    model, batch, loss_fn = CASES[name].build()
    options = {"batch": batch, "loss_fn": loss_fn, "optimizer": CASES[name].optimizer}
    assert recorded(model, **options) == computed_twice(model, **options)


@pytest.mark.parametrize("name", ["dropout", "llama, grouped heads", "convolutions with batch norm", "tied weights"])
@pytest.mark.usefixtures("refuse_repeating")
def test_the_gradients_of_the_second_step_are_repeated(name):
    model, batch, loss_fn = CASES[name].build()
    with pytest.raises(PlannerError, match="gradients are repeated"):
        recorded(model, batch=batch, loss_fn=loss_fn)


# ---- steps that begin otherwise -----------------------------------------------------------------------------------


class Counts(torch.nn.Module):
    """Does more from its second call on, which it counts in a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(24, 8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.more(self.layer(x)) if self.calls > 1 else self.layer(x)

    def more(self, y: torch.Tensor) -> torch.Tensor:
        return y.tanh().exp()


class CountsInBuffer(Counts):
    """Counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.more(self.layer(x)) if self.seen > 1 else self.layer(x)


class Remembers(Counts):
    """Keeps a tensor of its first call, and uses it from then on."""

    kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.kept is not None:
            return y + self.kept
        self.kept = self.more(y).detach()
        return y


class KeepsInList(Counts):
    """Keeps the means of its outputs in a list of a helper, as a meter does."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = {"means": []}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.meter["means"].append(0)
        return self.more(y) if len(self.meter["means"]) > 1 else y


class ReadsCounterOfNorm(Counts):
    """Does more when the norm has counted a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(24)

    def is_warm(self) -> bool:
        return self.norm.num_batches_tracked > 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(self.norm(x))
        return self.more(y) if self.is_warm() else y


class AsksCounterOfNorm(ReadsCounterOfNorm):
    """Asks for the number that the norm has counted."""

    def is_warm(self) -> bool:
        return self.norm.num_batches_tracked.item() > 1


class DrawsOnHost(Counts):
    """Draws numbers that decide which ops run. Python reseeds `random` in each forked process."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        for _ in range(32):
            y = self.more(y) if random.random() < 0.5 else -y
        return y


HOOK_CALLS = [0]


def more_in_second_call(gradient: torch.Tensor) -> torch.Tensor:
    HOOK_CALLS[0] += 1
    return gradient.tanh() if HOOK_CALLS[0] > 1 else gradient


DIFFERENT = {
    "a number": Counts,
    "a buffer": CountsInBuffer,
    "a tensor that is kept": Remembers,
    "a list": KeepsInList,
    "the counter of a norm": ReadsCounterOfNorm,
    "the counter of a norm, asked for": AsksCounterOfNorm,
    "random numbers of the host": DrawsOnHost,
}


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.usefixtures("refuse_repeating")
def test_a_step_that_begins_otherwise_computes_its_gradients(name):
    graph = recorded(DIFFERENT[name]())
    forwards = [[op.name for op in graph.ops if op.step == step and op.phase == "forward"] for step in (0, 1)]
    assert forwards[0] != forwards[1]


@pytest.mark.usefixtures("refuse_repeating")
def test_a_hook_in_backward_runs_in_both_steps():
    model = deep()
    model[0][0].weight.register_hook(more_in_second_call)
    graph = recorded(model)
    backwards = [[op.name for op in graph.ops if op.step == step and op.phase == "backward"] for step in (0, 1)]
    assert backwards[0] != backwards[1]


@pytest.mark.usefixtures("refuse_repeating")
def test_a_step_that_makes_the_scale_of_fp16_is_not_repeated():
    assert recorded(deep(), (Precision(dtype="fp16"),)).steps == 2


class KeepsGradient(torch.optim.SGD):
    """Holds a gradient of each update until the next one."""

    def step(self, closure=None):
        self.kept = self.param_groups[0]["params"][0].grad
        return super().step(closure)


@pytest.mark.usefixtures("refuse_repeating")
def test_a_step_that_leaves_a_gradient_is_not_repeated():
    recorded(deep(), optimizer=lambda parameters: KeepsGradient(parameters, lr=0.1))


def test_a_step_with_code_of_the_users_computes_its_gradients(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(_Gradients, "repeat", lambda self: pytest.fail("gradients are repeated"))
    assert recorded(deep()).steps == 2
