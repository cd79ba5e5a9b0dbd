"""A simulated run against one recording of all its steps, and against a plain replay of the same requests."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random

import pytest
import torch
from torch import nn

from planner import profiles
from planner.allocator.blocks import Placement
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.options import settings_of
from planner.allocator.out_of_memory import OutOfMemory
from planner.allocator.settings import PYTORCH_DEFAULTS
from planner.estimate.allocation_stream import allocation_stream
from planner.plan_types.sizes import MIB
from planner.recording.step_graph import StepGraph
from planner.rewrite import rehearse
from planner.run_memory.moments import FIRST_LOCAL, RELEASE, Events, Slots, in_rounds, moments_of
from planner.run_memory.simulation import RunOutcome, simulate
from planner.workload.workload import Workload, workload
from tests.support.tagger import Tagger

CARD = dataclasses.replace(profiles.load("rtx-2060"), segment_addresses="descending")
SETTINGS = [PYTORCH_DEFAULTS, settings_of("expandable_segments:True"), settings_of("max_split_size_mb:128")]
LENGTHS = (50, 100, 130, 222, 400)


def training(lengths: list[int], *, holds: bool) -> Workload:
    """A step that makes its own batch, each time of the next length, and holds its loss until the next step.

    If `holds` is true, it holds its output instead, and releases the cache while logits and gradients are alive.
    """
    following, held, model = iter(lengths), {}, Tagger()

    def step(model, optimizer, _):
        tokens = torch.zeros(4, next(following), dtype=torch.long, device=model.head.weight.device)
        optimizer.zero_grad()
        output = model(tokens)
        loss = nn.functional.cross_entropy(output.flatten(0, 1), tokens.flatten())
        loss.backward()
        if holds:
            torch.cuda.empty_cache()
        optimizer.step()
        held["before"] = output.detach() if holds else loss.detach()

    return workload(model, None, step=step, optimizer=torch.optim.AdamW(model.parameters()))


def recorded(lengths: list[int], *, holds: bool) -> StepGraph:
    work = training(lengths, holds=holds)
    child = rehearse.start_rehearsal(work, (), CARD, sizes=(1,), steps=len(lengths), primed=False, what_if=False)
    return rehearse.finish_certificate(child.result(), work, CARD)


def composed(order: list[int], *, holds: bool) -> list[tuple[Events, ...]]:
    """The moments of a run, each from a recording of two steps of the same length."""
    slots = Slots()
    moments = {
        length: moments_of(recorded([length] * 2, holds=holds), ("step", "step"), slots, granularity_bytes=512)
        for length in sorted(set(order))
    }
    setup, first = moments[order[0]]
    return [setup, first["step"].first, *(moments[length][1]["step"].again for length in order[1:])]


@pytest.fixture(scope="module", params=[False, True], ids=["loss-held", "output-held-cache-released"])
def run(request) -> tuple[list[int], bool, list[tuple[Events, ...]]]:
    source = random.Random(3)
    order = [source.choice(LENGTHS) for _ in range(40)]
    return order, request.param, composed(order, holds=request.param)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_that_is_put_together_reserves_what_one_recording_of_all_steps_reserves(run):
    order, holds, moments = run
    graph = recorded(order, holds=holds)
    assert len(graph.cache_releases) == (len(order) if holds else 0)
    for settings in SETTINGS[:2]:
        assert simulate(moments, settings, CARD, None).peaks == peaks_of(graph, settings)


def peaks_of(graph: StepGraph, settings) -> tuple[int, ...]:
    """The reserved bytes of the setup and of each step of a recording, whose requests are sent to one allocator."""
    requests = [*zip(*(column.tolist() for column in allocation_stream(graph)), strict=True)]
    events = sorted([*requests, *((RELEASE, 0, tick) for tick in graph.cache_releases)], key=lambda event: event[2])
    allocator = CachingAllocator(settings, None, place=Placement(descending=True), card_bytes=CARD.vram_bytes)
    alive, peaks, starts = {}, [], itertools.chain(graph.step_starts, [graph.ticks])
    start = next(starts)
    for block, size_bytes, tick in events:
        while tick > start:
            peaks.append(allocator.peak_reserved_bytes)
            allocator.driver.peak_reserved_bytes = allocator.reserved_bytes
            start = next(starts)
        if size_bytes:
            alive[block] = allocator.malloc(size_bytes)
        elif block == RELEASE:
            allocator.empty_cache()
        else:
            allocator.free(alive.pop(block))
    return (*peaks, allocator.peak_reserved_bytes)


def differing(*, updates_every: int = 1, keeps: int = 1) -> Workload:
    """A step that updates in every n-th call, and keeps its last outputs."""
    kept, calls, model = collections.deque(maxlen=keeps), [0], Tagger()

    def step(model, optimizer, _):
        output = model(torch.zeros(4, 200, dtype=torch.long, device=model.head.weight.device))
        output.square().mean().backward()
        calls[0] = (calls[0] + 1) % updates_every
        if not calls[0]:
            optimizer.step()
            optimizer.zero_grad()
        kept.append(output.detach())

    return workload(model, None, step=step, optimizer=torch.optim.AdamW(model.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"updates_every": 3}, {"keeps": 4}, {"updates_every": 2, "keeps": 3}], ids=str)
@pytest.mark.thorough_after(1)
def test_a_run_of_calls_that_differ_reserves_what_one_recording_of_all_calls_reserves(options):
    known = rehearse.certifying_graph(differing(**options), (), CARD)
    assert (known.schedule.period, known.schedule.is_certain) == (options.get("updates_every", 1), True)
    setup, moments = moments_of(in_rounds(known), ("step", "step"), Slots(), granularity_bytes=512)
    step, rounds = moments["step"], 12
    run = [setup, step.first, *[step.again] * rounds]
    calls, work = known.steps + (rounds - 1) * known.schedule.period, differing(**options)
    child = rehearse.start_rehearsal(work, (), CARD, sizes=(1,), steps=calls, primed=False, what_if=False)
    graph = rehearse.finish_certificate(child.result(), work, CARD)
    for settings in SETTINGS[:2]:
        assert simulate(run, settings, CARD, None).peak_bytes == max(peaks_of(graph, settings))


def plain(moments: list[tuple[Events, ...]], settings, capacity_bytes: int | None) -> RunOutcome:
    """The outcome of a run without any shortcut: one allocator, all requests."""
    allocator = CachingAllocator(settings, capacity_bytes, place=Placement(descending=True), card_bytes=CARD.vram_bytes)
    slots, peaks, retries = {}, [], []
    for number, moment in enumerate(moments):
        allocator.driver.peak_reserved_bytes, before, out = allocator.reserved_bytes, allocator.retries, None
        for events in moment:
            local = {}
            try:
                for block, size_bytes in events.stream:
                    if size_bytes:
                        local[block] = allocator.malloc(size_bytes)
                    elif block == RELEASE:
                        allocator.empty_cache()
                    elif block >= FIRST_LOCAL:
                        allocator.free(local.pop(block))
                    elif block in slots:
                        allocator.free(slots.pop(block))
            except OutOfMemory:
                out = number
                break
            slots.update((slot, local[block]) for block, slot in events.leaves)
        peaks.append(allocator.peak_reserved_bytes)
        retries.append(allocator.retries - before)
        if out is not None:
            break
    return RunOutcome(peaks=tuple(peaks), retries=tuple(retries), out_of_memory=out)


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=["defaults", "expandable", "split-limit"])
def test_shortcuts_change_nothing_with_and_without_a_limit(run, settings):
    _, holds, moments = run
    free = plain(moments, settings, None)
    assert simulate(moments, settings, CARD, None) == free
    seen = set()
    for missing_mib in range(2, 120, 10):
        limited = plain(moments, settings, free.peak_bytes - missing_mib * MIB)
        found = simulate(moments, settings, CARD, free.peak_bytes - missing_mib * MIB)
        assert (found.out_of_memory, found.retries) == (limited.out_of_memory, limited.retries)
        if limited.out_of_memory is None:
            assert found == limited
        seen |= {limited.out_of_memory is None, any(limited.retries)}
    assert seen == {True, False} or holds, "some limits are harmless, and some are not"


@pytest.mark.parametrize("makes_more_once", [False, True])
def test_what_a_step_keeps_for_ever_grows_with_each_step_and_what_it_holds_does_not(makes_more_once):
    kept: list[torch.Tensor] = []
    held: dict[str, torch.Tensor] = {}
    model = nn.Linear(512, 512)

    def step(model, optimizer, _):
        device = model.weight.device
        if makes_more_once and not kept:
            held["once"] = torch.zeros(MIB, dtype=torch.uint8, device=device)
        loss = model(torch.zeros(1024, 512, device=device)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(torch.zeros(3 * MIB, dtype=torch.uint8, device=device))
        held["before"] = torch.zeros(64 * MIB, dtype=torch.uint8, device=device)

    work = workload(model, None, step=step, optimizer=torch.optim.SGD(model.parameters()))
    child = rehearse.start_rehearsal(work, (), CARD, sizes=(1,), steps=2, primed=False, what_if=False)
    setup, moments = moments_of(child.result(), ("step", "step"), Slots(), granularity_bytes=512)
    outcome = simulate([setup, moments["step"].first, *[moments["step"].again] * 40], PYTORCH_DEFAULTS, CARD, None)
    assert 40 * 3 * MIB < outcome.peaks[-1] - outcome.peaks[0] < (40 * 3 + 4 * 64) * MIB
    assert outcome.settled > 20


def test_each_moment_must_be_recorded_twice():
    graph = recorded([10, 10], holds=False)
    with pytest.raises(ValueError, match="twice"):
        moments_of(graph, ("step", "evaluation"), Slots(), granularity_bytes=512)
