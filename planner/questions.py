"""Questions that a plan answers when it is asked for many times: the largest batch, the smallest card."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import profiles
from planner import pipeline
from planner.decisions import Accumulation
from planner.options import Rules
from planner.plan_file import Plan
from planner.search.threshold import first_true
from planner.sizes import format_size
from planner.workload import Workload
from profiles.device import DeviceProfile

_MOST_SAMPLES = 1 << 20
_PROBES = (8, 64)
"""Batch sizes from which the smallest peak at others is guessed."""


def largest_batch(build: Callable[[int], Workload], card: DeviceProfile, *, vram_bytes: int, rules: Rules) -> Plan:
    """The plan for the largest batch that fits without accumulation; where none does, what a single sample lacks.

    The guess takes bytes to be affine in the number of samples. It only says where to begin: the answer fits by its
    certificate, and for one sample more no plan was found. What fits is taken to fit at all smaller sizes.

    Args:
        build: from a batch size to the workload.

    Raises:
        DecisionError: accumulation is forced.
    """
    if rules.allow(Accumulation) or rules.force(Accumulation):
        rules = dataclasses.replace(rules, forbidden=(*rules.forbidden, Accumulation.kind))

    @functools.cache
    def fitting_plan(samples: int) -> Plan | None:
        return pipeline.plan_that_fits(build(samples), card, vram_bytes=vram_bytes, rules=rules)

    def too_large(number: int) -> bool:
        return fitting_plan(number + 1) is None

    few, many = (pipeline.smallest_promise(build(samples), card, rules=rules) for samples in _PROBES)
    sample_bytes = max((many - few) // (_PROBES[1] - _PROBES[0]), 1)
    guess = _PROBES[0] + (vram_bytes - card.context_bytes - few) // sample_bytes
    samples = first_true(_MOST_SAMPLES, too_large, guess=guess)
    if samples == 0:
        return pipeline.plan_workload(build(1), card, vram_bytes=vram_bytes, rules=rules)
    more = f"{samples + 1:,} do not" if samples < _MOST_SAMPLES else "more were not tried"
    return _noted(fitting_plan(samples), f"largest batch without accumulation: {samples:,} samples fit, {more}")


def smallest_card(work: Workload, rules: Rules) -> Plan:
    """The plan on the card with the least memory on which there is one; what the largest card lacks, if on none.

    Every smaller card is tried: kernels and dtypes differ, so that a smaller one may do where a larger one does not.
    """
    cards = sorted((profiles.load(name) for name in profiles.known()), key=lambda card: (card.vram_bytes, card.name))
    for number, card in enumerate(cards):
        plan = pipeline.plan_that_fits(work, card, vram_bytes=card.vram_bytes, rules=rules)
        if plan is not None:
            size = format_size(card.vram_bytes)
            return _noted(plan, f"smallest card: {card.title} ({size}); {number} smaller or as small ones do not do")
    largest = cards[-1]
    plan = pipeline.plan_workload(work, largest, vram_bytes=largest.vram_bytes, rules=rules)
    return _noted(plan, f"none of {len(cards)} known cards will do; the largest is {largest.title}")


def _noted(plan: Plan, note: str) -> Plan:
    return dataclasses.replace(plan, notes=(note, *plan.notes))
