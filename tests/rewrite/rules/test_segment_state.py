"""Segments and state outside of them: running statistics, buffers that are written in place, and `torch.compile`."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from planner.plan_types.recompute_decisions import Replay
from planner.rewrite.portable import replay_ops, replay_tape
from planner.workload.workload import workload
from tests.support.flat_models import Convolutions, Flat
from tests.support.training import cross_entropy, differences, images, rewritten, seeded, vectors
from tests.support.workloads import plain, units, what_if

pytestmark = pytest.mark.slow


def segment(start: int, stop: int, **changes) -> Replay:
    return Replay(modules=("",), stretches=((start, stop),), kept=((),), **changes)


# ---- running statistics ----------------------------------------------------------------------------------------------


class Normalised(Flat):
    """Two batch norms; `forward` takes their mode from the module."""

    def __init__(self) -> None:
        super().__init__(weight=(16, 16), depth=2)
        self.register_buffer("mean", torch.randn(16))
        self.register_buffer("var", torch.rand(16) + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(2):
            (weight,) = self.of(number, "weight")
            y = nn.functional.linear(x, weight)
            x = nn.functional.batch_norm(y, self.mean, self.var, training=self.training).tanh()
        return nn.functional.linear(x, self.head)


@pytest.mark.parametrize("with_gradients", [True, False])
def test_statistics_that_change_after_a_norm_in_evaluation_mode_are_not_read_by_a_replay(with_gradients):
    def gradients(*decisions) -> list[torch.Tensor]:
        module = rewritten(seeded(Normalised), *decisions, batch=vectors(), loss_fn=cross_entropy).module.eval()
        loss = cross_entropy(module(vectors()[0]), vectors())
        module.train()
        with torch.set_grad_enabled(with_gradients):
            other = cross_entropy(module(vectors(seed=1)[0]), vectors(seed=1))
        (loss + other if with_gradients else loss).backward()
        return [*(parameter.grad for parameter in module.parameters()), module.mean, module.var]

    wanted = gradients()
    for decision in (segment(0, 7), segment(2, 6), segment(0, 7, stops=((3,),))):
        assert all(map(torch.equal, gradients(decision), wanted)), decision
    assert not replay_tape.Segment.with_norms


# ---- tensors that are written in place -------------------------------------------------------------------------------


class Bank(Flat):
    """Writes rows of a large buffer that no op of its forward reads."""

    def __init__(self) -> None:
        super().__init__(weight=(16, 16))
        self.register_buffer("bank", torch.zeros(1000, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(self.depth):
            (weight,) = self.of(number, "weight")
            x = nn.functional.linear(x, weight).tanh().exp()
            with torch.no_grad():
                self.bank[: len(x)].copy_(x * 2)
        return nn.functional.linear(x, self.head)


class Buffer(Bank):
    """Writes a buffer before it reads it, and again after it has read it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.bank[: len(x)]
        for number in range(self.depth):
            (weight,) = self.of(number, "weight")
            with torch.no_grad():
                rows.copy_(x + number)
                rows.mul_(1.5)
            x = nn.functional.linear(x, weight).tanh() * rows.clone().sigmoid()
            with torch.no_grad():
                rows.add_(x)
        return nn.functional.linear(x, self.head)


@pytest.mark.thorough
def test_a_buffer_that_no_recorded_op_has_read_is_not_copied_before_a_write():
    work = workload(seeded(Bank), vectors(), loss_fn=cross_entropy)
    found, curve = units(what_if(work), kinds=(Replay,))
    assert found.units
    for number in range(len(found.units)):
        decisions = found.decisions((number,))
        assert curve.peak((number,)) == plain(work, decisions).live_bytes().max(), decisions


@pytest.mark.parametrize("build", [Bank, Buffer])
def test_buffers_that_are_written_in_any_segment_train_to_the_same_bits(build):
    model, batches = seeded(build), [vectors(), vectors(seed=1)]
    with replay_tape.Tape((), torch.device("cpu")) as tape:
        copy.deepcopy(model)(batches[0][0])
    for start, stop in itertools.combinations(range(0, tape.count + 1, 2), 2):
        assert differences(model, segment(start, stop), batches=batches, loss_fn=cross_entropy) == [], (start, stop)


# ---- tensors in host memory ------------------------------------------------------------------------------------------


class HostNoise(nn.Module):
    """Fills a buffer in host memory and copies it to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).tanh()
        return (y * noise.normal_().to(x.device)).exp()


class HostNet(nn.Module):
    """Uses one buffer in host memory for all blocks, so that it is overwritten before backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HostNoise() for _ in range(4))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.empty(16, device="cpu")
        for block in self.blocks:
            x = block(x, noise)
        return self.head(x)


def test_a_buffer_in_host_memory_may_be_used_again():
    work = workload(seeded(HostNet), vectors(samples=64), loss_fn=cross_entropy)
    graph = what_if(work)
    obstacles = {call.module: call.obstacle or "" for call in graph.calls}
    assert all("host memory" in obstacles[f"blocks.{number}"] for number in range(4))
    assert not obstacles["blocks.0.linear"] and not obstacles[""]
    found, curve = units(graph, kinds=(Replay,))
    assert found.units
    for number in range(len(found.units)):
        decisions = found.decisions((number,))
        assert curve.peak((number,)) == plain(work, decisions).live_bytes().max(), decisions


def test_what_a_segment_reads_from_host_memory_is_copied_there():
    """The device of the tape is one that this machine may not have: only its type is read."""
    with replay_tape.Tape((), torch.device("cuda")) as tape:
        segment, host = replay_tape.Segment(tape, parts=1), torch.arange(3.0)
        first = segment.record(torch.ops.aten.neg.default, [host], {}, {}, None)
        host.add_(1)
        second = segment.record(torch.ops.aten.neg.default, [host], {}, {}, None)
    host.zero_()
    assert torch.equal(first.args[0], torch.arange(3.0)) and torch.equal(second.args[0], torch.arange(3.0) + 1)
    assert not segment.starts


# ---- reproducibility, compilation ------------------------------------------------------------------------------------


def test_the_order_in_which_memory_is_freed_does_not_depend_on_addresses(monkeypatch):
    work = workload(seeded(Convolutions), images(), loss_fn=cross_entropy)
    found, _ = units(what_if(work), kinds=(Replay,))
    most_parts = max(range(len(found.units)), key=lambda number: len(found.units[number].split_points))
    decisions = found.decisions((most_parts,))
    key_of, lives = replay_ops.key_of, []
    for factor in (1, 3, 0x9E3779B97F4A7C15):

        def scrambled(tensor, factor=factor):
            key = key_of(tensor)
            return None if key is None else key * factor % (2**61 - 1)

        monkeypatch.setattr(replay_ops, "key_of", scrambled)
        monkeypatch.setattr(replay_tape, "key_of", scrambled)
        lives.append([storage.lives for storage in plain(work, decisions).storages])
    assert lives[0] == lives[1] == lives[2]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_runs_its_segments_uncompiled(backend):
    def trained(compiled: bool, *decisions) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 3, 1), Convolutions())
        module = rewritten(model, *decisions, batch=images(), loss_fn=cross_entropy).module
        module = torch.compile(module, backend=backend) if compiled else module
        for seed in range(2):
            cross_entropy(module(images(seed=seed)[0]), images(seed=seed)).backward()
        return [*(parameter.grad for parameter in module.parameters()), *module.buffers()]

    wanted = trained(False)
    decision = Replay(modules=("1",), stretches=((0, 12),), kept=((),), stops=((5,),))
    torch._dynamo.reset()
    assert all(map(torch.equal, trained(True, decision), wanted))
