"""Notes of `--cards fewest` on changes with which half as many cards would be enough."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import pytest

import planner
from planner import fewest_cards, profiles
from planner.errors import WorkloadError
from planner.fewest_cards import _Changes
from planner.plan_types.constraints import parse_constraints
from planner.plan_types.decision_base import cards_of
from planner.plan_types.plan import Plan
from planner.progress import Watch
from planner.space.sharding import several_cards
from planner.workload.workload import workload
from tests.ranks.test_rank_plans import batch, llama

SAVED = pathlib.Path(__file__).parents[1] / "fixtures/plans/former_kinds.json"


def tried(monkeypatch, count: int, *, forbid: tuple[str, ...] = (), **cards) -> list[tuple[str | None, bool, bool]]:
    """Returns the plans that are asked for: the way to divide the work, and True for host memory and for adapters."""
    asked = []

    def plan_on(number, work, card, together, **options):
        assert number == count
        asked.append((together.way, together.offload, work.adapter is not None))

    monkeypatch.setattr(fewest_cards, "_plan_on", plan_on)
    constraints = parse_constraints(fidelity="rounded", force=(), forbid=forbid)
    changes = _Changes(
        workload(llama(1), batch(4)), profiles.bare(), several_cards("fewest", **cards), count,
        vram_bytes=1 << 30, constraints=constraints, watch=Watch(),
    )  # fmt: skip
    assert list(changes._fitting()) == []
    return asked


def test_the_changes_are_those_that_the_number_of_cards_and_the_options_leave(monkeypatch):
    on_host, adapters, in_4_bits = ("fsdp", True, False), ("fsdp", False, True), ("zero1", False, True)
    assert tried(monkeypatch, 4) == [on_host, adapters, in_4_bits]
    assert tried(monkeypatch, 4, way="fsdp", offload=True) == [("fsdp", True, True)]
    assert tried(monkeypatch, 4, way="zero1") == [("fsdp", False, False), on_host, in_4_bits, in_4_bits]
    assert tried(monkeypatch, 4, prepared_by="accelerate") == [(None, False, True), ("ddp", False, True)]
    assert tried(monkeypatch, 1) == [(None, False, True)] * 2  # adapters on weights in full precision, and in 4 bits


@pytest.mark.parametrize(
    ("samples", "way", "counts"),
    [(12, None, [1, 2, 4]), (12, "fsdp", [2, 4]), (3, None, [1]), (8, "ddp", [2, 4, 8])],
)
def test_only_powers_of_two_that_divide_the_batch_are_tried(samples, way, counts, monkeypatch):
    asked = []

    def plan_on(number, *arguments, **options):
        asked.append(number)

    monkeypatch.setattr(fewest_cards, "_plan_on", plan_on)
    smallest = dataclasses.replace(Plan.load(SAVED), notes=())
    for module, function in ((fewest_cards, "plan_sharded"), (fewest_cards.pipeline, "plan_workload")):
        monkeypatch.setattr(module, function, lambda *arguments, **options: smallest)
    plan = fewest_cards.plan_fewest_cards(
        workload(llama(1), batch(samples)), profiles.bare(), several_cards("fewest", way=way),
        vram_bytes=1 << 30, constraints=parse_constraints(fidelity="exact", force=(), forbid=()),
    )  # fmt: skip
    assert asked == counts
    assert [note for note in plan.notes if "no plan fits" in note] == [
        f"{count} card{'s' if count > 1 else ''}: no plan fits" for count in counts
    ]
    with pytest.raises(WorkloadError, match="a batch of 1 sample cannot be divided evenly among 2 cards"):
        fewest_cards.plan_fewest_cards(
            workload(llama(1), batch(1)), profiles.bare(), several_cards("fewest", way="fsdp"),
            vram_bytes=1 << 30, constraints=parse_constraints(fidelity="exact", force=(), forbid=()),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("cards", "in_4_bits"), [({}, True), ({"way": "ddp"}, True), ({"way": "fsdp"}, False), ({"offload": True}, False)]
)
def test_adapters_on_4_bit_weights_are_tried_where_parameters_stay_whole(cards, in_4_bits, monkeypatch):
    monkeypatch.setattr(fewest_cards, "plan_or_adapt", lambda *arguments, adapters, **options: adapters)
    adapters = fewest_cards.plan_on_cards(
        workload(llama(1), batch(4)), profiles.bare(), several_cards(2, **cards),
        vram_bytes=1 << 30, constraints=parse_constraints(fidelity="adapted", force=(), forbid=()),
    )  # fmt: skip
    assert [adapter.is_quantized for adapter in adapters] == [False, *([True] if in_4_bits else [])]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_change_that_the_notes_name_makes_half_as_many_cards_enough(monkeypatch):
    monkeypatch.setattr(fewest_cards, "_SECONDS", 400)
    options = {"vram": int(11.5 * (1 << 20)), "gpu": "bare", "only": ("mixed-precision", "sharded-precision")}
    plan = planner.plan(llama(2), batch(4), cards="fewest", fidelity="exact", **options)
    assert plan.fits and cards_of(plan.decisions) == 4
    (note,) = (note for note in plan.notes if "(--fidelity rounded)" in note)
    found = re.fullmatch(
        r"2 cards would be enough with one change \(--fidelity rounded\): the plan needs (\S+ MiB) on each card, .*",
        note,
    )
    assert found
    with_it = planner.plan(llama(2), batch(4), cards=2, sharding="fsdp", fidelity="rounded", **options)
    assert with_it.fits
    assert not planner.plan(llama(2), batch(4), cards=2, fidelity="exact", **options).fits


@pytest.mark.slow
@pytest.mark.thorough
def test_adapters_are_trained_on_a_given_number_of_cards_if_the_weights_do_not_fit():
    model = llama(2)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    options = {"vram": whole * 17 // 10, "gpu": "bare", "cards": 2, "sharding": "fsdp"}
    plan = planner.plan(model, batch(4), fidelity="exact", **options)
    assert not plan.fits
    (adapters,) = (row for row in plan.shortfall.relaxations if "LoRA" in row.relax)
    assert adapters.opens
    trained = planner.plan(model, batch(4), fidelity="adapted", **options)
    assert trained.fits and trained.model.adapter is not None and cards_of(trained.decisions) == 2
    assert trained.total_bytes == adapters.next_step.total_bytes
