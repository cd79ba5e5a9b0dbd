"""Recompute all of a module but its products: the same bits, the products once, and what may not be kept."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from planner_cases import transformer, units, what_if
from rewrite_cases import (
    Convolutional,
    cross_entropy,
    differences,
    gpt2,
    images,
    rewritten,
    roberta,
    seeded,
    tokens,
    vectors,
)
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from planner.decisions import Checkpoint, decision_from_json
from planner.errors import DecisionError
from planner.workload import workload

RULE = sys.modules["rewrite.rules.checkpoint"]
LAYERS = {"roberta": "roberta.encoder.layer.{}", "gpt2": "transformer.h.{}"}
BUILDS = {"roberta": roberta, "gpt2": gpt2}


class Attention(nn.Module):
    """Attention with dropout inside of it, a dropout after it, and an activation in place."""

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
    """The largest choice of products that the planner offers for a module."""
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
    """Without dropout in attention, which runs other products on the CPU."""
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
    """Also numbers that the planner would not choose; attention without dropout draws nothing."""
    model = seeded(lambda: Net(Attention(), nn.Linear(3, 16), Attention()))
    names = ("blocks.0", "blocks.2")
    allowed = tuple(number for number in numbers if number != 2)  # its result is changed in place
    decision = Checkpoint(modules=names, kept=(allowed, allowed))
    assert differences(model, decision, batches=[vectors(seed=s) for s in range(4)], loss_fn=cross_entropy) == []


def test_attention_that_drops_out_is_run_again_whatever_its_number():
    """A plan's numbers are those of its card; elsewhere attention may be another op, and then they mean others."""
    model = seeded(lambda: Net(Attention(dropout=0.3), nn.Linear(3, 16), Attention(dropout=0.3)))
    decision = Checkpoint(modules=("blocks.0", "blocks.2"), kept=((0, 1), (0, 1)))
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    assert RULE.drops(flash.default, (None, None, None, 0.1), {}) and RULE.drops(flash.default, (), {"dropout_p": 0.1})
    assert not RULE.drops(flash.default, (None, None, None), {}) and not RULE.drops(flash.default, (None,) * 3, {})
    for op, place in RULE.PRODUCTS.items():
        names = [argument.name for argument in op._schema.arguments]
        assert place == (names.index("dropout_p") if "dropout_p" in names else None)
    assert differences(model, decision, batches=[vectors(seed=s) for s in range(4)], loss_fn=cross_entropy) == []


def test_a_result_that_is_changed_in_place_is_refused_when_named_by_hand():
    model = Net(Attention(), nn.Linear(3, 3))
    result = rewritten(model, Checkpoint(modules=("blocks.0",), kept=((3, 2),)), batch=vectors(), loss_fn=cross_entropy)
    with pytest.raises(RuntimeError, match="has been mutated"):
        result.step(vectors())


def attention_on_the_card(dropout: float) -> set[tuple[str, tuple[int, ...]]]:
    with torch.device("meta"):
        model = Net(Attention(dropout), nn.Linear(3, 16), Attention(dropout), nn.Linear(3, 3))
    batch = (torch.zeros(64, 16), torch.zeros(64, dtype=torch.long))
    found = units(what_if(workload(model, batch, loss_fn=cross_entropy)))[0]
    return {(unit.module, unit.kept) for unit in found.units if unit.kept}


def test_neither_results_changed_in_place_nor_products_that_draw_random_numbers_are_offered():
    offered = {numbers for module, kept in attention_on_the_card(0.0) for numbers in kept if module == "blocks.0"}
    assert offered == {0, 1}  # of: linear, attention, linear with relu_ on it, the last linear that nothing needs
    offered = {numbers for module, kept in attention_on_the_card(0.1) for numbers in kept if module == "blocks.0"}
    assert offered == {0}


def test_where_products_differ_much_in_worth_the_better_ones_can_be_kept_alone():
    work = transformer("gpt2", "GPT2LMHeadModel", batch_size=2, seq_len=512, n_layer=2, vocab_size=64)
    choices = [unit.kept for unit in units(what_if(work))[0].units if unit.module == "transformer.h.0" and unit.kept]
    assert len(choices) == 2 and set(choices[1]) < set(choices[0])


def test_the_decision_says_what_it_keeps_and_survives_its_file():
    decision = Checkpoint(modules=("a.0", "a.1", "b"), kept=((0, 2), (0, 2), ()))
    assert decision_from_json(json.loads(json.dumps(decision.to_json()))) == decision
    assert decision.describe() == (
        "recompute 1 module in backward: b; 2 modules but for 2 products each in backward: a.{0-1}"
    )


@pytest.mark.parametrize("kept", [((0,),), ((0,), (-1,)), ((0,), (True,)), ((0,), ("1",))])
def test_what_is_kept_is_said_of_each_module_in_numbers(kept):
    with pytest.raises(DecisionError, match=r"say it of each|numbered from 0"):
        Checkpoint(modules=("a", "b"), kept=kept)
