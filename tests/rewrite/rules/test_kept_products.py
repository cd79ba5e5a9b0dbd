"""Selective checkpointing: the bits are the same, kept products run once, and some results must not be kept."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from planner.errors import DecisionError
from planner.plan_types.decisions import Precision
from planner.plan_types.recompute_decisions import Checkpoint
from planner.plan_types.techniques import decision_from_json
from planner.rewrite.rules import checkpoint
from planner.workload.workload import workload
from tests.support.training import (
    Convolutional,
    cross_entropy,
    differences,
    gpt2,
    images,
    rewritten,
    roberta,
    seeded,
    tokens,
    train,
    vectors,
)
from tests.support.workloads import transformer, units, what_if

pytestmark = pytest.mark.slow

LAYERS = {"roberta": "roberta.encoder.layer.{}", "gpt2": "transformer.h.{}"}
BUILDS = {"roberta": roberta, "gpt2": gpt2}


class Attention(nn.Module):
    """Attention with dropout, a dropout after it, and an in-place activation."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.first, self.second, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.dropout(self.inner(x), 0.2))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.first(x).view(1, -1, 2, 8).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=self.dropout)
        mixed = mixed.transpose(1, 2).reshape(x.shape)
        return torch.relu_(self.second(nn.functional.dropout(mixed, 0.2)))


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def kept_of(model: nn.Module, batch, name: str, loss_fn=None) -> tuple[int, ...]:
    """Return the largest set of products that the planner offers to keep for a module."""
    found = units(what_if(workload(model, batch, loss_fn=loss_fn)))[0]
    return max((unit.kept for unit in found.units if unit.module == name), key=len)


def flops(model: nn.Module, *decisions, batch, **options) -> int:
    result = rewritten(model, *decisions, batch=batch, **options)
    with FlopCounterMode(display=False) as counter:
        result.step(batch)
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", BUILDS)
def test_transformers_with_dropout_train_to_the_same_bits(kind):
    model, names = seeded(BUILDS[kind], use_cache=False), [LAYERS[kind].format(number) for number in range(2)]
    kept = kept_of(model, tokens(), names[0])
    assert kept
    decision = Checkpoint(modules=tuple(names), kept=(kept, kept[1:]))
    assert differences(model, decision, batches=[tokens(seed=seed) for seed in range(6)]) == []


@pytest.mark.parametrize("modules", [("twice",), ("first", "twice")], ids=" ".join)
def test_convolutions_with_batch_norm_train_to_the_same_bits(modules):
    model = seeded(Convolutional)
    decision = Checkpoint(modules=modules, kept=((0,),) * len(modules))
    batches = [images(seed=seed) for seed in range(6)]
    assert differences(model, decision, batches=batches, loss_fn=cross_entropy) == []


def test_products_that_are_kept_are_not_computed_again():
    """Attention has no dropout here, because with dropout it runs other products on the CPU."""
    batch = tokens()
    plain = flops(seeded(gpt2, attn_pdrop=0.0), batch=batch)
    name = LAYERS["gpt2"].format(0)
    kept = kept_of(seeded(gpt2, attn_pdrop=0.0), batch, name)
    whole, partly = (
        flops(seeded(gpt2, attn_pdrop=0.0), Checkpoint(modules=(name,), kept=numbers), batch=batch)
        for numbers in ((), (kept,))
    )
    assert plain == partly < whole
    without_one = Checkpoint(modules=(name,), kept=(kept[1:],))
    assert partly < flops(seeded(gpt2, attn_pdrop=0.0), without_one, batch=batch) < whole


@pytest.mark.parametrize("numbers", [(), (0,), (0, 1), (0, 1, 2)], ids=str)
def test_any_numbers_train_to_the_same_bits_where_nothing_random_is_skipped(numbers):
    """Numbers that the planner would not choose work too; attention without dropout draws no random numbers."""
    model = seeded(lambda: Net(Attention(), nn.Linear(3, 16), Attention()))
    names = ("blocks.0", "blocks.2")
    allowed = tuple(number for number in numbers if number != 2)  # its result is changed in place
    decision = Checkpoint(modules=names, kept=(allowed, allowed))
    assert differences(model, decision, batches=[vectors(seed=s) for s in range(4)], loss_fn=cross_entropy) == []


class Dropping(nn.Module):
    """Two dropouts, each after a product, each one op."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.native_dropout(self.first(x), 0.3, True)[0]
        return torch.native_dropout(self.second(x), 0.3, True)[0].sigmoid()


def test_what_draws_random_numbers_is_run_again_whatever_its_number(monkeypatch):
    """The numbers of a plan are those on its card. On another device attention may be another op and shift them."""
    monkeypatch.setitem(checkpoint.PRODUCTS, torch.ops.aten.native_dropout.default, 1)  # as attention that drops out
    model = seeded(lambda: Net(Dropping(), nn.Linear(16, 3)))
    decision = Checkpoint(modules=("blocks.0",), kept=((0, 1, 2),))
    assert differences(model, decision, batches=[vectors(seed=s) for s in range(4)], loss_fn=cross_entropy) == []


def test_where_attention_has_its_dropout():
    for op, place in checkpoint.PRODUCTS.items():
        names = [argument.name for argument in op._schema.arguments]
        assert place == (names.index("dropout_p") if "dropout_p" in names else None)
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert checkpoint.drops_out(flash, (None, None, None, 0.1), {}) and checkpoint.drops_out(
        flash, (), {"dropout_p": 0.1}
    )
    assert not checkpoint.drops_out(flash, (None, None, None), {})
    assert not checkpoint.drops_out(torch.ops.aten.mm.default, (None, None), {})


@pytest.mark.parametrize("kept", [((2,),), ((0, 1, 2, 3),)], ids=str)
def test_a_result_that_is_changed_in_place_is_computed_again_whatever_its_number(kept):
    model = seeded(lambda: Net(Attention(), nn.Linear(3, 3)))
    decision = Checkpoint(modules=("blocks.0",), kept=kept)
    assert differences(model, decision, batches=[vectors(seed=s) for s in range(3)], loss_fn=cross_entropy) == []


class Experts(nn.Module):
    """Four experts with two layers. Each layer is one product for all experts, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) / 4) for shape in ((16, 32), (32, 16)))
        self.register_buffer("ends", torch.tensor([2, 4, 6, 8], dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.gelu(nn.functional.grouped_mm(x, self.up, offs=self.ends))
        return torch.tanh(nn.functional.grouped_mm(inner, self.down, offs=self.ends))


def test_products_of_experts_are_kept_and_not_computed_again():
    batches = [vectors(seed=seed) for seed in range(3)]
    model = seeded(lambda: Net(Experts(), nn.Linear(16, 3)))
    kept = kept_of(model, batches[0], "blocks.0", cross_entropy)
    assert kept == (0, 1)
    decisions = [Checkpoint(modules=("blocks.0",), kept=numbers) for numbers in ((), (kept,))]
    whole, partly = (
        rewritten(copy.deepcopy(model), decision, batch=batches[0], loss_fn=cross_entropy) for decision in decisions
    )
    # Two in the forward, three for the gradients of the weights and of the inner values, and two in the recompute.
    assert (experts_calls(whole, batches[0]), experts_calls(partly, batches[0])) == (7, 5)
    assert differences(model, decisions[1], batches=batches, loss_fn=cross_entropy) == []


def experts_calls(result, batch) -> int:
    """Return the number of products of experts that a step computes."""
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: lambda *_, **__: 1}) as counter:
        result.step(batch)
    return counter.get_flop_counts()["Global"][torch.ops.aten._grouped_mm]


class ChangedOutside(nn.Module):
    """The caller changes a result of the module in place, which the recompute would read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = TwoResults(), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.inner(x)
        return self.head(first.mul_(2.0) + second)


class TwoResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.a(x)
        return first, self.b(torch.tanh(first))


class Cell(nn.Module):
    """On a CPU the cell changes chunks of its products in place; on a card it is one kernel."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.before, self.cell, self.head = nn.Linear(16, 16), kind(16, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        state = self.cell(x)
        state = self.cell(x, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class ByBatchSize(nn.Module):
    """Runs one more product for small batches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.d(x)) if len(x) < 8 else x
        return self.c(torch.relu_(self.b(torch.sin(self.a(x)))))


OTHERWISE = {
    "changed by the caller": (ChangedOutside, "inner", (0, 1)),
    "gated cell": (lambda: Cell(nn.GRUCell), "cell", (0, 1)),
    "cell with memory": (lambda: Cell(nn.LSTMCell), "cell", (0, 1)),
    "another batch size": (lambda: Net(ByBatchSize(), nn.Linear(16, 3)), "blocks.0", (0, 2)),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_where_products_are_others_than_on_the_card_training_is_the_same(case):
    build, name, numbers = OTHERWISE[case]
    decision = Checkpoint(modules=(name,), kept=(numbers,))
    batches = [vectors(samples=samples, seed=samples) for samples in (8, 5, 8, 3)]
    assert differences(seeded(build), decision, batches=batches, loss_fn=cross_entropy) == []


def test_a_result_is_taken_once_and_only_for_the_product_that_made_it():
    a, b, bias = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4)
    with checkpoint.KeepingResults((0, 1)) as first:
        kept = [torch.mm(a, b), torch.mm(b, a)]
    pointers = [result.data_ptr() for result in kept]
    with checkpoint.TakingResults(first.results):
        other, taken = torch.addmm(bias, a, b), torch.mm(b, a)
    assert torch.equal(other, torch.addmm(bias, a, b)) and taken.data_ptr() == pointers[1]
    with checkpoint.TakingResults(first.results):
        again = torch.mm(a, b), torch.mm(b, a)
    assert not {result.data_ptr() for result in again} & set(pointers)


def test_weights_that_autocast_has_cast_before_are_cast_again():
    """The second call of a module finds its weights in the cache of autocast; its recompute does not."""
    model = seeded(lambda: Net(Attention(), nn.Linear(3, 16), *[Twice()] * 2, nn.Linear(16, 3)))
    decisions = (Precision(dtype="bf16"), Checkpoint(modules=("blocks.2",), kept=((1,),)))
    batches = [vectors(seed=seed) for seed in range(3)]
    plain, other = (
        train(rewritten(copy.deepcopy(model), *chosen, batch=batches[0], loss_fn=cross_entropy), batches)
        for chosen in (decisions[:1], decisions)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain[0], other[0], strict=True))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(x))), 0.1))


def test_statistics_of_instance_norm_are_not_changed_by_a_recompute():
    build = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(3, 8, 3, padding=1), nn.InstanceNorm2d(8, track_running_stats=True), nn.ReLU(), nn.Conv2d(8, 4, 1)
    )
    model = seeded(lambda: nn.Sequential(build(), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    decision = Checkpoint(modules=("0",), kept=((0,),))
    assert differences(model, decision, batches=[images(seed=s) for s in range(3)], loss_fn=cross_entropy) == []


@pytest.mark.parametrize("kept", [(), ((0, 1),)], ids=str)
def test_a_backward_may_be_run_twice(kept):
    plain, model = seeded(Convolutional), seeded(Convolutional)
    rewritten(model, Checkpoint(modules=("twice",), kept=kept), batch=images(), loss_fn=cross_entropy)
    for one in (plain, model):
        torch.manual_seed(0)
        loss = cross_entropy(one(images()[0]), images())
        loss.backward(retain_graph=True)
        loss.backward()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


def test_nothing_is_kept_of_modules_with_hooks_which_run_outside_of_what_is_rewritten():
    def offered(hooked: bool) -> set[str]:
        with torch.device("meta"):
            model = Net(nn.Linear(16, 16), Twice(), Twice(), nn.Linear(16, 3))
        if hooked:
            model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] @ args[0].mT @ args[0],))
        batch = (torch.zeros(64, 16), torch.zeros(64, dtype=torch.long))
        found = units(what_if(workload(model, batch, loss_fn=cross_entropy)))[0]
        return {unit.module for unit in found.units if unit.kept}

    assert offered(hooked=False) - offered(hooked=True) == {"blocks.1"}


def attention_on_the_card(dropout: float) -> set[tuple[str, tuple[int, ...]]]:
    with torch.device("meta"):
        model = Net(Attention(dropout), nn.Linear(3, 16), Attention(dropout), nn.Linear(3, 3))
    batch = (torch.zeros(64, 16), torch.zeros(64, dtype=torch.long))
    found = units(what_if(workload(model, batch, loss_fn=cross_entropy)))[0]
    return {(unit.module, unit.kept) for unit in found.units if unit.kept and unit.segment is None}


def test_neither_results_changed_in_place_nor_products_that_draw_random_numbers_are_offered():
    offered = {numbers for module, kept in attention_on_the_card(0.0) for numbers in kept if module == "blocks.0"}
    assert offered == {0, 1}  # of: linear, attention, linear with relu_ on it, the last linear that nothing needs
    offered = {numbers for module, kept in attention_on_the_card(0.1) for numbers in kept if module == "blocks.0"}
    assert offered == {0}


def test_where_products_differ_much_in_worth_the_better_ones_can_be_kept_alone():
    work = transformer("gpt2", "GPT2LMHeadModel", batch_size=2, seq_len=512, n_layer=2, vocab_size=64)
    found, _ = units(what_if(work), kinds=(Checkpoint,))
    choices = [unit.kept for unit in found.units if unit.module == "transformer.h.0" and unit.kept]
    assert len(choices) == 2 and set(choices[1]) < set(choices[0])


def test_the_decision_says_what_it_keeps_and_survives_its_file():
    decision = Checkpoint(modules=("a.0", "a.1", "b"), kept=((0, 2), (0, 2), ()))
    assert decision_from_json(json.loads(json.dumps(decision.to_json()))) == decision
    assert decision.describe() == "activation checkpointing: b; a.{0-1}, keeping 2 op outputs each"


@pytest.mark.parametrize(
    "kept", [((0,),), None, (0, 1), *(((0,), other) for other in ((-1,), (True,), ("1",), (1, 1), (2, 1)))]
)
def test_the_description_gives_the_number_of_kept_results_per_module(kept):
    with pytest.raises(DecisionError, match=r"for each module, or leave kept empty|in ascending order"):
        Checkpoint(modules=("a", "b"), kept=kept)
