"""The memory of the user's own loop: compared with the plan, and explained by the plan when it runs out."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

import planner
from planner import rewrite
from planner.errors import PromiseError
from planner.rewrite import memory_promise

MIB = 2**20


def loss_fn(output, batch):
    return output.square().mean()


class Sub(torch.nn.Linear):
    """Runs out of memory in its forward if it is asked to."""

    fails = False

    def forward(self, x):
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(x)


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 64), Sub(64, 64))


@pytest.fixture(scope="module")
def plan():
    made = planner.plan(net(), (torch.zeros(8, 64),), vram=None, loss_fn=loss_fn, gpu="rtx-2060")
    breakdown = {"parameters": 20 * MIB, "gradients": 20 * MIB, "optimizer state": 40 * MIB, "activations": 100 * MIB}
    breakdown["allocator slack"] = MIB
    peak = dataclasses.replace(made.peak, allocated_bytes=180 * MIB, reserved_bytes=200 * MIB, breakdown=breakdown)
    return dataclasses.replace(made, peak=peak)


@pytest.fixture
def rewritten(plan):
    return rewrite.apply(plan, net(), loss_fn=loss_fn, check="off")


def train(rewritten, steps: int) -> None:
    for _ in range(steps):
        rewritten.step((torch.ones(8, 64),))


@pytest.mark.parametrize(
    ("peaks", "level", "message"),
    [
        ((180 * MIB, 200 * MIB), "INFO", "promise was kept: 180.0 MiB allocated of 180.0 MiB, 200.0 MiB reserved"),
        ((200 * MIB, 200 * MIB), "WARNING", "promise was broken: 200.0 MiB allocated of 180.0 MiB"),
        (None, "WARNING", "could not be measured: there is no CUDA device here, the model is trained on cpu"),
    ],
)
def test_the_first_steps_of_a_loop_are_compared_with_the_plan_once(
    plan, rewritten, peaks, level, message, caplog, monkeypatch
):
    caplog.set_level(logging.INFO, "planner.rewrite")
    monkeypatch.setattr(memory_promise, "peaks_on", lambda device: peaks)
    observers = rewritten.step.observers
    with rewrite.watch_memory(plan, rewritten) as memory:
        train(rewritten, 3)
        assert memory.promise is None
        train(rewritten, 3)
        assert str(memory.promise) in caplog.text
    assert [record.levelname for record in caplog.records if "promise" in record.message] == [level]
    assert message in caplog.text
    assert rewritten.step.observers == observers


def test_a_broken_promise_is_raised_where_that_was_asked_for_and_two_steps_are_enough(plan, rewritten, monkeypatch):
    monkeypatch.setattr(memory_promise, "peaks_on", lambda device: (400 * MIB, 400 * MIB))
    with pytest.raises(PromiseError, match="broken"), rewrite.watch_memory(plan, rewritten, on_broken="raise"):
        train(rewritten, 2)
    with rewrite.watch_memory(plan, rewritten) as memory:
        train(rewritten, 1)
    assert memory.promise is None
    with pytest.raises(ValueError, match="give at least 2"), rewrite.watch_memory(plan, rewritten, steps=1):
        pass


@pytest.mark.parametrize(
    ("in_tensors", "words"),
    [
        (5000 * MIB, "the rest take more than planned: keep no other model, gradients or outputs of earlier steps"),
        (90 * MIB, "no part takes more than planned, so other memory of the card is missing: 3.00 GiB belong to other"),
    ],
)
def test_out_of_memory_is_explained_by_the_plan(plan, rewritten, in_tensors, words, monkeypatch):
    monkeypatch.setattr(memory_promise, "in_use", lambda device: (in_tensors, 5100 * MIB, 3 << 30))
    with (
        pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as failure,
        rewrite.watch_memory(plan, rewritten) as memory,
    ):
        train(rewritten, 1)
        rewritten.module[1].fails = True
        train(rewritten, 1)
    assert failure.value.__notes__ == [memory.out_of_memory]
    assert memory.out_of_memory.startswith("out of memory in forward, in '1', with ")
    assert "optimizer state 65.0 KiB (plan: 40.0 MiB)" in memory.out_of_memory
    assert words in memory.out_of_memory
