"""A loss that balances experts is not divided by `num_items_in_batch`, so that such batches are refused."""

from __future__ import annotations

import types

import pytest
import torch
import transformers

import planner
from planner.plan_types.decisions import Shard
from planner.rewrite import source
from planner.rewrite.loss_terms import loss_terms_of
from planner.sharded import _experts_notes
from planner.space.sharding import Cards
from planner.workload.call_convention import Calling
from planner.workload.model_loss import own_loss
from tests.support.training import plan_for


def mixtral(*, balances: bool) -> torch.nn.Module:
    config = transformers.MixtralConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        vocab_size=32,
        output_router_logits=balances,
    )
    return transformers.MixtralForCausalLM(config)


def emitted(model: torch.nn.Module) -> str:
    batch = {"input_ids": torch.zeros(2, 4, dtype=torch.long), "labels": torch.zeros(2, 4, dtype=torch.long)}
    return source(plan_for(model, batch, Shard(way="ddp", mesh=(2,))))


@pytest.mark.parametrize("balances", [False, True])
def test_an_emitted_file_refuses_a_number_of_items_for_a_loss_with_two_terms(balances):
    text = emitted(mixtral(balances=balances))
    assert ("return labels_of_experts(" in text) is balances
    scope: dict = {}
    body = text[text.index("LABELS_SHIFTED =") :]
    constants = [line for line in body.splitlines() if line.startswith(("LABELS_SHIFTED", "IGNORED", "LOSS_DIVIDES"))]
    needed = ("def counted_labels", "def labels_of", "def loss_terms")
    functions = [part for part in body.split("\n\n\n") if part.startswith(needed)]
    exec("import torch\n" + "\n".join(constants) + "\n\n\n" + "\n\n\n".join(functions), scope)
    batch = {"labels": torch.tensor([[1, 2, -100, 3]])}
    assert scope["loss_terms"](batch, 1) == 2  # the first label is left out, and one is ignored
    batch["num_items_in_batch"] = 2
    if balances:
        with pytest.raises(ValueError, match="leave num_items_in_batch out of the batch"):
            scope["loss_terms"](batch, 1)
    else:
        assert scope["loss_terms"](batch, 1) == 1.0


def test_the_live_step_does_so_too():
    model = mixtral(balances=True)
    assert own_loss(model, Calling.KEYWORDS, None).balances_experts
    rewriting = types.SimpleNamespace(model=model, calling=Calling.KEYWORDS, loss_fn=None, loss_weight=None)
    batch = {"labels": torch.tensor([[1, 2, -100, 3]]), "num_items_in_batch": 2}
    with pytest.raises(ValueError, match="leave num_items_in_batch out of the batch"):
        loss_terms_of(rewriting)(batch, 1)
    del batch["num_items_in_batch"]
    assert loss_terms_of(rewriting)(batch, 1) == 2


def test_a_plan_for_several_cards_says_what_differs_from_one_card():
    batch = {"input_ids": torch.zeros(4, 4, dtype=torch.long), "labels": torch.zeros(4, 4, dtype=torch.long)}
    plan = planner.plan(mixtral(balances=True), batch, cards=2, sharding="ddp", gpu="bare", vram=None)
    assert any("balances the experts over its own tokens" in note for note in plan.notes)


def test_a_plan_for_the_trainer_says_how_many_times_it_counts_the_balance():
    for prepared_by, is_named in (("", False), ("accelerate", True)):
        (note,) = _experts_notes(mixtral(balances=True), Cards(count=4, prepared_by=prepared_by))
        assert ("transformers' Trainer counts this term 4 times" in note) is is_named
    assert _experts_notes(mixtral(balances=False), Cards(count=4, prepared_by="accelerate")) == ()
