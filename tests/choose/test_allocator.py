"""Options of the allocator are chosen by the certificate: only if the plan needs them, and never against the user."""

import platform

import pytest

import planner
from examples import convnet
from planner import pipeline
from planner.allocator.settings import settings_of
from planner.errors import DecisionError
from planner.estimate.footprint import measure, smallest_capacity_bytes
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
def test_a_step_that_fits_only_with_other_options_gets_them(graph):
    needed = {name: smallest_capacity_bytes(graph, CARD, options) for name, options in (("", ()), ("e", EXPANDABLE))}
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


def test_other_options_come_before_releasing_the_cache_in_the_middle_of_a_step(graph):
    least = smallest_capacity_bytes(graph, CARD)
    retried = measure(graph, CARD, vram_bytes=least)
    assert retried.fits and retried.retries
    assert plan(least, only="allocator").decisions == EXPANDABLE
    assert plan(least, only=[]).decisions == ()


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


def test_options_of_the_simulator_are_those_of_the_variable():
    assert settings_of({"expandable_segments": True}).expandable_segments
    assert settings_of({"max_split_size_mb": 64}).max_split_size_bytes == 64 * MIB
    with pytest.raises(ValueError, match="'backend' cannot be set"):
        settings_of({"backend": "native"})
