"""The location of an out-of-memory error, and what a run on a card derives from the numbers of the device."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from planner.errors import MeasurementError
from planner.plan_types.sizes import MIB
from planner.rewrite.on_gpu import worker
from planner.rewrite.on_gpu.oom_location import OomLocation, OomLocator
from tests.support.counting_device import CountingCpu
from tests.support.training import plan_for


class Full(TorchDispatchMode):
    """Raises an out-of-memory error at the n-th call of an op."""

    def __init__(self, op: str, times: int = 1) -> None:
        super().__init__()
        self._op, self._times = op, times

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self._times -= op.overloadpacket.__name__ == self._op
        if not self._times:
            raise torch.OutOfMemoryError("made up")
        return op(*args, **(kwargs or {}))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=False)).exp().sum()


PARAMETERS = 2 * (16 + 4) * 4


def location_of(full: Full, steps: int = 1) -> OomLocation:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    last, x = OomLocator(model, optimizer, lambda: 1000), torch.ones(2, 4, requires_grad=True)
    with pytest.raises(torch.OutOfMemoryError), full:
        for _ in range(steps):
            with last.watching():
                model(x).backward()
                optimizer.step()
    assert not optimizer._optimizer_step_pre_hooks
    return last.location


@pytest.mark.parametrize(
    ("full", "phase", "module"),
    [
        (Full("tanh"), "forward", "first.1"),
        (Full("addmm", 2), "forward", "second"),
        (Full("exp"), "forward", ""),
        (Full("tanh", 2), "recompute", "first.1"),
        (Full("tanh_backward"), "backward", ""),
        (Full("add_"), "optimizer", ""),
    ],
)
def test_phase_and_module_of_the_op_that_ran_out(full, phase, module):
    found = location_of(full)
    assert (found.phase, found.module) == (phase, module)


def test_what_was_alive_when_it_ran_out():
    assert location_of(Full("exp")).alive == {
        "parameters": PARAMETERS, "gradients": 0, "optimizer state": 0, "the rest": 1000 - PARAMETERS,
    }  # fmt: skip
    updated = location_of(Full("exp", 2), steps=2).alive
    assert updated == {
        "parameters": PARAMETERS, "gradients": PARAMETERS, "optimizer state": PARAMETERS,
        "the rest": 1000 - 3 * PARAMETERS,
    }  # fmt: skip


def test_the_first_op_that_ran_out_is_reported():
    """Code that handles the error may run out of memory, too."""
    model = Net()
    last = OomLocator(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: 0)
    for op in ("cos", "sin"):
        with Full(op), last.watching(), contextlib.suppress(torch.OutOfMemoryError):
            getattr(torch, op)(torch.ones(1))
    assert last.location.op == "aten.cos.default"


NET = """
import torch

def net():
    batch = (torch.randn(8, 4), torch.randn(8, 4))
    return torch.nn.Linear(4, 4), batch, lambda output, batch: torch.nn.functional.mse_loss(output, batch[1])
"""


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    batch = (torch.randn(8, 4), torch.randn(8, 4))
    loss_fn = lambda output, batch: torch.nn.functional.mse_loss(output, batch[1])  # noqa: E731
    return plan_for(nn.Linear(4, 4), batch, loss_fn=loss_fn, optimizer="sgd", reference=f"{tmp_path / 'net.py'}:net")


def test_the_total_is_the_reserved_memory_plus_what_the_process_holds_outside_of_it(plan):
    device = CountingCpu(beside_bytes=7 * MIB)
    try:
        found = worker.run(plan, device, cap_bytes=None)
    finally:
        device.end()
    assert found.total_bytes == found.reserved_bytes + 7 * MIB


def test_a_scaler_that_keeps_skipping_is_an_error(plan):
    class Scaler:
        scale = 2.0**100

        def get_scale(self) -> float:
            self.scale /= 2
            return self.scale

    def step(batch: object) -> torch.Tensor:
        return torch.tensor(1.0)

    step.scaler = Scaler()
    steps = worker.Steps(plan, types.SimpleNamespace(step=step), None)
    with pytest.raises(MeasurementError, match="overflows in fp16"):
        for _ in range(100):
            steps.one()
    assert steps.trained == 0 and steps.skipped == worker.MOST_SKIPPED + 1
