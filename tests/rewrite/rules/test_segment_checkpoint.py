"""Segments that are recomputed op by op give the same bits, need no more memory than promised, and leak nothing."""

from __future__ import annotations

import copy
import dataclasses
import gc
import random
import weakref

import pytest
import torch
from torch import nn

from planner.errors import DecisionError
from planner.plan_types.decisions import Accumulation, Precision
from planner.plan_types.recompute_decisions import Replay
from planner.plan_types.techniques import decision_from_json
from planner.rewrite.portable import replay_tape
from planner.rewrite.portable.replay_ops import StorageView, may_overlap
from planner.workload.workload import workload
from tests.support.flat_models import (
    Attention,
    Complex,
    Convolutions,
    Flat,
    Interrupted,
    Odd,
    Perceptron,
    Statistics,
    Written,
)
from tests.support.training import (
    cross_entropy,
    differences,
    images,
    printed_by_emitted_files,
    rewritten,
    seeded,
    train,
    vectors,
)
from tests.support.workloads import BARE, CARD, plain, units, what_if

pytestmark = pytest.mark.slow

MODELS = {
    model.__name__: (model, images if model is Convolutions else vectors)
    for model in (Perceptron, Convolutions, Attention, Odd, Interrupted, Written, Complex, Statistics)
}


def op_count(model: nn.Module, batch: tuple) -> int:
    with replay_tape.Tape((), torch.device("cpu")) as ops:
        copy.deepcopy(model)(batch[0])
    return ops.count


def random_segments(ops: int, chance: random.Random) -> Replay:
    """Return random segments of ops, some of whose results are kept."""
    cuts = sorted(chance.sample(range(ops + 1), 2 * chance.randint(1, 4)))
    ranges = tuple(zip(cuts[::2], cuts[1::2], strict=True))
    kept = tuple(tuple(n for n in range(*r) if chance.random() < 0.2) for r in ranges)
    often = chance.choice((0.0, 0.2, 0.6))
    stops = tuple(tuple(n for n in range(r[0] + 1, r[1]) if chance.random() < often) for r in ranges)
    return Replay(modules=("",) * len(ranges), stretches=ranges, kept=kept, stops=stops)


@pytest.mark.parametrize("name", MODELS)
def test_segments_anywhere_train_to_the_same_bits(name):
    build, batch_of = MODELS[name]
    model, batches = seeded(build), [batch_of(seed=seed) for seed in range(3)]
    ops = op_count(model, batches[0])
    for seed in range(6):
        decision = random_segments(ops, random.Random(seed))
        assert differences(model, decision, batches=batches, loss_fn=cross_entropy) == [], decision


@pytest.mark.parametrize("name", ["Perceptron", "Convolutions", "Attention"])
def test_under_autocast_and_in_micro_batches_too(name):
    build, batch_of = MODELS[name]
    model, batches = seeded(build), [batch_of(seed=seed) for seed in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        ops = op_count(model, batches[0])
    for seed in range(2):
        replay = random_segments(ops, random.Random(seed))
        for others in ((Precision(dtype="bf16"),), (Accumulation(micro_batch_size=2, micro_batches=2),)):
            wanted = trained(model, *others, batches=[tuple(t[:4] for t in batch) for batch in batches])
            found = trained(model, *others, replay, batches=[tuple(t[:4] for t in batch) for batch in batches])
            assert all(map(torch.equal, wanted, found))


def trained(model: nn.Module, *decisions, batches) -> list[torch.Tensor]:
    result = rewritten(copy.deepcopy(model), *decisions, batch=batches[0], loss_fn=cross_entropy)
    losses, _ = train(result, batches)
    return [*losses, *result.module.state_dict().values()]


# ---- what runs again ------------------------------------------------------------------------------------------------


def ops_again(model: nn.Module, stretches, batch) -> list[str]:
    """Return the names of the ops that run in backward in addition to those of the baseline."""

    def names(module: nn.Module) -> list[str]:
        loss = cross_entropy(module(batch[0]), batch)
        with Names() as ran:
            loss.backward()
        return ran.names

    result = rewritten(copy.deepcopy(model), replay_of(stretches), batch=batch, loss_fn=cross_entropy)
    before, after = names(copy.deepcopy(model)), names(result.module)
    for name in before:
        after.remove(name)
    return [name for name in after if name not in ("aten.detach.default", "aten.as_strided.default")]


class Names(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(str(op))
        return op(*args, **(kwargs or {}))


def replay_of(stretches) -> Replay:
    return Replay(
        modules=("",) * len(stretches),
        stretches=tuple((start, stop) for start, stop, _ in stretches),
        kept=tuple(kept for *_, kept in stretches),
    )


class Chain(Flat):
    """A model that runs exactly the ops `NAMES`."""

    NAMES = ("mm", "tanh", "exp", "mm", "sigmoid", "mm")

    def __init__(self) -> None:
        super().__init__(one=(16, 16), depth=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.linear(x, self.one0).tanh().exp()
        return nn.functional.linear(nn.functional.linear(x, self.one0).sigmoid(), self.head)


@pytest.mark.parametrize(
    ("stretch", "again"),
    [
        ((0, 5, ()), ["mm", "tanh", "exp", "mm", "sigmoid"]),
        ((0, 6, ()), ["mm", "tanh", "exp", "mm", "sigmoid"]),  # the last product is not saved
        ((0, 4, ()), ["mm", "tanh", "exp"]),
        ((0, 5, (0,)), ["tanh", "exp", "mm", "sigmoid"]),
        ((0, 5, (0, 3)), ["tanh", "exp", "sigmoid"]),
        ((1, 3, ()), ["tanh", "exp"]),
        ((2, 3, ()), ["exp"]),
        ((5, 6, ()), []),
    ],
    ids=str,
)
def test_only_what_leads_to_saved_tensors_runs_again(stretch, again):
    names = ops_again(seeded(Chain), [stretch], vectors())
    assert sorted(names) == sorted(f"aten.{name}.default" for name in again)


def test_a_graph_can_be_traversed_more_than_once():
    model, batch = seeded(Perceptron), vectors()
    torch.manual_seed(0)
    wanted = torch.autograd.grad(cross_entropy(model(batch[0]), batch), model.parameters())
    result = rewritten(model, replay_of([(0, 9, ()), (9, 14, ())]), batch=batch, loss_fn=cross_entropy)
    torch.manual_seed(0)
    loss = cross_entropy(result.module(batch[0]), batch)
    for _ in range(3):
        found = torch.autograd.grad(loss, model.parameters(), retain_graph=True)
        assert all(map(torch.equal, wanted, found))


def test_gradients_of_gradients():
    model, batch = seeded(Attention).double(), tuple(t.double() if t.is_floating_point() else t for t in vectors())

    def penalty(module: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            x = batch[0].clone().requires_grad_()
            (grad,) = torch.autograd.grad(cross_entropy(module(x), batch), x, create_graph=True)
            return list(torch.autograd.grad(grad.square().sum(), list(module.parameters()), allow_unused=True))

    wanted = penalty(model)
    found = penalty(rewritten(model, replay_of([(0, 12, ()), (14, 25, ())]), batch=batch, loss_fn=cross_entropy).module)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_random_numbers_of_others_go_on_where_they_were():
    model, batch = seeded(Perceptron), vectors()
    result = rewritten(model, replay_of([(0, 14, ())]), batch=batch, loss_fn=cross_entropy)
    torch.manual_seed(0)
    loss = cross_entropy(result.module(batch[0]), batch)
    state = torch.get_rng_state()
    loss.backward()
    assert torch.equal(state, torch.get_rng_state())


def test_a_backward_inside_of_autocast_recomputes_as_the_forward_computed():
    class InFullPrecision(Flat):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                y = nn.functional.linear(x, self.weight0).tanh()
            return nn.functional.linear(y, self.head)

    model, batch, found = seeded(InFullPrecision, depth=1, weight=(16, 16)), vectors(), []
    for decisions in ((), (replay_of([(0, 3, ())]),)):
        result = rewritten(copy.deepcopy(model), *decisions, batch=batch, loss_fn=cross_entropy)
        with torch.autocast("cpu", torch.bfloat16):
            cross_entropy(result.module(batch[0]), batch).backward()
        found.append([parameter.grad for parameter in result.module.parameters()])
    assert all(map(torch.equal, *found))


def test_what_a_replay_starts_from_must_not_change_after_the_forward():
    class Doubled(Flat):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x.tanh() * x.exp(), self.head)

    model, batch = seeded(Doubled, depth=0), vectors()
    result = rewritten(model, replay_of([(0, 4, ())]), batch=batch, loss_fn=cross_entropy)
    loss = cross_entropy(result.module(batch[0]), batch)
    batch[0].add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_what_is_saved_must_not_change_in_the_forward():
    """Autograd refuses it without a replay, too."""

    class Changed(Flat):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = nn.functional.linear(x, self.weight0).exp()
            return nn.functional.linear(y.add_(1), self.head)

    model, batch = seeded(Changed, depth=1, weight=(16, 16)), vectors()
    for decisions in ((), (replay_of([(0, 4, ())]),), (replay_of([(0, 2, ())]),)):
        result = rewritten(copy.deepcopy(model), *decisions, batch=batch, loss_fn=cross_entropy)
        if decisions and decisions[0].stretches == ((0, 2),):
            result.step(batch)  # what it was before the change is made again: the gradient is right
        else:
            with pytest.raises(RuntimeError, match=r"inplace operation|changed in place"):
                result.step(batch)


def test_a_chunk_may_be_saved_and_another_chunk_be_written():
    """Recurrent cells compute their gates in place, in chunks of one tensor that count their writes separately."""

    class Cell(Flat):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                first, second = nn.functional.linear(x, self.weight0).unsafe_chunk(2, 1)
                x = x + first.sigmoid_() * second.tanh_()
            return nn.functional.linear(x, self.head)

    model, batches = seeded(Cell, depth=1, weight=(32, 16)), [vectors()]
    ops = op_count(model, vectors())
    expected = trained(copy.deepcopy(model), batches=batches)
    for stops in ((), (6,)):
        found = trained(copy.deepcopy(model), Replay(
            modules=("",), stretches=((0, ops),), kept=((),), stops=(stops,)), batches=batches)  # fmt: skip
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("seed", range(5))
def test_views_are_reported_as_disjoint_only_if_they_share_no_element(seed):
    chance, whole, disjoint = random.Random(seed), torch.arange(120).reshape(4, 6, 5), 0

    def view() -> torch.Tensor:
        found = whole
        for _ in range(chance.randint(1, 3)):
            dim = chance.randrange(3)
            start = chance.randrange(found.shape[dim])
            found = found.narrow(dim, start, chance.randint(1, found.shape[dim] - start))
            found = found.transpose(0, 2) if chance.random() < 0.2 else found
            found = found[::2] if chance.random() < 0.1 else found
        return found

    for _ in range(500):
        one, other = view(), view()
        if not may_overlap(StorageView(0, one), StorageView(0, other)):
            disjoint += 1
            assert not set(one.flatten().tolist()) & set(other.flatten().tolist())
    assert disjoint > 50


def test_nothing_outlives_its_use():
    """Memory is freed without Python's garbage collector, also if there is no backward."""
    model, batch = seeded(Perceptron), vectors()
    result = rewritten(model, replay_of([(0, 9, ()), (9, 14, ())]), batch=batch, loss_fn=cross_entropy)
    cross_entropy(result.module(batch[0]), batch).backward()
    made: list[weakref.ref] = []
    before = replay_tape.Segment.__init__

    def noting(self, *args, **options) -> None:
        before(self, *args, **options)
        made.append(weakref.ref(self))

    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replay_tape.Segment, "__init__", noting)
            output = result.module(batch[0])
            held = [stretch() is not None for stretch in made]
            del output
            after = [stretch() is not None for stretch in made]
            cross_entropy(result.module(batch[0]), batch).backward()
            at_the_end = [stretch() is not None for stretch in made]
    finally:
        gc.enable()
    assert held == [True] * 2 and after == [False] * 2 and at_the_end == [False] * 4


def test_without_gradients_and_after_undo_the_forward_is_the_users():
    model, batch = seeded(Perceptron), vectors()
    result = rewritten(model, replay_of([(0, 9, ())]), batch=batch, loss_fn=cross_entropy)
    assert "forward" in vars(model)
    with torch.no_grad():
        assert model.eval()(batch[0]).shape == (8, 4)
    result.undo()
    assert "forward" not in vars(model)


# ---- what is promised ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "card"), [("Perceptron", BARE), ("Convolutions", CARD), ("Attention", CARD)], ids=str)
@pytest.mark.thorough_after(1)
def test_the_curve_of_the_program_is_that_of_the_rewritten_step(name, card):
    build, batch_of = MODELS[name]
    work = workload(seeded(build), batch_of(), loss_fn=cross_entropy)
    found, curve = units(what_if(work, card=card))
    assert any(unit.segment is not None for unit in found.units)
    chance = random.Random(0)
    for _ in range(6):
        chosen: list[int] = []
        for unit in chance.sample(range(len(found.units)), chance.randint(1, len(found.units))):
            if all(len({*chosen, unit} & set(path)) <= 1 for path in found.problem.paths):
                chosen.append(unit)
        decisions = found.decisions(chosen)
        assert curve.peak(tuple(sorted(chosen))) == plain(work, decisions, card=card).live_bytes().max(), decisions


# ---- emitted, saved, refused -----------------------------------------------------------------------------------------

MODEL = """
import torch
import torch.nn.functional as F


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(16, 16) / 4 for _ in range(5))

    def forward(self, x, _):
        for weight in self.weights:
            x = x + F.dropout(torch.tanh(F.linear(x, weight)), 0.1)
        return x.square().mean()


def build():
    return Net(), (torch.randn(8, 16), torch.zeros(8))
"""


@pytest.mark.thorough
def test_the_emitted_file_loses_the_same(tmp_path):
    decision = dataclasses.replace(replay_of([(0, 8, (1,)), (8, 16, ())]), stops=((), (10, 13)))
    losses = printed_by_emitted_files(tmp_path, MODEL, (), (decision,))
    assert losses[0] == losses[1] and losses[0].count("loss") == 3


def test_the_decision_survives_json_and_describes_itself():
    decision = replay_of([(0, 8, (1,)), (8, 16, ())])
    assert decision_from_json(decision.to_json()) == decision
    described = "segment checkpointing: ops 0-7, 8-15 of the model's forward, keeping 1 op output"
    assert decision.describe() == described
    divided = dataclasses.replace(decision, stops=((), (10, 13)))
    assert decision_from_json(divided.to_json()) == divided
    assert divided.describe() == f"{described}, recomputed in 3 parts"


@pytest.mark.parametrize(
    "fields",
    [
        {"modules": (), "stretches": (), "kept": ()},
        {"modules": ("",), "stretches": ((0, 2), (2, 4)), "kept": ((),)},
        {"modules": ("",), "stretches": ((2, 2),), "kept": ((),)},
        {"modules": ("", ""), "stretches": ((0, 4), (3, 6)), "kept": ((), ())},
        {"modules": ("",), "stretches": ((0, 4),), "kept": ((5,),)},
        {"modules": ("",), "stretches": ((-1, 4),), "kept": ((),)},
        {"modules": ("",), "stretches": ((0, 4),), "kept": ((),), "stops": ((0,),)},
        {"modules": ("",), "stretches": ((0, 4),), "kept": ((),), "stops": ((3, 2),)},
        {"modules": ("",), "stretches": ((0, 4),), "kept": ((),), "stops": ((1,), (2,))},
    ],
    ids=str,
)
def test_inconsistent_segments_are_refused(fields):
    with pytest.raises(DecisionError, match="segment-checkpoint"):
        Replay(**fields)
