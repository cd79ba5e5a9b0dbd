"""Optimizers whose later updates need more memory than their first ones are recorded as in a later step."""

from __future__ import annotations

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


@pytest.mark.parametrize(("foreach", "grows"), [(False, True), (True, False)])
def test_radam_is_recorded_with_the_memory_of_its_later_steps(foreach, grows, monkeypatch):
    """From the sixth update on, the for-loop computes an adaptive step size, which needs temporaries."""
    case = Case(build=build, optimizer=lambda parameters: torch.optim.RAdam(parameters, foreach=foreach))
    rehearsed = truth.rehearsal(case).live_bytes().max()
    monkeypatch.setattr(recording, "skip_first_steps", lambda optimizers: None)
    first = truth.truth(case).live_bytes().max()
    monkeypatch.setattr(truth, "STEPS", 9)
    later = truth.truth(case).live_bytes().max()
    assert later == rehearsed
    assert (later > first) == grows


def test_parameters_without_state_are_left_as_they_are():
    used, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.RAdam([used, unused], foreach=False)
    used.square().sum().backward()
    optimizer.step()
    assert not optimizer.state[unused]  # reading it makes an empty entry
    skip_first_steps([optimizer])
    assert optimizer.state[used]["step"] > 6 and not optimizer.state[unused]
