"""Gradients that are reduced once in a step: each card holds whole gradients until the last micro-batch."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

import planner
from planner import pipeline, profiles
from planner.choose.candidates import Candidate
from planner.choose.recordings import Recordings
from planner.errors import BudgetError
from planner.estimate import roofline
from planner.plan_types.categories import Category
from planner.plan_types.decision_base import micro_batches_of
from planner.plan_types.decisions import Accumulation, Shard
from planner.plan_types.techniques import decision_from_json
from planner.profiles.links import with_links
from planner.recompute.programs import Programs
from planner.rewrite import rehearse
from planner.space.micro_batches import MicroBatching
from planner.space.sharding import Cards, repeated_blocks, shardings
from planner.workload.budget import Budget
from planner.workload.workload import workload
from tests.ranks.test_rank_plans import batch, llama

CARD = with_links(profiles.load("a100-80gb"), within="pcie")
MODEL = llama(2)
SPLIT = MicroBatching(micro_batches=4, size=1)
WHOLE_GRADIENTS = sum(parameter.nbytes for parameter in MODEL.parameters())


def shard(way: str, *, reduces_once: bool) -> Shard:
    units = repeated_blocks(MODEL) if way == "fsdp" else ()
    return Shard(way=way, mesh=(4,), units=units, reduces_once=reduces_once)


def certificate(sharding: Shard):
    work = dataclasses.replace(workload(MODEL, batch(4, 16)), sharding=(sharding,))
    return pipeline.record_step(work, CARD, SPLIT.decisions())


def scatters(graph) -> Counter:
    """Returns the number of reductions in each micro-batch of the last recorded step."""
    kinds = ("_reduce_scatter_base_", "allreduce_")
    return Counter(
        op.micro_batch
        for op in graph.ops
        if op.collective and op.collective.kind in kinds and op.step == 1 and op.phase == "backward"
    )


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("way", ["fsdp", "ddp", "zero1"])
def test_only_the_last_micro_batch_reduces_gradients(way):
    each, once = (certificate(shard(way, reduces_once=once)) for once in (False, True))
    assert (each.micro_batch_sizes, once.micro_batch_sizes) == ((1, 1), (1, 1, 1))
    assert scatters(each)[0] == scatters(each)[1] == scatters(once)[2] > 0
    assert set(scatters(once)) == {2}
    times = [roofline.step_ns(graph, CARD, 4) for graph in (each, once)]
    assert times[1] < times[0]
    gradients = [
        dataclasses.replace(graph, storages=[s for s in graph.storages if s.category is Category.GRADIENT], saves=[])
        for graph in (each, once)
    ]
    held = [int(graph.live_bytes().max()) for graph in gradients]
    assert held[1] >= WHOLE_GRADIENTS
    assert held[1] > held[0]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_the_promise_of_a_split_is_what_its_certificate_gives(way):
    sharding = shard(way, reduces_once=True)
    work = dataclasses.replace(workload(MODEL, batch(4, 16)), sharding=(sharding,))

    def start(decisions, sizes, _):
        return rehearse.start_rehearsal(work, decisions, CARD, sizes=sizes, steps=1, primed=True, what_if=True)

    recordings = Recordings(
        start, None, lambda graph: rehearse.finish_certificate(graph, work, CARD), is_last_different=True
    )
    for split in (SPLIT, MicroBatching(micro_batches=2, size=2)):
        recording = recordings.of((), split)
        graph = recording()
        assert len(graph.micro_batch_sizes) == min(split.micro_batches, 3)
        candidate = Candidate((), split, recording, CARD, recompute=(), programs=Programs(), sharding=(sharding,))
        units = candidate.units.units  # all of them are gathered again
        decisions = candidate.decisions(tuple(range(len(units))))
        certified = pipeline.record_step(work, CARD, decisions)
        assert (
            candidate.search.exact.peak(tuple(range(len(units)))) == certified.live_bytes(granularity_bytes=512).max()
        )
        times = [roofline.step_ns(recording, CARD, split.micro_batches) for recording in (graph, certified)]
        assert times[0] == pytest.approx(times[1], rel=0.05)


@pytest.mark.slow
@pytest.mark.thorough
def test_the_search_takes_it_where_links_are_slow_and_the_memory_is_there():
    options = {"gpu": "bare", "cards": 4, "sharding": "fsdp", "link": "pcie", "only": "accumulation"}
    tokens = batch(16, 128)
    whole = planner.plan(MODEL, tokens, vram="8GiB", **options)
    roomy, tight = (planner.plan(MODEL, tokens, vram=vram, **options) for vram in ("24MiB", "20MiB"))
    assert micro_batches_of(whole.decisions) == 1
    assert not any("reduced once" in text for text in (*whole.notes, whole.decisions[0].describe()))
    assert roomy.fits and tight.fits
    for plan in (roomy, tight):
        assert micro_batches_of(plan.decisions) > 1
        assert plan.solver.promised_bytes == plan.solver.certified_bytes
    assert roomy.decisions[0].reduces_once and not tight.decisions[0].reduces_once
    assert any("gradients reduced once in a step" in note for note in tight.notes)


def test_a_decision_is_read_back_and_says_so():
    once = shard("fsdp", reduces_once=True)
    assert decision_from_json(once.to_json()) == once
    assert once.describe().endswith("; gradients reduced once in a step")
    assert "reduces_once" not in shard("fsdp", reduces_once=False).to_json()
    assert shard("zero1", reduces_once=False).reducing_once() == shard("zero1", reduces_once=True)


def test_accelerate_reduces_once_with_copies_and_in_each_micro_batch_with_shards():
    ways = shardings(MODEL, Cards(count=4, prepared_by="accelerate"))
    assert [(way.way, way.reduces_once) for way in ways] == [("ddp", True), ("fsdp", False), ("fsdp", False)]
    assert all(way.reducing_once() == way for way in ways)
    assert "reduced" not in ways[0].describe()


def test_a_budget_without_room_for_whole_gradients_needs_no_rehearsal():
    each, once = (shard("fsdp", reduces_once=once) for once in (False, True))
    card = profiles.bare()
    Budget.on(card, WHOLE_GRADIENTS, margin=0).refuse_if_hopeless(MODEL, card, sharding=(each,))
    with pytest.raises(BudgetError, match="one card's part of the parameters, gradients"):
        Budget.on(card, WHOLE_GRADIENTS, margin=0).refuse_if_hopeless(MODEL, card, sharding=(once,))


def test_splits_with_two_and_with_more_micro_batches_have_recordings_of_their_own():
    started = []

    def recordings(*, is_last_different: bool) -> Recordings:
        return Recordings(
            lambda *key: started.append(key), None, lambda graph: graph, is_last_different=is_last_different
        )

    splits = [
        MicroBatching(micro_batches=1, size=8),
        MicroBatching(micro_batches=2, size=4),
        MicroBatching(micro_batches=4, size=2),
    ]
    recordings(is_last_different=False).prefetch((), splits)
    assert [sizes for _, sizes, _ in started] == [(8,), (2, 2), (3, 3)]
    started.clear()
    recordings(is_last_different=True).prefetch((), splits)
    assert [sizes for _, sizes, _ in started] == [(8,), (2, 2), (2, 2, 2), (3, 3), (3, 3, 3)]
    assert started[2][0] == (Accumulation(micro_batch_size=2, micro_batches=3),)
