"""Optimizers whose later updates need more memory than their first ones are recorded as in a later step."""

from __future__ import annotations

import functools

import pytest
import torch

from planner.recording import rehearsal as recording
from planner.workload.torch_optimizers import skip_first_steps
from tests.support import truth
from tests.support.truth import Case

pytestmark = pytest.mark.slow


def build():
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
    return model, torch.randn(2, 512), lambda output, batch: output.square().mean()


@pytest.mark.parametrize(
    ("optimizer", "grows"),
    [
        (functools.partial(torch.optim.RAdam, foreach=False), True),
        (functools.partial(torch.optim.RAdam, foreach=True), False),
        (functools.partial(torch.optim.ASGD, foreach=False, t0=0), True),
        (functools.partial(torch.optim.ASGD, foreach=False, t0=5), True),
        (functools.partial(torch.optim.ASGD, foreach=False), False),
        (functools.partial(torch.optim.ASGD, foreach=True, t0=0), False),
    ],
    ids=["RAdam-loop", "RAdam-foreach", "ASGD-loop-0", "ASGD-loop-5", "ASGD-loop", "ASGD-foreach-0"],
)
def test_a_recording_has_the_memory_of_later_steps(optimizer, grows, monkeypatch):
    """The for-loop of RAdam adapts its step from the sixth update on, that of ASGD averages from update `t0 + 3` on."""
    case = Case(build=build, optimizer=optimizer)
    rehearsed = truth.rehearsal(case).live_bytes().max()
    monkeypatch.setattr(recording, "skip_first_steps", lambda optimizers, learn: None)
    first = truth.truth(case).live_bytes().max()
    monkeypatch.setattr(truth, "STEPS", 9)
    later = truth.truth(case).live_bytes().max()
    assert later == pytest.approx(rehearsed, abs=64)  # ASGD makes tensors with one element
    assert (later > first + 64) == grows


def test_parameters_without_state_are_left_as_they_are():
    used, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.RAdam([used, unused], foreach=False)
    used.square().sum().backward()
    optimizer.step()
    assert not optimizer.state[unused]  # reading it makes an empty entry
    skip_first_steps([optimizer], lambda tensor, value: None)
    assert optimizer.state[used]["step"] > 6 and not optimizer.state[unused]
