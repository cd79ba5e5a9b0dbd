"""Steps of the user's own whose calls differ: the plan covers all calls until they repeat."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn

import planner
from planner import pipeline, profiles
from planner.plan_types.sizes import MIB
from planner.recording.step_graph import StepGraph
from planner.workload.workload import Workload, workload

WIDTH, SAMPLES = 512, 1024
OUTPUT_BYTES = 4 * WIDTH * SAMPLES
BATCH = torch.zeros(SAMPLES, WIDTH)
CARD = profiles.load("bare")
COUNT = 0


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def trained(model, optimizer, batch) -> torch.Tensor:
    output = model(batch)
    output.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return output.detach()


def updating_every(count: int):
    calls = [0]

    def step(model, optimizer, batch):
        model(batch).square().mean().backward()
        calls[0] += 1
        if calls[0] % count == 0:
            optimizer.step()
            optimizer.zero_grad()

    return step


def keeping(last: int | None):
    kept = collections.deque(maxlen=last)

    def step(model, optimizer, batch):
        kept.append(trained(model, optimizer, batch))

    return step


def caching(after: int):
    """Makes a cache in a call, and counts until then."""
    state = {"calls": 0}

    def step(model, optimizer, batch):
        trained(model, optimizer, batch)
        state["calls"] = min(state["calls"] + 1, after)
        if state["calls"] == after and "cache" not in state:
            state["cache"] = batch.new_zeros(SAMPLES, WIDTH)

    return step


def logging():
    calls = [0]

    def step(model, optimizer, batch):
        trained(model, optimizer, batch)
        calls[0] += 1

    return step


def helper(model, optimizer, batch):
    global COUNT
    COUNT += 1
    trained(model, optimizer, batch)
    if COUNT % 5 == 0:
        model(torch.cat([batch, batch]))


def by_a_helper():
    def step(model, optimizer, batch):
        helper(model, optimizer, batch)

    return step


def work(step) -> Workload:
    return workload(network(), BATCH, step=step, optimizer="adamw")


def recorded(step) -> StepGraph:
    return pipeline.record_step(work(step), CARD)


def of_calls(step, calls: int) -> int:
    """Returns the peak of a fixed number of calls."""
    from planner.rewrite import rehearse

    child = rehearse.start_rehearsal(work(step), (), CARD, sizes=(SAMPLES,), steps=calls, primed=False, what_if=False)
    return int(rehearse.finish_certificate(child.result(), work(step), CARD).live_bytes().max())


@pytest.mark.parametrize(
    ("make", "calls", "period", "watched", "is_certain"),
    [
        (lambda: trained, 2, 1, 2, True),
        (logging, 2, 1, 16, False),
        (lambda: updating_every(3), 6, 3, 16, False),
        (lambda: updating_every(6), 12, 6, 16, False),
        (lambda: updating_every(12), 14, 1, 16, False),
        (lambda: keeping(2), 3, 1, 4, True),
        (lambda: keeping(6), 7, 1, 8, True),
        (lambda: caching(5), 6, 1, 7, True),
        (by_a_helper, 6, 5, 16, False),
    ],
    ids=[
        "plain",
        "logging",
        "update in every 3rd",
        "in every 6th",
        "in every 12th",
        "keeps 2",
        "keeps 6",
        "cache",
        "helper",
    ],
)
@pytest.mark.thorough_after(3)
@pytest.mark.thorough_after(2)
def test_calls_are_recorded_until_they_repeat(make, calls, period, watched, is_certain):
    graph = recorded(make())
    found = graph.schedule
    assert int(graph.live_bytes().max()) == of_calls(make(), 40)
    assert (graph.steps, found.watched, found.is_certain) == (calls, watched, is_certain)
    assert (found.repeats, found.period) == (True, period)


def hidden(last: int):
    """Keeps its last outputs in a generator, whose variables nobody can read."""

    def keeper():
        kept = collections.deque(maxlen=last)
        while True:
            kept.append((yield))

    kept = keeper()
    next(kept)

    def step(model, optimizer, batch):
        kept.send(trained(model, optimizer, batch))

    return step


def test_memory_that_no_number_shows_is_seen():
    assert int(recorded(hidden(4)).live_bytes().max()) == of_calls(hidden(4), 20)


def notes_of(step, **options) -> str:
    plan = planner.plan(network(), BATCH, vram=None, gpu="bare", step=step, progress=False, **options)
    return "\n".join(plan.notes)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: keeping(None), f"{OUTPUT_BYTES / MIB:.1f} MiB more in each call, and the plan covers 16 calls"),
        (logging, "each step changes the state of the step function, and the plan covers 16 calls"),
    ],
)
def test_a_note_says_what_later_calls_may_need(make, words):
    assert words in notes_of(make())


def test_no_note_if_later_calls_are_known():
    assert "calls" not in notes_of(keeping(6))


@pytest.mark.slow
@pytest.mark.thorough
def test_the_certificates_of_a_plan_cover_the_same_calls():
    step = updating_every(3)
    plan = planner.plan(network(), BATCH, vram=None, gpu="bare", step=step, progress=False)
    smaller = planner.plan(
        network(), BATCH, vram=plan.peak.total_bytes - 3 * MIB, gpu="bare", step=updating_every(3), progress=False
    )
    assert smaller.decisions
    calls = pipeline.record_step(work(updating_every(3)), CARD, smaller.decisions)
    assert calls.steps == 6
    assert int(calls.live_bytes().max()) == smaller.peak.allocated_bytes


class Lookahead(torch.optim.SGD):
    """Counts its updates in an attribute, as a lookahead optimizer does. Counts nothing if `every` is 0."""

    def __init__(self, parameters, *, every: int) -> None:
        super().__init__(parameters, lr=0.1)
        self.every, self.updates = every, 0

    def step(self, closure=None):
        super().step(closure)
        self.updates += 1 if self.every else 0


@pytest.mark.parametrize(
    ("make", "changed"),
    [
        (lambda parameters: Lookahead(parameters, every=5), "the attribute 'updates' of Lookahead"),
        (lambda parameters: Lookahead(parameters, every=0), None),
        (torch.optim.AdamW, None),
        (lambda parameters: torch.optim.ASGD(parameters, t0=1), None),
    ],
)
def test_a_note_names_what_each_update_of_an_own_optimizer_changes(make, changed):
    plan = planner.plan(network(), BATCH, vram="1GiB", gpu="bare", loss_fn=lambda out, _: out.mean(), optimizer=make)
    notes = [note for note in plan.notes if note.startswith("the last rehearsed step changed ")]
    assert notes == ([] if changed is None else [notes[0]])
    assert changed is None or f"{changed}, and the plan covers 2 steps" in notes[0]
