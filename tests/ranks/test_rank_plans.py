"""Plans for several cards: what is chosen, what is promised, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import planner
from planner import pipeline, profiles
from planner.errors import BudgetError, DecisionError, WorkloadError
from planner.estimate.allocation_stream import streams_of_blocks
from planner.estimate.footprint import measure
from planner.plan_types.decision_base import cards_of
from planner.plan_types.decisions import Shard
from planner.plan_types.techniques import decision_from_json
from planner.profiles.links import with_links
from planner.rewrite.application import apply_decisions
from planner.space.lower_bounds import TrainedParameters, lower_bound_bytes
from planner.space.sharding import Cards, repeated_blocks, shardings
from planner.workload.budget import Budget
from planner.workload.call_convention import Calling
from planner.workload.workload import workload
from tests.support.ranks import in_group
from tests.support.workloads import CARD, example

BARE = profiles.bare()


def llama(layers: int = 4) -> torch.nn.Module:
    with torch.device("meta"):
        config = LlamaConfig(
            vocab_size=2000, hidden_size=128, intermediate_size=352, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=4, tie_word_embeddings=False, use_cache=False,
        )  # fmt: skip
        return LlamaForCausalLM(config).train()


def batch(samples: int = 16, tokens: int = 64) -> dict[str, torch.Tensor]:
    ids = torch.zeros(samples, tokens, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


# ---- what is chosen -----------------------------------------------------------------------------------------------


def test_blocks_are_the_outermost_modules_of_one_class_in_a_container():
    assert repeated_blocks(llama(3)) == ("model.layers.0", "model.layers.1", "model.layers.2")
    assert repeated_blocks(example("unet.py:build").model) != ()
    assert repeated_blocks(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))) == ()


def test_a_block_that_shares_a_parameter_with_another_module_is_no_unit():
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList(), "out": torch.nn.Linear(8, 8)})
    for _ in range(3):
        model["blocks"].append(torch.nn.Sequential(torch.nn.Linear(8, 8)))
    model["out"].weight = model["blocks"][1][0].weight
    assert repeated_blocks(model) == ("blocks.0", "blocks.2")


def test_the_ways_are_those_that_the_user_allows():
    model = llama()
    assert [shard.way for shard in shardings(model, Cards(count=8))] == ["ddp", "zero1", "fsdp"]
    assert [shard.mesh for shard in shardings(model, Cards(count=8, mesh=(2, 4)))] == [(2, 4)]
    (kept,) = shardings(model, Cards(count=8, way="zero2"))
    assert kept.kept == kept.units == repeated_blocks(model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    {
        "no number": ({"count": 1}, "1 is not a number of cards"),
        "another mesh": ({"count": 8, "mesh": (2, 2)}, "a mesh of 2 x 2 cannot be used with 8 cards: .*, such as 2x4$"),
        "a mesh of one copy": (
            {"count": 20, "mesh": (1, 20)},
            "a mesh of 1 x 20 cannot be used with 20 cards: .*, such as 4x5$",
        ),
        "a prime number of cards": ({"count": 7, "mesh": (2, 4)}, "leave the mesh out: 7 cards cannot be divided"),
        "copies in a mesh": ({"count": 8, "mesh": (2, 4), "way": "ddp"}, "a mesh is for sharded models"),
        "offloaded copies": ({"count": 8, "way": "zero1", "offload": True}, "offloading is for sharded models"),
    }.values(),
)
def test_a_description_that_contradicts_itself_is_refused(arguments, message):
    with pytest.raises(WorkloadError, match=message):
        Cards(**arguments)


@pytest.mark.parametrize(
    "shard",
    [
        Shard(way="fsdp", mesh=(2, 4), units=("a", "b"), kept=("b",), offload=True),
        Shard(way="ddp", mesh=(8,)),
    ],
)
def test_a_decision_is_read_back(shard):
    assert decision_from_json(json.loads(json.dumps(shard.to_json()))) == shard
    assert shard.cards == 8


def test_copies_of_the_model_hold_all_parameters():
    model = llama()
    work = workload(model, batch())
    trained = TrainedParameters.of(work, [name for name, _ in model.named_parameters()])
    whole = sum(parameter.nbytes for parameter in model.parameters())

    def bound(shard: Shard) -> int:
        divided = dataclasses.replace(work, sharding=(shard,))
        kernel = decision_from_json({"kind": "optimizer-kernel", "kernel": "fused"})
        return lower_bound_bytes(divided, trained, optimizer_peak_bytes=0, state_bytes=0, config=(kernel,))

    assert bound(Shard(way="ddp", mesh=(4,))) == 2 * whole
    assert bound(Shard(way="fsdp", mesh=(4,))) == 2 * (whole // 4)


# ---- plans --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tight() -> planner.Plan:
    return planner.plan(
        llama(), batch(), vram="14MiB", gpu="bare", fidelity="exact", cards=4, sharding="fsdp", only="checkpoint"
    )


@pytest.mark.slow
@pytest.mark.thorough
def test_the_promise_is_what_the_rehearsal_of_the_sharded_and_checkpointed_step_gives(tight):
    assert tight.fits
    assert tight.solver.promised_bytes == tight.solver.certified_bytes <= 14 << 20 < tight.baseline.total_bytes
    assert [decision.kind for decision in tight.decisions] == ["shard", "checkpoint"]
    assert tight.workload.batch_size == 4


@pytest.mark.slow
@pytest.mark.thorough
def test_a_saved_plan_for_several_cards_is_certified_again(tmp_path):
    path = tmp_path / "plan.json"
    command = [sys.executable, "-m", "planner.cli"]
    options = ["--cards", "4", "--sharding", "fsdp", "--batch-size", "8", "--seq-len", "32", "--save", str(path)]
    links = ["--link", "pcie", "--cards-per-node", "2"]
    asked = ["tests/fixtures/roberta", "--vram", "2GiB", "--gpu", "h100", "--json", *options, *links]
    first = json.loads(subprocess.run([*command, *asked], capture_output=True, text=True, timeout=300).stdout)
    again = json.loads(
        subprocess.run([*command, str(path), "--json"], capture_output=True, text=True, timeout=300).stdout
    )
    assert first["fits"] and again["fits"]
    assert first["decisions"] == again["decisions"]
    assert (first["link"], first["cards_per_node"]) == (again["link"], again["cards_per_node"]) == ("pcie", 2)
    for key in ("total_bytes", "allocated_bytes", "step_seconds"):
        assert first["plan"][key] == again["plan"][key]


@pytest.mark.slow
@pytest.mark.thorough
def test_who_forbids_mixed_precision_gets_no_sharded_precision():
    plan, forced = (
        planner.plan(llama(2), batch(), vram="2GiB", gpu="h100", cards=2, sharding="fsdp", **options)
        for options in ({"forbid": "mixed-precision"}, {"force": "mixed-precision"})
    )
    assert not {"mixed-precision", "sharded-precision"} & {decision.kind for decision in plan.decisions}
    assert "mixed-precision" in {decision.kind for decision in forced.decisions}


@pytest.mark.slow
@pytest.mark.thorough
def test_more_cards_leave_less_on_each():
    plans = [
        planner.plan(llama(), batch(), vram=None, gpu="bare", cards=cards, sharding="fsdp") for cards in (2, 4, 16)
    ]
    totals = [plan.peak.total_bytes for plan in plans]
    assert totals == sorted(totals, reverse=True)
    states = [plan.peak.breakdown["optimizer state"] for plan in plans]
    whole = 8 * sum(parameter.numel() for parameter in llama().parameters())
    assert [round(whole / state) for state in states] == [2, 4, 16]


@pytest.mark.slow
@pytest.mark.thorough
def test_shards_are_chosen_where_copies_do_not_fit_and_the_notes_compare_the_ways():
    roomy, scarce = (
        planner.plan(llama(), batch(), vram=vram, gpu="bare", cards=4, forbid="accumulation", fidelity="exact")
        for vram in ("1GiB", "14MiB")
    )
    assert roomy.fits and scarce.fits
    assert roomy.peak.step_ns <= scarce.peak.step_ns
    assert next(d for d in scarce.decisions if d.kind == "shard").way == "fsdp"
    compared = [note for note in scarce.notes if note.startswith("not chosen: ")]
    assert [note.rpartition("; ")[2] for note in compared] == ["no plan fits", "no plan fits"]


@pytest.mark.slow
@pytest.mark.thorough
def test_the_smallest_number_of_cards_is_found_and_larger_ones_are_compared():
    options = {"vram": "14MiB", "gpu": "bare", "forbid": "accumulation", "fidelity": "exact"}
    plan = planner.plan(llama(), batch(), cards="fewest", **options)
    assert plan.fits
    cards = cards_of(plan.decisions)
    assert cards in (2, 4, 8, 16)
    smaller = {1, 2, 4, 8} & set(range(cards))
    for count in smaller:
        assert f"{count} card{'s' if count > 1 else ''}: no plan fits" in plan.notes
    if cards > 2:
        assert not planner.plan(llama(), batch(), cards=cards // 2, **options).fits
    more = [note for note in plan.notes if note.startswith((f"{2 * cards} cards: ", f"{4 * cards} cards: "))]
    assert len(more) == sum(16 % (cards * factor) == 0 for factor in (2, 4))
    assert all("times as long as that of the chosen plan" in note for note in more)


def test_the_smallest_number_of_cards_needs_a_budget_and_a_batch_that_can_be_divided():
    with pytest.raises(WorkloadError, match="depends on the memory of a card"):
        planner.plan(llama(), batch(), vram=None, gpu="bare", cards="fewest")
    with pytest.raises(WorkloadError, match="a batch of 3 samples cannot be divided evenly among 2 cards"):
        planner.plan(llama(), batch(3), gpu="bare", vram="1GiB", cards="fewest", sharding="ddp")
    with pytest.raises(WorkloadError, match="a mesh states the number of cards"):
        planner.plan(llama(), batch(), gpu="bare", vram="1GiB", cards="fewest", mesh=(2, 2))
    with pytest.raises(WorkloadError, match="'some' is not a number of cards"):
        planner.plan(llama(), batch(), gpu="bare", vram="1GiB", cards="some")


@pytest.mark.slow
def test_weights_of_fewer_experts_than_cards_are_divided_without_padding():
    """FSDP2 alone would pad two experts to eight: four times the memory."""
    stacked = torch.nn.Sequential(torch.nn.Linear(256, 2), torch.nn.Linear(2, 256))
    model = torch.nn.Sequential(torch.nn.Bilinear(256, 64, 2), stacked)
    whole = sum(parameter.nbytes for parameter in model.parameters())

    def loss_fn(output: torch.Tensor, batch: tuple) -> torch.Tensor:
        return output.square().mean()

    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bilinear, self.rest = model[0], stacked

        def forward(self, batch: tuple) -> torch.Tensor:
            return self.rest(self.rest(self.bilinear(*batch).repeat(1, 128)))

    samples = torch.zeros(8, 256), torch.zeros(8, 64)
    plan = planner.plan(Wide(), (samples,), loss_fn=loss_fn, gpu="bare", vram=None, cards=8, sharding="fsdp")
    assert plan.peak.most["parameters"] < whole / 8 + 4096
    assert plan.peak.most["unsharded parameters"] < whole + 8192


def test_a_budget_that_cannot_hold_the_shards_is_refused_without_a_rehearsal():
    sharding = shardings(llama(), Cards(count=4, way="fsdp"))
    model = llama()
    whole = sum(p.numel() for p in model.parameters()) * 8  # parameters and gradients
    budget = Budget.on(BARE, whole // 4 - 100_000, margin=0)
    with pytest.raises(BudgetError, match="one card's part of the parameters, gradients"):
        budget.refuse_if_hopeless(model, BARE, sharding=sharding)
    Budget.on(BARE, whole // 4 + 100_000, margin=0).refuse_if_hopeless(model, BARE, sharding=sharding)
    offloaded = [dataclasses.replace(way, offload=True) for way in sharding]
    budget.refuse_if_hopeless(model, BARE, sharding=offloaded)


@pytest.mark.slow
def test_the_allocator_keeps_the_blocks_of_streams_apart():
    shard = shardings(llama(), Cards(count=4, way="fsdp"))
    work = dataclasses.replace(workload(llama(), batch(4)), sharding=shard)
    graph = pipeline.record_step(work, CARD)
    assert len(set(streams_of_blocks(graph).values())) == 2  # copy-in of gathers, and reduce-scatters
    on_one = dataclasses.replace(graph, storages=[dataclasses.replace(storage, stream=0) for storage in graph.storages])
    reserved = [measure(each, CARD, vram_bytes=None).footprint.reserved_bytes for each in (graph, on_one)]
    assert reserved[0] > reserved[1]


@pytest.mark.slow
def test_a_slower_link_makes_the_step_slower_and_changes_no_byte():
    shard = shardings(llama(), Cards(count=4, way="fsdp"))
    work = dataclasses.replace(workload(llama(), batch(4)), sharding=shard)
    card = profiles.load("h100")
    graph = pipeline.record_step(work, card)
    fast, slow = (
        measure(graph, with_links(card, within=name), vram_bytes=None).footprint for name in ("nvlink-4", "pcie")
    )
    alone = measure(graph, card, vram_bytes=None).footprint
    assert alone.step_ns < fast.step_ns < slow.step_ns
    assert alone.total_bytes == fast.total_bytes == slow.total_bytes


# ---- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    {
        "an odd batch": ({"cards": 3}, "a batch of 16 samples cannot be divided evenly among 3 cards"),
        "one card": ({"sharding": "fsdp"}, "sharding is for two or more cards, and the number of cards is 1"),
        "uneven machines": ({"cards": 16, "cards_per_node": 6}, "give 8 cards for each machine"),
        "an unknown way": ({"cards": 2, "sharding": "tp"}, "sharding 'tp' is unknown: choose from ddp"),
        "an unknown link": ({"cards": 2, "link": "nvlink-9"}, "link 'nvlink-9' is unknown: choose from nvlink-2"),
        "a run": ({"cards": 2, "between": ["save"]}, "a whole run cannot be planned for several cards"),
    }.values(),
)
def test_what_cannot_be_planned_is_refused_by_name(options, message):
    with pytest.raises(WorkloadError, match=message):
        planner.plan(llama(1), batch(), vram="1GiB", gpu="bare", **options)


class WithIdleParts(torch.nn.Module):
    """A layer that the loss does not use; FSDP2 cannot shard its scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return (self.used(x) * self.scale).square().mean()


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (
            {"sharding": "ddp"},
            ["a parameter that the loss does not use: 'idle.weight', 'idle.bias' (in", "requires_grad_(False)"],
        ),
        ({}, ["no way to divide the model can be planned", "that the loss does not use", "FSDP2 cannot shard"]),
    ],
)
def test_parameters_that_the_loss_does_not_use_are_refused_with_a_way_out(options, messages):
    with pytest.raises(WorkloadError) as error:
        planner.plan(WithIdleParts(), torch.zeros(4, 4), vram="1GiB", gpu="bare", cards=2, **options)
    assert all(message in str(error.value) for message in messages)


def test_a_step_of_the_users_own_is_refused():
    with pytest.raises(WorkloadError, match="a training step of your own cannot be planned for several cards"):
        planner.plan(llama(1), batch(), vram="1GiB", gpu="bare", cards=2, step=lambda model, optimizer, batch: None)


def in_process(function):
    """Returns what a function gives in a process group of one process."""
    return in_group(1, lambda _: function())[0]


def applied_alone(optimizer):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    made = optimizer(model.parameters())
    values = torch.randn(4, 8)
    return model, apply_decisions(
        (Shard(way="fsdp", mesh=(1,)),), model, optimizer=made, calling=Calling.of((values, values), squares),
        batch_size=4, loss_fn=squares,
    )  # fmt: skip


def squares(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return (output - batch[-1]).square().mean()


@pytest.mark.slow
def test_with_divided_state_the_rank_with_the_most_is_rehearsed():
    class Layers(torch.nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*(torch.nn.Linear(n, m, bias=False) for n, m in ((300, 300), (300, 200), (200, 300))))

    values = torch.randn(4, 300)
    plan = planner.plan(Layers(), (values, values), vram=None, gpu="bare", loss_fn=squares, cards=2, sharding="zero1")
    assert plan.peak.most["optimizer state"] == 2 * 4 * (2 * 300 * 200)  # the other rank has 300 x 300 only


@pytest.mark.slow
def test_an_optimizer_with_options_outside_of_its_defaults_is_not_divided():
    class Scaled(torch.optim.SGD):
        def __init__(self, params, lr: float, scale: float = 1.0) -> None:
            super().__init__(params, lr=lr)
            self.scale = scale

    model = torch.nn.Linear(8, 8)
    values = torch.randn(4, 8)
    with pytest.raises((DecisionError, WorkloadError), match="has an option 'scale' that is not in its defaults"):
        planner.plan(
            model, (values, values), vram=None, gpu="bare", loss_fn=squares, cards=2, sharding="zero1",
            optimizer=lambda parameters: Scaled(parameters, 0.1, scale=3.0),
        )  # fmt: skip


def test_batch_norm_and_the_meaning_of_a_loss_function_are_noted():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    values = torch.randn(4, 8)
    notes = planner.plan(model, (values, values), vram=None, gpu="bare", loss_fn=squares, cards=2, sharding="ddp").notes
    assert any(note.startswith("'1' and other BatchNorm layers compute their statistics") for note in notes)
    assert any(note.startswith("the loss function is assumed to be a mean over samples") for note in notes)


@pytest.mark.slow
def test_a_process_of_a_group_does_not_plan_for_several_cards():
    def run() -> str:
        with pytest.raises(WorkloadError) as refused:
            planner.plan(llama(1), batch(), vram=None, gpu="bare", cards=2)
        return str(refused.value)

    assert "plan before torch.distributed.init_process_group()" in in_process(run)


@pytest.mark.slow
def test_a_plan_is_applied_once():
    def run() -> str:
        model, _ = applied_alone(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        with pytest.raises(DecisionError) as refused:
            apply_decisions(
                (Shard(way="fsdp", mesh=(1,)),), model, optimizer="sgd", calling=Calling.SINGLE, batch_size=4
            )
        return str(refused.value)

    assert in_process(run).startswith("the model is sharded already")


@pytest.mark.slow
def test_scalar_parameters_are_refused_with_a_way_out():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    model.scale = torch.nn.Parameter(torch.tensor(1.0))
    values = torch.randn(4, 8)
    with pytest.raises((DecisionError, WorkloadError), match=r"FSDP2 cannot shard 'Sequential' .*ddp or zero1"):
        planner.plan(model, (values, values), vram=None, gpu="bare", loss_fn=squares, cards=2, sharding="fsdp")


@pytest.mark.slow
def test_an_optimizer_that_was_made_before_trains_the_shards():
    def run() -> bool:
        model, rewritten = applied_alone(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        before = model[0].weight.full_tensor().clone()
        rewritten.step((torch.randn(4, 8), torch.randn(4, 8)))
        return not torch.equal(before, model[0].weight.full_tensor())

    assert in_process(run)


@pytest.mark.slow
def test_sharding_cannot_be_undone():
    def run() -> str:
        _, rewritten = applied_alone(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        with pytest.raises(DecisionError) as refused:
            rewritten.undo()
        return str(refused.value)

    assert in_process(run).startswith("a model on several cards cannot be put together again: save it with torch")
