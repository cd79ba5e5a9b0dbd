"""Offloading trains to the same bits, keeps saved tensors on the host, and has the promised peak to the byte."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import random
import weakref

import pytest
import torch
from torch import nn

import planner
from planner.errors import DecisionError
from planner.plan_types.decisions import Accumulation, Precision, StepInBackward
from planner.plan_types.recompute_decisions import Checkpoint, Offload, Replay
from planner.plan_types.techniques import decision_from_json
from planner.rewrite.rules import offload as rule
from planner.workload.workload import workload
from tests.support.training import (
    Convolutional,
    Perceptron,
    cross_entropy,
    differences,
    gpt2,
    images,
    printed_by_emitted_files,
    rewritten,
    roberta,
    seeded,
    tokens,
    vectors,
)
from tests.support.workloads import BARE, CARD, plain, transformer, units, what_if

pytestmark = pytest.mark.slow


@pytest.fixture
def copies(monkeypatch) -> list[rule.HostCopy]:
    """Copy tensors of the CPU too, which are on the host already, and record the copies."""
    made: list[rule.HostCopy] = []

    class Counted(rule.HostCopy):
        def __init__(self, tensor: torch.Tensor) -> None:
            super().__init__(tensor)
            made.append(self)

    monkeypatch.setattr(rule, "is_on_host", lambda tensor: False)
    monkeypatch.setattr(rule, "HostCopy", Counted)
    return made


def offload(*modules: str, inputs_of: tuple[str, ...] = ()) -> Offload:
    return Offload(modules=modules, inputs_of=inputs_of, from_bytes=1)


LAYERS = tuple(f"layers.{number}" for number in range(4))
CASES = {
    "what is saved in layers": (seeded(Perceptron), vectors, (offload(*LAYERS),)),
    "of the whole model": (seeded(Perceptron), vectors, (offload("layers", "head"),)),
    "inputs of checkpoints": (
        seeded(Perceptron),
        vectors,
        (Checkpoint(modules=LAYERS), offload(*LAYERS, inputs_of=LAYERS)),
    ),
    "around checkpoints": (seeded(Perceptron), vectors, (Checkpoint(modules=LAYERS[1:3]), offload("layers"))),
    "beside a replay": (
        seeded(Perceptron),
        vectors,
        (Replay(modules=("layers.0",), stretches=((0, 3),), kept=((),)), offload("layers.1", "layers")),
    ),
    "convolutions, called twice": (seeded(Convolutional), images, (offload("first", "twice"),)),
    "convolutions, called twice, inputs": (
        seeded(Convolutional),
        images,
        (Checkpoint(modules=("twice",)), offload("first", "twice", inputs_of=("twice",))),
    ),
    "in micro-batches": (
        seeded(Perceptron, dropout=0.0),
        vectors,
        (offload(*LAYERS),),
        (Accumulation(micro_batch_size=3, micro_batches=3),),
    ),
    "in bf16": (seeded(Perceptron), vectors, (offload(*LAYERS),), (Precision(dtype="bf16"),)),
    "with steps in backward": (seeded(Perceptron), vectors, (offload(*LAYERS),), (StepInBackward(),)),
}


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same_to_the_bit(name, copies):
    model, make, decisions, *beside = CASES[name]
    batches = [make(seed=seed) for seed in range(2)]
    results = []
    for chosen in ((), decisions):
        result = rewritten(
            copy.deepcopy(model), *(beside[0] if beside else ()), *chosen, batch=batches[0], loss_fn=cross_entropy
        )
        torch.manual_seed(1)
        results.append(([result.step(batch) for batch in batches], result.module.state_dict()))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert copies


@pytest.mark.parametrize("build", [gpt2, roberta])
def test_transformers_with_dropout_train_to_the_same_bits(build, copies):
    model = seeded(build, use_cache=False)
    names = [name for name, module in model.named_modules() if name.split(".")[-1] in ("0", "1")]
    decisions = Checkpoint(modules=(names[0],)), offload(*names, inputs_of=(names[0],))
    assert not differences(model, *decisions, batches=[tokens(seed=seed) for seed in range(2)])
    assert copies


class Views(nn.Module):
    """Saves views of one storage, a transposed view, an integer mask and a complex conjugate, and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.sin())


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ self.weight).split(16, dim=1)
        scores = torch.softmax(q @ k.t(), dim=-1)
        out = (scores @ v).where(v > 0, v * 0.5)
        turned = torch.view_as_complex(out.reshape(-1, 8, 2)).conj()
        out = torch.view_as_real(turned * turned.exp()).reshape(-1, 16)
        out = torch.exp(out / 8)
        changed = torch.tanh(out) + 1
        changed.mul_(out)
        return nn.functional.max_pool1d(changed, 4, return_indices=True)[0][:, :3]


def test_parts_of_a_storage_are_copied_once_and_come_back_as_they_were(copies):
    assert not differences(seeded(Views), offload("inner"), batches=[vectors()], loss_fn=cross_entropy)
    storages = [copied.reference for copied in copies]
    assert len({storage.cdata for storage in storages}) == len(storages) > 5


class Same(nn.Module):
    """Computes something else if one tensor is passed twice, as `torch.nn.MultiheadAttention` does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * (2.0 if z is x else 1.0)).sin()


class GivenTwice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(16, 16), inner, nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.head(self.inner(x, x))


def test_a_module_that_is_given_one_tensor_twice_keeps_its_inputs(copies):
    decisions = Checkpoint(modules=("inner",)), offload("inner", inputs_of=("inner",))
    assert not differences(seeded(GivenTwice, Same()), *decisions, batches=[vectors()], loss_fn=cross_entropy)
    assert not copies
    with torch.device("meta"):
        model, batch = GivenTwice(Same()), (torch.zeros(1 << 15, 16), torch.zeros(1 << 15, dtype=torch.long))
    found, _ = units(what_if(workload(model, batch, loss_fn=cross_entropy, optimizer="sgd")))
    assert not any(unit.module == "inner" and unit.runs_again and unit.on_host for unit in found.units)


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *saved):
        ctx.save_for_backward(*saved)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        first, last = ctx.saved_tensors
        factor = 3.0 if isinstance(first, OfItsOwn) else 1.0
        return grad * factor * first.sum().item() * last[-1].item(), None, None


class OfItsOwn(torch.Tensor):
    pass


class Odd(nn.Module):
    """Saves a tensor of a user-defined class, or views whose item size does not divide the size of the storage."""

    def __init__(self, *, own_class: bool) -> None:
        super().__init__()
        self.own_class = own_class

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        whole = torch.arange(1, 18, dtype=torch.uint8)
        part = whole[:16].view(torch.float32).fill_(1.0)
        return Kept.apply(x, torch.ones(3).as_subclass(OfItsOwn) if self.own_class else part, whole)


@pytest.mark.parametrize("own_class", [False, True])
def test_odd_sizes_come_back_and_classes_of_somebodys_own_stay(own_class, copies):
    model = seeded(GivenTwice, Odd(own_class=own_class))
    assert not differences(model, offload("inner"), batches=[vectors()], loss_fn=cross_entropy)


def test_arguments_weights_and_buffers_stay_where_they_are(copies):
    model = nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)), nn.Linear(16, 3))
    result = rewritten(model, offload("0", "1"), batch=vectors(), loss_fn=cross_entropy)
    result.step(vectors())
    sizes = [copied.host.nbytes for copied in copies]
    assert sorted(sizes) == [4 * 16, 4 * 16, 4 * 8 * 16]  # statistics of the batch, and what the norm was given


def test_small_tensors_stay_where_they_are(copies):
    decision = dataclasses.replace(offload("0"), from_bytes=8 * 16 * 4)
    model = nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)), nn.Linear(16, 3))
    rewritten(model, decision, batch=vectors(), loss_fn=cross_entropy).step(vectors())
    assert [copied.host.nbytes for copied in copies] == [4 * 8 * 16]


def test_nothing_is_left_after_a_step(copies):
    result = rewritten(seeded(Perceptron), offload(*LAYERS), batch=vectors(), loss_fn=cross_entropy)
    result.step(vectors())
    left = [weakref.ref(copied.host) for copied in copies]
    copies.clear()
    gc.collect()
    assert left and not any(host() is not None for host in left)


def test_a_backward_may_be_run_twice_and_in_part(copies):
    model = seeded(Perceptron, dropout=0.0)
    rewritten(model, offload("layers"), batch=vectors(), loss_fn=cross_entropy)
    x, _ = vectors()
    gradients = []
    loss = model(x).square().sum()
    for _ in range(2):
        gradients.append(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))
    (alone,) = torch.autograd.grad(loss, [model.layers[2][0].weight])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
    assert torch.equal(alone, gradients[0][4])


def test_the_copy_on_the_device_is_released_with_the_last_tensor_that_asks_for_it():
    storage = torch.arange(4.0)
    host = rule.HostCopy(storage)
    parts, key = (storage[:2], storage[2:]), rule.key_of(storage)
    saved = [rule.OffloadedTensor(host, part, rule.StorageView(key, part)) for part in parts]
    for _ in range(2):  # a graph may be traversed twice
        assert torch.equal(saved[0].tensor(), storage[:2]) and host.back is not None
        assert torch.equal(saved[1].tensor(), storage[2:]) and host.back is None


def test_a_deep_copy_trains_its_own_weights():
    """The second rule wraps a forward that the first one has put on the instance."""
    model = seeded(Perceptron)
    decisions = Checkpoint(modules=LAYERS), offload(*LAYERS, inputs_of=LAYERS)
    rewritten(model, *decisions, batch=vectors(), loss_fn=cross_entropy)
    other = copy.deepcopy(model)
    other(vectors()[0]).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in other.parameters())


def test_without_gradients_nothing_is_copied_and_undo_restores(copies):
    model = seeded(Perceptron)
    result = rewritten(
        model, Checkpoint(modules=LAYERS), offload(*LAYERS, inputs_of=LAYERS), batch=vectors(), loss_fn=cross_entropy
    )
    with torch.no_grad():
        model(vectors()[0])
    assert not copies
    result.undo()
    assert not any("forward" in vars(module) for module in model.modules())


class Changed(nn.Module):
    """Saves a tensor that no gradient needs, changes it in place, and saves it again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ChangedInside()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.sin())


class ChangedInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = x @ self.weight
        self.square = (product * product).detach()
        unused = product * product
        product.add_(1)
        return product.sin()[:, :3] + 0 * unused.detach()[:, :3]


def test_what_was_written_to_is_copied_again(copies):
    assert not differences(seeded(Changed), offload("inner"), batches=[vectors()], loss_fn=cross_entropy)
    assert len({copied.reference.cdata for copied in copies}) < len(copies)


class Widths(nn.Module):
    """Wide and narrow layers; activations whose result is saved by two modules; results used twice."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        pairs = list(itertools.pairwise((16, *widths)))
        self.blocks = nn.ModuleList(Block(*pair) for pair in pairs)
        self.head = nn.Linear(widths[-1], 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.linear, self.act, self.out = nn.Linear(before, after), nn.ReLU(), nn.Linear(after, after)
        self.gate = nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.linear(x))
        product = self.out(y) * self.gate(y)
        return product.sigmoid() if product.shape == x.shape else product


@pytest.mark.parametrize("widths", [(64, 16, 16), (16, 128, 8), (8, 8, 96), (48, 48, 48)])
@pytest.mark.thorough
def test_the_promise_holds_for_each_unit_and_for_many_together(widths):
    work = workload(
        Widths(widths), (torch.zeros(1 << 15, 16), torch.zeros(1 << 15, dtype=torch.long)), loss_fn=cross_entropy,
        optimizer="sgd",
    )  # fmt: skip
    found, curve = units(what_if(work), kinds=(Checkpoint, Offload))
    generator = random.Random(0)
    on_host = [number for number, unit in enumerate(found.units) if unit.on_host]
    selections = [[number] for number in on_host]
    for share in (1.0, 1.0, 1.0, 0.5, 0.5, 0.5):
        chosen: list[int] = []
        for unit in generator.sample(on_host, len(on_host)):
            nested = any({unit, other} <= set(path) for other in chosen for path in found.problem.paths)
            if not nested and generator.random() < share:
                chosen.append(unit)
        selections.append(chosen)
    assert {found.units[number].runs_again for number in on_host} == {True, False}
    for chosen in filter(None, selections):
        decisions = found.decisions(chosen)
        assert curve.peak(chosen) == plain(work, decisions, card=BARE).live_bytes().max(), decisions


class TwoDtypes(nn.Module):
    """Saves views of one storage in two dtypes; the larger item size does not divide the size of the storage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = torch.zeros(x.numel() * 4 + 1, dtype=torch.uint8, device=x.device)
        y = (self.linear(x) * whole[:-1].view(torch.float32).view_as(x)).tanh()
        return y + (y * whole[: len(x), None]).sin()


def test_the_promise_holds_for_a_storage_seen_in_two_dtypes():
    samples = 1 << 15
    model = nn.Sequential(nn.Linear(16, 16), TwoDtypes(), TwoDtypes(), nn.Linear(16, 3))
    batch = torch.zeros(samples, 16), torch.zeros(samples, dtype=torch.long)
    work = workload(model, batch, loss_fn=cross_entropy, optimizer="sgd")
    found, curve = units(what_if(work), kinds=(Offload,))
    chosen = [number for number, unit in enumerate(found.units) if unit.module in ("1", "2")]
    assert len(chosen) == 2
    assert curve.peak(chosen) == plain(work, found.decisions(chosen), card=BARE).live_bytes().max() < curve.peak(())


def test_what_comes_back_is_there_before_the_second_run_or_from_the_first_to_the_last_use():
    samples, wide = 1 << 15, 64
    model, batch = Widths((wide, wide)), (torch.zeros(samples, 16), torch.zeros(samples, dtype=torch.long))
    graph = what_if(workload(model, batch, loss_fn=cross_entropy, optimizer="sgd"))
    problem = units(graph, kinds=(Checkpoint, Offload))[0]
    block = [number for number, unit in enumerate(problem.units) if unit.module == "blocks.1" and not unit.kept]
    again, from_host, saved = block
    extra = {r.unit: r.extra_bytes for r in problem.problem.recomputes}
    assert extra[from_host] == extra[again] + samples * wide * 4
    assert saved not in extra
    # What the activation returned, which three ops save: asked for by the last one first. It is held unless another
    # unit of this module is selected, and so whenever `saved` is, because only one of them can be.
    others = tuple(
        unit for unit in range(len(problem.units)) if problem.units[unit].module == "blocks.1" and unit != saved
    )
    held = [hold for hold in problem.problem.holds if others in hold.unless]
    assert any(set(block) <= set(path) for path in problem.problem.paths)
    assert {hold.size_bytes for hold in held} == {samples * wide * 4}
    assert sum(hold.stop - hold.start for hold in held) > 2


def big_batches():
    return transformer(
        "llama", "LlamaForCausalLM", batch_size=32, seq_len=128, num_hidden_layers=4, hidden_size=128,
        intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, vocab_size=128,
    )  # fmt: skip


@pytest.mark.parametrize("precision", [(), (Precision(dtype="bf16"),)], ids=["fp32", "bf16"])
@pytest.mark.thorough
def test_the_promise_of_any_selection_is_what_its_rehearsal_takes(precision):
    work = big_batches()
    found, curve = units(what_if(work, precision))
    generator, baseline = random.Random(0), curve.peak(())
    on_host = [number for number, unit in enumerate(found.units) if unit.on_host]
    peaks = []
    for pool, share in ((on_host, 1.0), (on_host, 0.4), (range(len(found.units)), 1.0)):
        chosen: list[int] = []
        for unit in generator.sample(list(pool), len(pool)):
            nested = any({unit, other} <= set(path) for other in chosen for path in found.problem.paths)
            if not nested and generator.random() < share:
                chosen.append(unit)
        decisions = found.decisions(chosen)
        assert any(isinstance(decision, Offload) for decision in decisions)
        peaks.append(curve.peak(chosen))
        assert peaks[-1] == plain(work, (*precision, *decisions), card=BARE).live_bytes().max()
    assert min(peaks) < 0.65 * baseline


class Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(depth))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.thorough
def test_below_what_recompute_reaches_a_plan_holds_inputs_on_the_host():
    with torch.device("meta"):
        model, batch = Deep(24), (torch.zeros(1 << 15, 16), torch.zeros(1 << 15, dtype=torch.long))
    options = {"gpu": "bare", "loss_fn": cross_entropy, "optimizer": "sgd", "fidelity": "exact"}
    without = planner.plan(model, batch, vram=1 << 20, only=("checkpoint", "replay"), **options)
    plan = planner.plan(model, batch, vram=1 << 20, only=("checkpoint", "replay", "offload"), **options)
    assert not plan.fits and plan.decision(Offload) is not None
    assert plan.peak.allocated_bytes < 0.8 * without.peak.allocated_bytes
    again = planner.plan(model, batch, vram=plan.peak.total_bytes, only=("checkpoint", "offload"), **options)
    assert again.fits and again.solver.promised_bytes == again.solver.certified_bytes


def test_its_time_is_that_of_the_link():
    with torch.device("meta"):
        model, batch = Deep(2), (torch.zeros(1 << 15, 16), torch.zeros(1 << 15, dtype=torch.long))
    work = workload(model, batch, loss_fn=cross_entropy, optimizer="sgd")
    graph = plain(work, (Offload(modules=("layers.0",), inputs_of=(), from_bytes=1 << 20),), card=CARD)
    copied = [op for op in graph.ops if op.host_bytes]
    # what the tanh made is saved by it and by the layer after it: one copy there, one back
    assert [op.host_bytes for op in copied] == [(1 << 15) * 64 * 4] * 2


MODEL = """\
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(16, 16)) for _ in range(4))

    def forward(self, x, _):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


def build():
    return Net(), (torch.randn(8, 16), torch.zeros(8))
"""


@pytest.mark.thorough
def test_the_emitted_file_loses_the_same(tmp_path):
    chosen = Checkpoint(modules=("layers.1",)), offload("layers.0", "layers.1", inputs_of=("layers.1",))
    on_host, nowhere = 'return tensor.device.type == "cpu"', "return False"
    losses = printed_by_emitted_files(tmp_path, MODEL, (), chosen, edit=lambda text: text.replace(on_host, nowhere))
    assert nowhere in (tmp_path / "train.py").read_text()
    assert losses[0] == losses[1] and losses[0].count("loss") == 3


def test_the_decision_survives_json_and_describes_itself():
    decision = offload("a.0", "a.1", "b", inputs_of=("b",))
    assert decision_from_json(decision.to_json()) == decision
    assert decision.describe() == "offload to pinned host memory: tensors saved in a.{0-1}; inputs of b"


@pytest.mark.parametrize(
    "fields",
    [
        {"modules": (), "inputs_of": (), "from_bytes": 1},
        {"modules": ("a",), "inputs_of": ("b",), "from_bytes": 1},
        {"modules": ("a",), "inputs_of": (), "from_bytes": 0},
        {"modules": ("a",), "inputs_of": (), "from_bytes": 1.5},
    ],
)
def test_what_contradicts_itself_is_refused(fields):
    with pytest.raises(DecisionError, match="offload"):
        Offload(**fields)
