"""Refusals and notes for several cards name the reason, and a way out that the reader can take."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
import torch

import planner
from planner import adapted as adapting
from planner import pipeline, profiles
from planner.cli.command import main
from planner.cli.report import headline
from planner.errors import BudgetError, WorkloadError
from planner.plan_types.constraints import parse_constraints
from planner.plan_types.decisions import Shard
from planner.plan_types.plan import Plan, Shortfall
from planner.profiles.links import foreign_link_note, link_of, with_links
from planner.space.sharding import Cards, several_cards, shardings
from planner.workload.budget import Budget
from planner.workload.workload import workload
from tests.ranks.test_rank_plans import batch, llama
from tests.ranks.test_weights_in_4_bits import with_adapters

MIB = 1 << 20
SAVED = pathlib.Path(__file__).parents[1] / "fixtures/plans/former_kinds.json"
TOGETHER = with_links(profiles.load("rtx-3090"), cards=4, communicators=1)


def refusal(model: torch.nn.Module, total_bytes: int, *, card=TOGETHER, **sharding) -> str:
    ways = shardings(model, Cards(count=4, **sharding)) if sharding else ()
    with pytest.raises(BudgetError) as error:
        Budget.on(card, total_bytes, margin=0).refuse_if_hopeless(model, card, sharding=ways)
    return str(error.value)


# ---- budgets ------------------------------------------------------------------------------------------------------


def test_more_cards_are_not_advised_for_a_budget_below_the_context_and_nccl():
    text = refusal(llama(1), TOGETHER.outside_bytes, way="fsdp")
    assert "more cards would not help" in text and "or more cards" not in text
    assert "NCCL's buffers for the link pcie 160.0 MiB (reported by others or assumed: profiles/links.toml)" in text
    alone = refusal(llama(1), TOGETHER.context_bytes, card=profiles.load("rtx-3090"))
    assert alone.endswith("the CUDA context alone takes the whole budget") and "NCCL" not in alone


def test_a_way_out_makes_the_model_smaller_on_each_card():
    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024))
    room = TOGETHER.outside_bytes + MIB
    assert refusal(model, room, way="fsdp").endswith(", or more cards")
    assert refusal(model, room, way="ddp").endswith(", or divide the parameters, too (--sharding fsdp)")
    model.register_buffer("table", torch.zeros(MIB))  # each card has it
    assert refusal(model, room, way="fsdp").endswith(", or a smaller model")
    assert refusal(with_adapters(), TOGETHER.outside_bytes + 1024, way="ddp").endswith(", or a smaller model")


# ---- links --------------------------------------------------------------------------------------------------------


def test_a_note_says_that_a_card_is_not_known_to_have_the_link():
    card = profiles.load("rtx-3090")
    (note,) = foreign_link_note(with_links(card, cards=2, communicators=1, within="nvlink-4"))
    assert note.startswith(f"{card.title} is not known to have NVLink 4") and "leave --link out" in note
    for other in (card, profiles.load("h100")):
        for link in ("pcie", link_of(other)):
            assert not foreign_link_note(with_links(other, cards=2, communicators=1, within=link))
    unknown = dataclasses.replace(card, name="of-mine")  # the user's own profile: its links are not known
    assert not foreign_link_note(with_links(unknown, cards=2, communicators=1, within="nvlink-4"))
    assert not foreign_link_note(card)


@pytest.mark.parametrize(
    ("cards", "per_node", "line"),
    [
        (4, 8, "link between cards: nvlink-4 (name yours with --link and --cards-per-node)"),
        (16, 8, "link between cards: nvlink-4 in each of 2 machines with 8 cards, and a network between them (name"),
        (3, 1, "link between cards: nvlink-4 in each of 3 machines with 1 card, and a network between them (name"),
    ],
)
def test_the_report_names_the_links(cards, per_node, line):
    shard = Shard(way="ddp", mesh=(cards,))
    plan = dataclasses.replace(Plan.load(SAVED), decisions=(shard,), link="nvlink-4", cards_per_node=per_node)
    assert f"\n{line}" in headline(plan).plain
    assert "link" not in headline(dataclasses.replace(plan, link=None)).plain


# ---- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prepared_by", ["", "accelerate"])
def test_zero1_is_not_advised_to_accelerate(prepared_by):
    with pytest.raises(WorkloadError, match="choose --sharding ddp") as error:
        shardings(with_adapters(), Cards(count=2, way="fsdp", prepared_by=prepared_by))
    assert ("zero1" in str(error.value)) == (not prepared_by)


def test_a_number_of_cards_is_refused_with_the_same_words_in_python_and_on_the_command_line(capsys):
    for value in (0, 65_537):
        with pytest.raises(WorkloadError) as error:
            several_cards(value)
        assert main(["model", "--cards", str(value)]) == 2
        words = str(error.value).replace(str(value), f"'{value}'", 1)
        assert f"argument --cards: {words}" in capsys.readouterr().err
    assert several_cards(65_536).count == 65_536
    with pytest.raises(WorkloadError) as error:
        several_cards(2, way="tp")
    assert "--parallelize on the command line" in str(error.value)
    assert main(["model", "--cards", "2", "--sharding", "tp"]) == 2
    assert f"argument --sharding: {error.value}" in capsys.readouterr().err


@pytest.mark.slow
def test_an_optimizer_that_asks_for_8_bits_is_named_instead_of_a_technique(tmp_path, capsys):
    llama(1).config.save_pretrained(tmp_path)
    options = ["--batch-size", "4", "--seq-len", "8", "--vram", "1GiB", "--gpu", "bare", "--cards", "2"]
    assert main([str(tmp_path), *options, "--optimizer", "adamw_8bit", "--sharding", "zero1"]) == 2
    error = capsys.readouterr().err
    assert (
        "--optimizer adamw_8bit asks for 8bit-optimizer, but" in error and "(--sharding ddp divides neither)" in error
    )
    assert "forced" not in error


# ---- relaxations --------------------------------------------------------------------------------------------------


def test_adapters_that_are_allowed_are_in_notes_and_no_search_is_repeated():
    shortfall = Shortfall(missing_bytes=1, binding="parameters", binding_bytes=1, next_step=None)
    plan = dataclasses.replace(Plan.load(SAVED), shortfall=shortfall, notes=())
    asked = []

    def planning(name, result):
        return lambda *_, **__: (asked.append(name), result)[1]

    found = adapting.plan_or_adapt(
        workload(llama(1), batch(4)),
        profiles.bare(),
        vram_bytes=1 << 20,
        constraints=parse_constraints(fidelity="adapted", force=(), forbid=()),
        plan_step=planning("step", plan),
        plan_fitting=planning("fitting", None),
        plan_smallest=planning("smallest", plan),
    )
    assert asked == ["fitting"] * 3 + ["smallest"]
    assert found.shortfall.relaxations == ()
    assert len(found.notes) == 2
    assert all("no plan was found that fits: not enough on its own" in note for note in found.notes)


@pytest.mark.thorough
def test_each_way_is_searched_once_if_no_plan_fits(monkeypatch):
    searched: list[str] = []
    open_session = pipeline.open_session

    def noted(work, *arguments):
        searched.extend(shard.way for shard in work.sharding)
        return open_session(work, *arguments)

    monkeypatch.setattr(pipeline, "open_session", noted)
    options = {"gpu": "a100-80gb", "cards": 4, "only": ()}
    baseline = planner.plan(llama(1), batch(64, 256), vram=None, **options).baseline
    searched.clear()
    too_little = baseline.total_bytes - baseline.breakdown["allocator slack"] - baseline.most["activations"] // 2
    plan = planner.plan(llama(1), batch(64, 256), vram=too_little, **options)
    assert not plan.fits
    assert plan.shortfall is not None
    assert searched == ["ddp", "zero1", "fsdp"]
    assert [note.rpartition("; ")[2] for note in plan.notes if note.startswith("not chosen")] == ["no plan fits"] * 2
