"""Options of the allocator are chosen by the certificate: only if the plan needs them, and never against the user."""

import dataclasses
import platform

import pytest

import planner
from examples import convnet
from planner import pipeline
from planner.errors import DecisionError
from planner.estimate.footprint import measure
from planner.estimate.smallest_total import smallest_total_bytes
from planner.plan_types.constraints import parse_constraints
from planner.plan_types.decisions import Allocator
from planner.plan_types.sizes import MIB
from planner.space.search_space import allocator_alternatives
from planner.workload.cards import resolve_card
from planner.workload.workload import workload

CARD = resolve_card("rtx-2060", None)
EXPANDABLE = (Allocator(expandable_segments=True),)


MODEL, BATCH, LOSS = convnet.build(batch_size=8)


@pytest.fixture(scope="module")
def graph():
    return pipeline.record_step(workload(MODEL, BATCH, loss_fn=LOSS), CARD)


def plan(vram, **options):
    return planner.plan(MODEL, BATCH, loss_fn=LOSS, vram=vram, gpu="rtx-2060", fidelity="exact", margin=0, **options)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_step_that_fits_only_with_other_options_gets_them(graph):
    needed = {name: smallest_total_bytes(graph, CARD, options) for name, options in (("", ()), ("e", EXPANDABLE))}
    assert needed["e"] + 4 * MIB < needed[""]
    between = (needed[""] + needed["e"]) // 2
    found = plan(between, only="allocator")
    assert found.fits and found.decisions == EXPANDABLE and found.slowdown == 1
    footprint = measure(graph, CARD, vram_bytes=between, decisions=EXPANDABLE).footprint
    assert found.peak.total_bytes == footprint.total_bytes <= between
    assert not plan(between, only=[]).fits


def test_the_defaults_are_kept_if_they_are_as_good(graph):
    enough = measure(graph, CARD, vram_bytes=None).footprint.total_bytes
    assert plan(enough, only="allocator").decisions == ()


@pytest.mark.thorough
def test_other_options_come_before_releasing_the_cache_in_the_middle_of_a_step(graph):
    least = smallest_total_bytes(graph, CARD)
    retried = measure(graph, CARD, vram_bytes=least)
    assert retried.fits and retried.retries
    assert plan(least, only="allocator").decisions == EXPANDABLE
    assert plan(least, only=[]).decisions == ()


@pytest.mark.thorough
def test_the_step_is_simulated_with_the_options_of_the_user(graph, monkeypatch):
    plain = measure(graph, CARD, vram_bytes=None).footprint.total_bytes
    expandable = measure(graph, CARD, vram_bytes=None, decisions=EXPANDABLE).footprint.total_bytes
    assert expandable < plain
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    found = plan(expandable, only="allocator")
    assert found.baseline.total_bytes == expandable and found.decisions == () and found.fits
    assert found.alloc_conf == "expandable_segments:True"
    assert "allocator options of this process (PYTORCH_CUDA_ALLOC_CONF): expandable_segments:True" in found.notes
    assert plan(plain, alloc_conf="").baseline.total_bytes == plain


@pytest.mark.thorough
def test_what_the_user_has_set_is_changed_only_if_the_step_does_not_fit(graph):
    kept = plan(10**10, only="allocator", alloc_conf="expandable_segments:False")
    assert kept.decisions == () and not any("changes options" in note for note in kept.notes)
    # With the user's options the step fits if the cache is released, which comes before a change of them.
    least = smallest_total_bytes(graph, CARD)
    assert plan(least, only="allocator", alloc_conf="expandable_segments:False,max_split_size_mb:512").decisions == ()
    between = (least + smallest_total_bytes(graph, CARD, EXPANDABLE)) // 2
    found = plan(between, only="allocator", alloc_conf="expandable_segments:False")
    assert found.decisions == EXPANDABLE and found.fits
    assert any("you have set: expandable_segments from False to True" in note for note in found.notes)


@pytest.mark.thorough
def test_a_plan_that_fits_only_with_the_defaults_says_so(graph):
    enough = measure(graph, CARD, vram_bytes=None).footprint.total_bytes
    found = plan(enough, only=[], alloc_conf="roundup_power2_divisions:1,large_segment_size_mb:512")
    assert not found.fits
    assert any("would fit with PyTorch's default options" in note for note in found.notes)


@pytest.mark.thorough
def test_a_fraction_of_the_memory_is_a_smaller_budget(graph):
    enough = measure(graph, CARD, vram_bytes=None).footprint.total_bytes
    found = plan(enough, only=[], alloc_conf="per_process_memory_fraction:0.02")
    assert not found.fits and found.usable_bytes == int(0.02 * CARD.vram_bytes) + CARD.context_bytes
    assert plan(enough, only=[], alloc_conf="per_process_memory_fraction:0.9").fits


def test_only_options_that_the_user_has_not_set_are_proposed():
    def with_conf(conf, **options):
        return alternatives(dataclasses.replace(CARD, alloc_conf=conf), **options)

    assert EXPANDABLE not in with_conf("expandable_segments:True")
    split = [(Allocator(max_split_size_mb=size),) for size in (512, 128)]
    assert with_conf("max_split_size_mb:512") == ((), EXPANDABLE, split[1])
    assert with_conf("expandable_segments:False") == ((), *split, EXPANDABLE)
    assert with_conf("large_segment_size_mb:600,expandable_segments:True") == ((),)
    with pytest.raises(DecisionError, match="allocator is forced, but you have set its options"):
        with_conf("large_segment_size_mb:600,expandable_segments:True", force="allocator")


def test_forced_options_are_used_where_they_are_not_needed(graph):
    enough = measure(graph, CARD, vram_bytes=None).footprint.total_bytes
    assert plan(enough, only="allocator", force="expandable-segments").decisions == EXPANDABLE


def alternatives(card=CARD, **options):
    return allocator_alternatives(
        card, parse_constraints(**{"fidelity": "exact", "force": (), "forbid": (), **options})
    )


def test_where_a_technique_cannot_be_used_it_is_not_offered(monkeypatch):
    assert alternatives()[:2] == ((), EXPANDABLE) and () not in alternatives(force="allocator")
    assert alternatives(forbid="allocator") == alternatives(resolve_card("bare", None)) == ((),)
    with pytest.raises(DecisionError, match=r"allocator is forced, but .* no caching allocator"):
        alternatives(resolve_card("bare", None), force="allocator")
    for system, release in (("Windows", "11"), ("Linux", "5.15.153.1-microsoft-standard-WSL2")):
        monkeypatch.setattr(platform, "system", lambda system=system: system)
        monkeypatch.setattr(platform, "release", lambda release=release: release)
        assert EXPANDABLE not in alternatives() and len(alternatives()) > 1
