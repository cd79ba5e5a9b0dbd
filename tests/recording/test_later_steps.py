"""Optimizers whose later updates need more memory than their first ones are recorded as in a later step."""

from __future__ import annotations

import pytest
import torch

from planner.recording import rehearsal as recording
from tests.support import truth
from tests.support.truth import Case

pytestmark = pytest.mark.slow


def build():
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
    return model, torch.randn(2, 512), lambda output, batch: output.square().mean()


@pytest.mark.parametrize(("foreach", "grows"), [(False, True), (True, False)])
def test_radam_is_recorded_as_after_its_first_steps(foreach, grows, monkeypatch):
    """The for-loop adapts the step from the sixth update on, which takes temporaries."""
    case = Case(build=build, optimizer=lambda parameters: torch.optim.RAdam(parameters, foreach=foreach))
    rehearsed = truth.rehearsal(case).live_bytes().max()
    monkeypatch.setattr(recording, "skip_first_steps", lambda optimizers: None)
    first = truth.truth(case).live_bytes().max()
    monkeypatch.setattr(truth, "STEPS", 9)
    later = truth.truth(case).live_bytes().max()
    assert later == rehearsed
    assert (later > first) == grows
