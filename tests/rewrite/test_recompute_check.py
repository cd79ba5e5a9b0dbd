"""A recompute on other values than the forward's is refused before the update; right ones are never refused."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner import rewrite
from planner.errors import DecisionError
from planner.plan_types.decisions import Accumulation, Decision, StepInBackward
from planner.plan_types.recompute_decisions import Checkpoint, Offload, Replay
from planner.rewrite import source
from planner.rewrite.portable.recompute_check import RecomputeCheck, random_run
from planner.rewrite.rules import offload as offload_rule
from tests.support.training import cross_entropy, differences, imported, plan_for, rewritten, seeded, vectors

KEEPS_NOTHING = Checkpoint(modules=("0", "1"))
KEEPS_RESULTS = Checkpoint(modules=("0", "1"), kept=((0,), (0,)))
OP_BY_OP = Replay(modules=("0", "1"), stretches=((0, 99), (0, 99)), kept=((), ()))
ON_HOST = Offload(modules=("0", "1"), inputs_of=(), from_bytes=1)


class Block(nn.Module):
    """Two products; `factor()` is what a forward reads that is not a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def factor(self) -> float:
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)) * self.factor())


class Blocks(nn.Sequential):
    block = Block

    def __init__(self) -> None:
        super().__init__(self.block(), self.block(), nn.Linear(16, 4))


# ---- state that differs between a call and its backward, although nothing changes during the call


class SetBeforeEachCall(Blocks):
    class block(Block):
        time = 0

        def factor(self):
            return 1.0 + self.time

    def forward(self, x):
        for time in range(3):
            self[0].time = time
            x = self[0](x)
        return self[2](self[1](x))


class SetAndReset(Blocks):
    class block(Block):
        scale = 1.0

        def factor(self):
            return self.scale

    def forward(self, x):
        self[0].scale = 2.0
        try:
            return super().forward(x)
        finally:
            self[0].scale = 1.0


class GlobalMode(Blocks):
    mode = SimpleNamespace(factor=1.0)

    class block(Block):
        def factor(self):
            return GlobalMode.mode.factor

    @contextlib.contextmanager
    def doubled(self):
        self.mode.factor = 2.0
        yield
        self.mode.factor = 1.0

    def forward(self, x):
        with self.doubled():
            return super().forward(x)


class ArgumentChanged(Blocks):
    class block(Block):
        def forward(self, x, options=None):
            return x + self.second(torch.tanh(self.first(x)) * (options or {"factor": 1.0})["factor"])

    def forward(self, x):
        options = {"factor": 2.0}
        x = self[0](x, options)
        options["factor"] = 3.0
        return self[2](self[1](x, options))


class OtherWeights(Blocks):
    def forward(self, x):
        weights = {name: parameter * 2 for name, parameter in self[0].named_parameters()}
        return self[2](self[1](torch.func.functional_call(self[0], weights, (x,))))


class SwappedWeights(Blocks):
    def __init__(self):
        super().__init__()
        self.other = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        layer, x = self[1].first, self[0](x)
        own = layer.weight
        layer.weight = self.other
        x = self[1](x)
        layer.weight = own
        return self[2](x)


# ---- state that a forward changes, where `state_dict` does not show it


def counting(count):
    class Counting(Blocks):
        class block(Block):
            def __init__(self):
                super().__init__()
                self.counter = count()

            def factor(self):
                return 1.0 + self.counter()

    return Counting


class InDict:
    def __init__(self):
        self.items = {"calls": 0}

    def __call__(self):
        self.items["calls"] += 1
        return self.items["calls"]


class InArray:
    def __init__(self):
        self.calls = np.zeros(1)

    def __call__(self):
        self.calls += 1
        return float(self.calls[0])


class InIterator:
    def __init__(self):
        self.calls = itertools.count()

    def __call__(self):
        return next(self.calls)


class InGlobal:
    calls = 0

    def __call__(self):
        InGlobal.calls += 1
        return InGlobal.calls


class InGenerator:
    def __init__(self):
        self.chance = np.random.default_rng(0)

    def __call__(self):
        return self.chance.random()


CHANGING = [
    SetBeforeEachCall, SetAndReset, GlobalMode, ArgumentChanged, OtherWeights, SwappedWeights,
    *map(counting, (InDict, InArray, InIterator, InGlobal, InGenerator)),
]  # fmt: skip
NAMES = [*(model.__name__ for model in CHANGING[:6]), "dict", "array", "iterator", "global", "generator"]


@pytest.mark.parametrize("decision", [KEEPS_NOTHING, KEEPS_RESULTS], ids=["keeps nothing", "keeps results"])
@pytest.mark.parametrize("model", CHANGING, ids=NAMES)
def test_a_recompute_with_other_state_is_refused_and_nothing_is_updated(model, decision):
    result = rewritten(seeded(model), decision, batch=vectors(), loss_fn=cross_entropy)
    before = copy.deepcopy(result.module.state_dict())
    with pytest.raises(DecisionError, match=r"backward computed with other values than the forward in module '[01]'"):
        result.step(vectors())
    assert all(torch.equal(before[name], value) for name, value in result.module.state_dict().items())


@pytest.mark.parametrize("decision", [OP_BY_OP, ON_HOST], ids=["op by op", "on the host"])
@pytest.mark.parametrize("model", CHANGING[:-3], ids=NAMES[:-3])
def test_techniques_that_run_no_code_again_train_such_models_to_the_same_bits(model, decision, monkeypatch):
    monkeypatch.setattr(offload_rule, "is_on_host", lambda tensor: False)
    batches = [vectors(seed=seed) for seed in range(3)]
    assert differences(seeded(model), decision, batches=batches, loss_fn=cross_entropy) == []


def emitted_file(plan, folder):
    path = folder / "emitted.py"
    path.write_text(source(plan))
    return imported(path)


@pytest.mark.parametrize("model", CHANGING, ids=NAMES)
def test_the_emitted_file_refuses_it_too(model, tmp_path):
    model = seeded(model)
    plan = plan_for(model, vectors(), KEEPS_NOTHING, loss_fn=cross_entropy, optimizer="sgd")
    emitted = emitted_file(plan, tmp_path)
    optimizer = emitted.make_optimizer(emitted.rewrite(model))
    with pytest.raises(RuntimeError, match="backward computed with other values"):
        emitted.training_step(model, optimizer, vectors(), loss_fn=cross_entropy)


def test_a_forward_on_the_instance_is_kept_in_the_emitted_file(tmp_path):
    model = seeded(Blocks)
    plain = type(model[0]).forward
    model[0].forward = lambda x: plain(model[0], 2 * x)
    losses = []
    for decision in (KEEPS_NOTHING, OP_BY_OP, ON_HOST):
        own = copy.copy(vars(model[0])["forward"])
        plan = plan_for(model, vectors(), decision, loss_fn=cross_entropy, optimizer="sgd")
        emitted = emitted_file(plan, tmp_path)
        emitted.rewrite(model)
        losses.append(
            emitted.training_step(model, torch.optim.SGD(model.parameters(), 0.0), vectors(), loss_fn=cross_entropy)
        )
        model[0].forward = own
        del model[1].forward
    expected = cross_entropy(model(vectors()[0]), vectors())
    assert all(torch.equal(loss, expected) for loss in losses)


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_the_difference_is_found_in_the_next_checked_step(steps):
    """State that starts to change later: steps 1, 2, 4, 8 and 16 are checked."""
    result = rewritten(seeded(SetAndReset), KEEPS_NOTHING, batch=vectors(), loss_fn=cross_entropy)
    late = result.module[0]
    type(late).factor, before = (
        lambda self: self.scale if steps <= result.step.observers[0]._check.step else 1.0,
        type(late).factor,
    )
    try:
        with pytest.raises(DecisionError, match=r"'scale' was 2\.0 and is 1\.0 in backward"):
            for _ in range(16):
                result.step(vectors())
        assert result.step.observers[0]._check.step == {1: 1, 3: 4, 5: 8}[steps]
    finally:
        type(late).factor = before


@pytest.mark.parametrize("call", [1, 3], ids=["first", "second"])
def test_every_micro_batch_is_compared(call):
    class InOne(Blocks):
        class block(Block):
            calls = itertools.count()

            def factor(self):
                return 2.0 if next(self.calls) == call else 1.0  # forward and recompute take turns

    result = rewritten(
        seeded(InOne), Checkpoint(modules=("0",)), Accumulation(micro_batch_size=4, micro_batches=2),
        batch=vectors(), loss_fn=cross_entropy,
    )  # fmt: skip
    result.module[1].factor = lambda: 1.0
    with pytest.raises(DecisionError, match="other values than the forward"):
        result.step(vectors())


def test_a_step_in_backward_updates_nothing_that_depends_on_the_difference():
    result = rewritten(
        seeded(SetAndReset), Checkpoint(modules=("0",)), StepInBackward(), batch=vectors(), loss_fn=cross_entropy
    )
    before = copy.deepcopy(result.module[0].state_dict())
    with pytest.raises(RuntimeError, match="backward computed with other values"):
        result.step(vectors())
    assert all(torch.equal(before[name], value) for name, value in result.module[0].state_dict().items())


# ---- offloading: tensors in one storage that count their versions apart


class Parts(Block):
    def forward(self, x):
        a, b = torch.unsafe_chunk(self.first(x), 2, 1)
        return x + self.second(torch.cat([a.sigmoid_() * b.tanh_(), a], 1))


@pytest.mark.parametrize("build", [lambda: nn.Sequential(Parts(), Parts(), nn.Linear(16, 4))], ids=["parts"])
def test_parts_of_a_storage_that_are_written_apart_are_offloaded_apart(build, monkeypatch):
    monkeypatch.setattr(offload_rule, "is_on_host", lambda tensor: False)
    batches = [vectors(seed=seed) for seed in range(3)]
    assert differences(seeded(build), ON_HOST, batches=batches, loss_fn=cross_entropy) == []


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.layers = kind, nn.ModuleList([kind(16, 16), nn.Linear(16, 4)])

    def forward(self, x):
        if self.kind is nn.GRUCell:
            return self.layers[1](self.layers[0](x, x))
        return self.layers[1](self.layers[0](x[None].expand(3, -1, -1))[0][-1])


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTM, nn.GRU], ids=lambda kind: kind.__name__)
def test_recurrent_layers_are_offloaded_to_the_same_bits(kind, monkeypatch):
    monkeypatch.setattr(offload_rule, "is_on_host", lambda tensor: False)
    decision, batches = (
        Offload(modules=("layers.0",), inputs_of=(), from_bytes=1),
        [vectors(seed=seed) for seed in range(3)],
    )
    assert differences(seeded(lambda: Recurrent(kind)), decision, batches=batches, loss_fn=cross_entropy) == []


def test_a_host_copy_that_was_overwritten_is_refused(monkeypatch):
    monkeypatch.setattr(offload_rule, "is_on_host", lambda tensor: False)
    plain = offload_rule.HostCopy.tensor
    monkeypatch.setattr(offload_rule.HostCopy, "tensor", lambda self: plain(self).add_(1))
    result = rewritten(seeded(Blocks), ON_HOST, batch=vectors(), loss_fn=cross_entropy)
    with pytest.raises(DecisionError, match="other values"):
        result.step(vectors())


# ---- what is compared


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(5000.0), torch.arange(5000.0).view(50, 100).t(), torch.arange(5000.0).view(50, 100)[:, 3:9],
        torch.arange(50.0)[:, None].expand(50, 40), torch.arange(5000.0)[::7], torch.tensor(3.0), torch.arange(7.0)[2:],
        torch.arange(5000.0).view(5, 10, 10, 10).permute(3, 1, 0, 2)[1:, :, 2:],
    ],
    ids=["flat", "transposed", "columns", "expanded", "strided", "scalar", "rest", "permuted"],
)  # fmt: skip
def test_a_run_stays_inside_the_tensor_and_reaches_all_of_it(tensor):
    places, seen = random.Random(1), set()
    for _ in range(3000):
        start, length = random_run(tensor, places)
        assert 1 <= length <= 128
        seen.update(tensor.as_strided((length,), (1,), tensor.storage_offset() + start).tolist())
    assert seen <= set(tensor.flatten().tolist())
    assert len(seen) > 0.9 * len(set(tensor.flatten().tolist()))


def test_steps_that_are_not_checked_take_no_samples():
    check, taken = RecomputeCheck(steps=(2,)), []
    block = Block()
    forward = check.watched(Block.forward, "block")
    for _ in range(3):
        check.begin_step()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            output = forward(block, torch.randn(8, 16))
        output.sum().backward()
        taken.append(len(check.samples))
        check.refuse_difference()
    assert taken[0] == taken[2] == 0
    assert taken[1] > 3


def test_after_a_failed_step_the_next_one_is_checked():
    result = rewritten(seeded(SetAndReset), KEEPS_NOTHING, batch=vectors(), loss_fn=cross_entropy)
    with pytest.raises(DecisionError, match="an error of the batch"):
        result.step.loss_fn = lambda output, batch: refuse("an error of the batch")
        result.step(vectors())
    result.step.loss_fn = cross_entropy
    with pytest.raises(DecisionError, match="backward computed with other values"):
        result.step(vectors())


def refuse(message: str) -> None:
    raise DecisionError(message)


def test_the_check_draws_no_random_numbers_of_the_training():
    result = rewritten(seeded(Blocks), KEEPS_NOTHING, batch=vectors(), loss_fn=cross_entropy)
    before = random.getstate(), torch.get_rng_state()
    result.step(vectors())
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_what_is_not_finite_only_in_backward_is_refused():
    for value, is_refused in ((float("nan"), True), (float("inf"), True), (1.0, False)):
        check, block = RecomputeCheck(), Block()
        check.begin_step()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor, lambda tensor, value=value: tensor * value
        ):
            output = check.watched(Block.forward, "block")(block, torch.randn(8, 16))
        output.sum().backward()
        with pytest.raises(RuntimeError) if is_refused else contextlib.nullcontext():
            check.refuse_difference()


def test_rounding_is_ignored_and_more_than_rounding_is_not():
    for scale, is_refused in ((torch.tensor(1 + 1e-6), False), (torch.tensor(1 + 1e-2), True)):
        check, block = RecomputeCheck(), Block()
        check.begin_step()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor, lambda tensor, scale=scale: tensor * scale
        ):
            output = check.watched(Block.forward, "block")(block, torch.randn(8, 16))
        output.sum().backward()
        with pytest.raises(RuntimeError) if is_refused else contextlib.nullcontext():
            check.refuse_difference()


def test_models_with_private_state_of_kernels_are_not_refused():
    """Dropout inside of attention, embeddings, norms in training, in-place activations."""

    class Odd(Block):
        def __init__(self):
            super().__init__()
            self.norm, self.attention = nn.BatchNorm1d(16), nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True)

        def forward(self, x):
            x = self.norm(F.relu(super().forward(x), inplace=True))
            return self.attention(x[None], x[None], x[None])[0][0]

    batches = [vectors(seed=seed) for seed in range(4)]
    for decision in decisions():
        model = seeded(lambda: nn.Sequential(Odd(), Odd(), nn.Linear(16, 4)))
        assert differences(model, decision, batches=batches, loss_fn=cross_entropy) == []


def decisions() -> list[Decision]:
    return [KEEPS_NOTHING, KEEPS_RESULTS, OP_BY_OP, ON_HOST]


class Looked(nn.Module):
    """A block that its parent calls several times, each time with another index or mask as an attribute."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer, self.table, self.chosen = kind, nn.Linear(6, 6), nn.Embedding(3, 6), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.layer(x))
        if self.kind == "index":
            return hidden + self.table(self.chosen)
        return hidden * self.chosen


class Looking(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block = Looked(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(3):
            mask = (torch.arange(6) % 3 == number).to(torch.uint8)
            self.block.chosen = torch.tensor(number) if self.block.kind == "index" else mask
            x = self.block(x)
        return x


@pytest.mark.parametrize("kind", ["index", "bytes"])
def test_small_integers_and_bytes_that_the_module_holds_are_compared(kind):
    model, batch = seeded(lambda: Looking(kind)), torch.randn(8, 6)
    plan = plan_for(model, batch, Checkpoint(modules=("block",)), loss_fn=lambda out, _: out.square().mean())
    step = rewrite.apply(plan, model, loss_fn=lambda out, _: out.square().mean()).step
    step.observers = step.observers[:1]
    with pytest.raises(DecisionError, match="backward computed with other values than the forward in module 'block'"):
        step(batch)


# ---- nondeterministic kernels


@torch.library.custom_op("planner_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """Simulates a nondeterministic kernel: its result differs between calls with the same input."""
    return x * (1 + int.from_bytes(os.urandom(8), "big") / 2**64)


noisy.register_autograd(lambda ctx, gradient: gradient)


def test_a_nondeterministic_kernel_is_named_and_training_goes_on(caplog):
    class Noisy(Blocks):
        class block(Block):
            def factor(self):
                return noisy(torch.ones(1))

    result = rewritten(seeded(Noisy), Checkpoint(modules=("0",)), batch=vectors(), loss_fn=cross_entropy)
    before = copy.deepcopy(result.module.state_dict())
    result.step(vectors())
    assert "planner_tests.noisy.default is a nondeterministic kernel" in caplog.text
    assert not torch.equal(before["0.first.weight"], result.module.state_dict()["0.first.weight"])


def test_a_nondeterministic_kernel_does_not_excuse_a_state_that_changes(caplog):
    class Noisy(Blocks):
        class block(Block):
            def factor(self):
                return noisy(torch.ones(1)).detach() * 0 + next_factor()

    result = rewritten(seeded(Noisy), Checkpoint(modules=("0",)), batch=vectors(), loss_fn=cross_entropy)
    before = copy.deepcopy(result.module.state_dict())
    with pytest.raises(DecisionError, match="backward computed with other values than the forward in module '0'"):
        result.step(vectors())
    assert "nondeterministic kernel" not in caplog.text
    torch.testing.assert_close(result.module.state_dict(), before, rtol=0, atol=0)


_CALLS = [0]


def next_factor() -> float:
    """Returns another number each time. Its state is not restored, because no module reads it."""
    _CALLS[0] += 1
    return 1 + 0.1 * (_CALLS[0] % 7)
