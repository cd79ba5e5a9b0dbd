"""The memory that NCCL takes of a card, outside of the allocator."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest

import planner
from planner import pipeline, profiles
from planner.errors import BudgetError
from planner.estimate.footprint import measure
from planner.estimate.smallest_total import smallest_total_bytes
from planner.plan_types.decision_base import communicators_of
from planner.profiles import links
from planner.profiles.links import known, with_links
from planner.space.sharding import Cards, shardings
from planner.workload.budget import Budget
from planner.workload.workload import workload
from tests.ranks.test_rank_plans import batch, llama

GIB = 1 << 30
ROWS = tomllib.loads(Path(links.__file__).with_name("links.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ROWS)
def test_each_number_names_its_source(name):
    lines = Path(links.__file__).with_name("links.toml").read_text(encoding="utf-8").splitlines()
    assert 0 < ROWS[name]["nccl_bytes"] < ROWS[name]["nccl_most_bytes"]
    assert all(" # " in line for line in lines if line.startswith("nccl_"))


@pytest.mark.parametrize("name", known())
def test_a_card_that_trains_alone_has_no_nccl(name):
    card = profiles.load("a100-80gb")
    assert card.outside_bytes == with_links(card, within=name).outside_bytes == card.context_bytes


def test_cards_of_other_machines_take_more():
    card = profiles.load("a100-80gb")
    near, far = (with_links(card, cards=cards, communicators=1) for cards in (8, 9))
    assert near.nccl_bytes == ROWS["nvlink-3"]["nccl_bytes"]
    assert far.nccl_bytes - near.nccl_bytes == ROWS["network"]["nccl_bytes"]


def test_each_dimension_of_a_mesh_has_a_communicator_next_to_that_of_all_cards():
    model = llama()
    for mesh, count in ((None, 1), ((2, 4), 3)):
        for way in shardings(model, Cards(count=8, mesh=mesh)):
            assert communicators_of((way,)) == count
    card = profiles.load("a100-80gb")
    one, three = (with_links(card, cards=8, communicators=count).nccl_bytes for count in (1, 3))
    assert three == 3 * one


def test_the_allocator_gets_the_budget_without_nccl():
    card = with_links(profiles.load("a100-80gb"), cards=4, communicators=1)
    assert Budget.of_total(card, 8 * GIB).allocator_bytes == 8 * GIB - card.context_bytes - card.nccl_bytes


@pytest.mark.slow
def test_the_total_of_a_recording_and_its_smallest_capacity_have_nccl():
    (shard,) = shardings(llama(2), Cards(count=4, way="zero2"))
    work = dataclasses.replace(workload(llama(2), batch(4)), sharding=(shard,))
    alone = profiles.load("a100-80gb")
    together = with_links(alone, cards=4, communicators=1)
    graph = pipeline.record_step(work, alone)
    before, after = (measure(graph, card, vram_bytes=None).footprint for card in (alone, together))
    assert after.reserved_bytes == before.reserved_bytes
    assert after.total_bytes == before.total_bytes + together.nccl_bytes
    assert after.breakdown == {**before.breakdown, "NCCL": together.nccl_bytes}
    smallest = [smallest_total_bytes(graph, card) for card in (alone, together)]
    assert smallest[1] - smallest[0] == together.nccl_bytes
    assert measure(graph, together, vram_bytes=smallest[1]).fits
    assert not measure(graph, together, vram_bytes=smallest[0]).fits


@pytest.mark.slow
@pytest.mark.thorough
def test_a_plan_counts_nccl_and_says_how_much_more_it_may_take():
    plan = planner.plan(llama(2), batch(), vram="2GiB", gpu="a100-80gb", cards=4, sharding="fsdp")
    counted = ROWS["nvlink-3"]["nccl_bytes"]
    assert plan.fits
    assert plan.peak.breakdown["NCCL"] == plan.baseline.breakdown["NCCL"] == counted
    assert sum(plan.peak.breakdown.values()) == plan.peak.total_bytes <= 2 * GIB
    assert plan.solver.promised_bytes == plan.solver.certified_bytes
    (note,) = [note for note in plan.notes if "NCCL" in note]
    assert "688.0 MiB on each card" in note
    assert "--margin" in note
    assert plan.to_json()["plan"]["breakdown"]["nccl"] == counted


@pytest.mark.slow
@pytest.mark.thorough
def test_a_budget_that_holds_the_step_but_not_nccl_does_not_fit():
    plan = planner.plan(llama(2), batch(), vram="700MiB", gpu="rtx-3090", cards=4, sharding="fsdp")
    assert plan.fits  # PCIe needs fewer buffers
    with pytest.raises(BudgetError, match="buffers for the link nvlink-3"):
        planner.plan(llama(2), batch(), vram="700MiB", gpu="a100-80gb", cards=4, sharding="fsdp")
