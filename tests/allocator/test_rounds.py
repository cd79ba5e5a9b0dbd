"""Rounds of events that repeat, such as training steps: a later round may need more segments than the recorded ones."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from planner.allocator import replay as module
from planner.allocator.replay import Round, replay
from planner.allocator.settings import PYTORCH_DEFAULTS
from planner.plan_types.sizes import MIB

Events = list[tuple[int, int]]
SIZES = [size * MIB // 2 for size in (4, 6, 8, 12, 16, 22, 24, 26, 30, 34, 38, 41, 44, 46, 50)]


def one_round(source: random.Random, kept: int) -> Events:
    """Returns the requests of a round.

    `(n, 0)` with n below `kept` frees a storage of the round before. `(-1 - n, size)` allocates its successor, which
    the next round frees.
    """
    local: list[int] = []
    numbers = itertools.count(kept)
    waiting = [(number, 0) for number in range(kept)] + [(-1 - number, SIZES[number]) for number in range(kept)]
    events: Events = []
    for _ in range(120):
        if waiting and source.random() < 0.15:
            events.append(waiting.pop(0))
        elif local and source.random() < 0.5:
            events.append((local.pop(source.randrange(len(local))), 0))
        else:
            local.append(next(numbers))
            events.append((local[-1], source.choice(SIZES)))
    return events + waiting + [(number, 0) for number in local]


def repeated(kept: int, first: Events, again: Events, rounds: int) -> tuple[Events, int]:
    """Returns the requests of a setup, a first round and further rounds, and the index at which the last one begins."""
    identity = itertools.count()
    left = {number: next(identity) for number in range(kept)}
    events = [(block, SIZES[number]) for number, block in left.items()]
    start = 0
    for requests in [first] + [again] * rounds:
        start, blocks = len(events), dict[int, int]()
        for number, size in requests:
            if size:
                blocks[number] = next(identity)
            is_left = not size and number < kept
            events.append((left[number] if is_left else blocks[number], size))
        left = {number: blocks[-1 - number] for number in range(kept)}
    return events, start


def last_round(kept: int, first: Events, again: Events) -> tuple[Events, Round]:
    events, start = repeated(kept, first, again, 1)
    freed = [block for block, size in events[start:] if not size]
    made = [block for block, size in events[start:] if size and block not in freed]
    before = [block for block in freed if block not in [other for other, size in events[start:] if size]]
    sizes = dict(pair for pair in events if pair[1])
    assert sorted(sizes[block] for block in made) == sorted(sizes[block] for block in before) == sorted(SIZES[:kept])
    return events, Round(start, {block: next(b for b in before if sizes[b] == sizes[block]) for block in made})


@pytest.mark.parametrize("kept", [0, 1, 4])
@pytest.mark.parametrize("seed", range(25))
def test_a_repeated_round_needs_what_many_rounds_need(kept, seed):
    source = random.Random(seed)
    first, again = one_round(source, kept), one_round(source, kept)
    events, last = last_round(kept, first, again)
    many, _ = repeated(kept, first, again, 40)
    least = replay(many, PYTORCH_DEFAULTS, None).peak_reserved_bytes
    assert replay(events, PYTORCH_DEFAULTS, None, last_round=last).peak_reserved_bytes == least
    for capacity in range(least - 30 * MIB, least + 2 * MIB, 7 * MIB):
        repeats = replay(events, PYTORCH_DEFAULTS, capacity, last_round=last)
        runs = replay(many, PYTORCH_DEFAULTS, capacity)
        assert (repeats.out_of_memory_event is None) == (runs.out_of_memory_event is None)


def test_some_later_rounds_need_more_than_the_first_two():
    more = []
    for seed in range(25):
        source = random.Random(seed)
        events, last = last_round(1, one_round(source, 1), one_round(source, 1))
        once = replay(events, PYTORCH_DEFAULTS, None).peak_reserved_bytes
        if replay(events, PYTORCH_DEFAULTS, None, last_round=last).peak_reserved_bytes > once:
            more.append(seed)
    assert more == [2, 5, 7, 15, 17, 19, 20, 23]


def test_rounds_end_when_the_allocator_is_in_an_earlier_state(monkeypatch):
    states: list[object] = []
    state = module._state
    monkeypatch.setattr(module, "_state", lambda *of: states.append(state(*of)) or states[-1])
    alike: Events = [(5, 30 * MIB), (5, 0)]
    events, last = last_round(0, alike, alike)
    assert replay(events, PYTORCH_DEFAULTS, None, last_round=last).peak_reserved_bytes == 30 * MIB
    assert len(states) == 2 and states[0] == states[1]  # after the first round and after the second


def test_a_state_repeats_although_its_segments_have_other_addresses(monkeypatch):
    """Large blocks are not split here. Each round releases them to allocate small ones, at other addresses."""
    states: list[object] = []
    state = module._state
    monkeypatch.setattr(module, "_state", lambda *of: states.append(state(*of)) or states[-1])
    settings = dataclasses.replace(PYTORCH_DEFAULTS, max_split_size_bytes=20 * MIB)
    alike: Events = [(5, 60 * MIB), (5, 0), (6, 18 * MIB), (7, 18 * MIB), (6, 0), (7, 0)]
    events, last = last_round(0, alike, alike)
    outcome = replay(events, settings, 75 * MIB, last_round=last)
    assert outcome.out_of_memory_event is None and outcome.peak_reserved_bytes == 60 * MIB
    assert len(states) == 2
