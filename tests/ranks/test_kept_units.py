"""Units of FSDP2 that stay gathered: their memory is predicted from the recording in which none does."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import planner
from planner import profiles
from planner.choose.candidates import Candidate
from planner.estimate import roofline
from planner.plan_types.decisions import Shard, ShardedPrecision
from planner.profiles.links import with_links
from planner.recompute.programs import Programs
from planner.recompute.repeated_gathers import gathered_once, repeated_gathers
from planner.rewrite import rehearse
from planner.space.micro_batches import MicroBatching
from planner.space.sharding import repeated_blocks
from planner.workload.workload import workload
from tests.ranks.test_rank_plans import batch, llama

pytestmark = pytest.mark.slow

CARD = with_links(profiles.load("a100-80gb"), within="pcie")
MODEL = llama(3)
UNITS = repeated_blocks(MODEL)
WHOLE = MicroBatching(micro_batches=1, size=4)


def mixtral() -> torch.nn.Module:
    """Returns a model that has fewer experts than there are cards, so that they are divided along another dimension."""
    with torch.device("meta"):
        config = MixtralConfig(
            vocab_size=200, hidden_size=128, intermediate_size=352, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=4, num_local_experts=4, use_cache=False,
        )  # fmt: skip
        return MixtralForCausalLM(config).train()


def recorded(sharding, extra, sizes=(4,), model=MODEL):
    work = dataclasses.replace(workload(model, batch(sum(sizes), 16)), sharding=(sharding,))
    work = rehearse.with_gradient_names(work, CARD, None)
    return rehearse.start_rehearsal(work, extra, CARD, sizes=sizes, steps=1, primed=True, what_if=True).result()


@pytest.mark.parametrize(
    ("model", "mesh", "extra"),
    [(MODEL, (4,), ()), (MODEL, (2, 2), (ShardedPrecision(),)), (mixtral(), (8,), (ShardedPrecision(),))],
    ids=["4 cards, fp32", "2 x 2 cards, bf16", "fewer experts than cards, bf16"],
)
@pytest.mark.thorough
def test_any_kept_units_have_the_predicted_peak(model, mesh, extra):
    sharding = Shard(way="fsdp", mesh=mesh, units=UNITS)
    graph = recorded(sharding, extra, model=model)
    candidate = Candidate(extra, WHOLE, lambda: graph, CARD, recompute=(), programs=Programs(), sharding=(sharding,))
    peaks = set()
    for kept in ((), UNITS[:1], UNITS[1:], UNITS[::2], UNITS):
        real = recorded(dataclasses.replace(sharding, kept=kept), extra, model=model)
        selected = tuple(n for n, unit in enumerate(candidate.units.units) if unit.module not in kept)
        peak = int(real.live_bytes(granularity_bytes=512).max())
        assert candidate.search.exact.peak(selected) == peak
        decisions = candidate.decisions(selected)
        assert [d.kept for d in decisions if isinstance(d, Shard)] == ([kept] if kept else [])  # else the baseline's
        peaks.add(peak)
    assert len(peaks) > 1  # the model is small, so that its weights decide


def test_a_step_that_gathers_once_has_the_time_and_the_bytes_of_its_recording():
    sharding = Shard(way="fsdp", mesh=(4,), units=UNITS)
    graph, once = recorded(sharding, ()), recorded(dataclasses.replace(sharding, kept=UNITS), ())
    gathers = repeated_gathers(graph, UNITS)
    predicted = gathered_once(graph, gathers)
    assert [gather.unit for gather in gathers] == list(UNITS)
    assert repeated_gathers(once, UNITS) == ()
    assert roofline.step_ns(predicted, CARD, 1) == roofline.step_ns(once, CARD, 1) < roofline.step_ns(graph, CARD, 1)
    assert predicted.live_bytes().max() == once.live_bytes().max()


@pytest.mark.thorough
def test_each_micro_batch_gathers_anew():
    sharding = Shard(way="fsdp", mesh=(4,), units=UNITS)
    split = MicroBatching(micro_batches=2, size=2).decisions()
    graph, once = (recorded(dataclasses.replace(sharding, kept=kept), split, sizes=(2, 2)) for kept in ((), UNITS))
    predicted = gathered_once(graph, repeated_gathers(graph, UNITS))
    assert predicted.live_bytes().max() == once.live_bytes().max()
    assert roofline.step_ns(predicted, CARD, 2) == roofline.step_ns(once, CARD, 2)


@pytest.mark.thorough
def test_units_are_kept_where_the_budget_has_room_for_some_and_the_promise_holds():
    config = LlamaConfig(
        vocab_size=200, hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).train()
    tokens = batch(4, 16)
    options = {"gpu": "a100-80gb", "cards": 4, "sharding": "fsdp", "link": "pcie", "only": ()}
    found = {}
    for less in (0, 40):
        vram = f"{((found[0].peak.total_bytes >> 20) - less) if less else 8192}MiB"
        plan = found[less] = planner.plan(model, tokens, vram=vram, **options)
        assert plan.fits
        assert plan.solver.promised_bytes == plan.solver.certified_bytes
        assert plan.peak.step_ns < plan.baseline.step_ns
    roomy, tight = (next(d for d in found[less].decisions if isinstance(d, Shard)) for less in (0, 40))
    assert roomy.kept == roomy.units
    assert 0 < len(tight.kept) < len(tight.units)
    assert found[0].peak.step_ns < found[40].peak.step_ns
