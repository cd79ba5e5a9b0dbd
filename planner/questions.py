"""Questions that a plan answers when it is asked for many times: the largest batch, the smallest card."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import profiles
from planner import pipeline
from planner.decisions import Accumulation
from planner.errors import DecisionError
from planner.options import Rules
from planner.plan_file import Plan
from planner.sizes import format_size
from planner.workload import Workload
from profiles.device import DeviceProfile

_MOST_SAMPLES = 1 << 20
_FIRST_SAMPLES = 64
_EXACT_TO = 64
"""A batch is the largest to within one sample in so many: finding out takes a whole search for each."""


def largest_batch(build: Callable[[int], Workload], card: DeviceProfile, *, vram_bytes: int, rules: Rules) -> Plan:
    """The plan for the largest batch that fits without accumulation; where none does, what a single sample lacks.

    Bytes are nearly affine in the number of samples, so the next size asked is where the line through two known ones
    meets the budget. That only saves questions: the smallest plan of the size found fits by its certificate, that of
    a size above it does not (one sample more, from 128 samples on a few), and what fits is taken to fit at all smaller
    sizes. Frozen prefixes are left out.

    Args:
        build: from a batch size to the workload.

    Raises:
        DecisionError: accumulation is forced, or a slowdown is limited.
    """
    if rules.max_slowdown is not None:
        raise DecisionError("the largest batch is asked for at any speed: leave out the limit of the slowdown")
    if rules.allow(Accumulation):
        rules = dataclasses.replace(rules, forbidden=(*rules.forbidden, Accumulation.kind))

    def needed_bytes(samples: int) -> int:
        return pipeline.smallest_total_bytes(build(samples), card, vram_bytes=vram_bytes, rules=rules)

    samples, too_many = largest_within(needed_bytes, limit_bytes=vram_bytes, first=_FIRST_SAMPLES, most=_MOST_SAMPLES)
    plan = pipeline.plan_workload(build(max(samples, 1)), card, vram_bytes=vram_bytes, rules=rules)
    if not samples:
        return plan
    more = f"{too_many:,} do not" if too_many <= _MOST_SAMPLES else "more were not tried"
    return _noted(plan, f"largest batch without accumulation: {samples:,} samples fit, {more}")


def largest_within(needed_bytes: Callable[[int], int], *, limit_bytes: int, first: int, most: int) -> tuple[int, int]:
    """Largest number in 1..most whose need is within the limit, and one above it whose need is not.

    Interpolation search for needs that rise and are nearly affine, and bisection after two answers on one side. The two
    numbers are neighbours below `_EXACT_TO`, and within one in so many above. (0, 1) and (most, most + 1) where there
    is none.
    """
    known = {number: needed_bytes(number) for number in (1, first)}
    sides: list[bool] = []
    while True:
        low = max((number for number, need in known.items() if need <= limit_bytes), default=0)
        high = min((number for number, need in known.items() if need > limit_bytes), default=most + 1)
        if high - low <= max(1, low // _EXACT_TO):
            return low, high
        one, other = sorted(known, key=lambda number: abs(known[number] - limit_bytes))[:2]
        slope = (known[one] - known[other]) / (one - other)
        if slope <= 0 or (len(sides) > 1 and sides[-1] == sides[-2] and high <= most):
            guess = (low + high) // 2
        else:
            guess = one + int((limit_bytes - known[one]) // slope)
        asked = min(max(guess, low + 1), high - 1)
        known[asked] = needed_bytes(asked)
        sides.append(known[asked] <= limit_bytes)


def smallest_card(work: Workload, rules: Rules) -> Plan:
    """The plan on the card with the least memory on which there is one; what the largest card lacks, if on none.

    Every smaller card is tried: kernels and dtypes differ, so that a smaller one may do where a larger one does not.
    """
    cards = sorted((profiles.load(name) for name in profiles.known()), key=lambda card: (card.vram_bytes, card.name))
    for number, card in enumerate(cards):
        plan = pipeline.plan_that_fits(work, card, vram_bytes=card.vram_bytes, rules=rules)
        if plan is not None:
            smaller = f"no plan fits on {number} with as little memory or less" if number else "none known has less"
            return _noted(plan, f"smallest card: {card.title} ({format_size(card.vram_bytes)}); {smaller}")
    largest = cards[-1]
    plan = pipeline.plan_workload(work, largest, vram_bytes=largest.vram_bytes, rules=rules)
    return _noted(plan, f"none of {len(cards)} known cards will do; the largest is {largest.title}")


def _noted(plan: Plan, note: str) -> Plan:
    return dataclasses.replace(plan, notes=(note, *plan.notes))
