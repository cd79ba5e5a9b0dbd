"""The smallest card: the known card with the least memory on which a plan fits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from planner import pipeline, profiles
from planner.errors import TimeLimitError
from planner.plan_types.constraints import Constraints
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import format_size
from planner.plan_types.words import counted
from planner.progress import Watch
from planner.questions.known_plans import noted, plan_that_fits
from planner.workload.workload import Workload


def smallest_card(
    workload: Workload,
    constraints: Constraints,
    watch: Watch | None = None,
    *,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Plan:
    """Returns the plan for the known card with the least memory on which a plan fits.

    If no card is large enough, returns the plan for the largest card, with its shortfall. All cards are tried from the
    smallest to the largest, without bisection: kernels and dtypes differ between cards, so a plan may fit a smaller
    card and not a larger card.

    Args:
        watch: limits the time, and receives progress; None for no limit.
        settings: what the user has set for the process on the card: values by the name of a field of `DeviceProfile`.

    Raises:
        TimeLimitError: the time was up before a plan was certified. The message says how many cards were tried.
    """
    watch = watch or Watch()
    known = (dataclasses.replace(profiles.load(name), **settings) for name in profiles.known())
    cards = sorted(known, key=lambda card: (card.vram_bytes, card.name))
    for number, card in enumerate(cards):
        before = f"no plan fits the {counted(number, 'card')} tried before it" if number else ""
        try:
            with watch.apart(functools.partial("card {} of {}, {}".format, number + 1, len(cards), card.title)):
                plan = plan_that_fits(workload, card, vram_bytes=card.vram_bytes, constraints=constraints, watch=watch)
        except TimeLimitError as error:
            raise TimeLimitError(
                f"planning ended {watch.cause}, while it looked for a plan for the card {card.title}"
                f"{before and ': '}{before}; give more time (--time-limit), or name a card (--gpu) and its --vram"
            ) from error
        if plan is not None:
            smaller = before or "no known card has less memory"
            return noted(plan, f"smallest card: {card.title} ({format_size(card.vram_bytes)}); {smaller}")
    largest = cards[-1]
    plan = pipeline.plan_workload(
        workload, largest, vram_bytes=largest.vram_bytes, constraints=constraints, watch=watch
    )
    return noted(plan, f"none of the {len(cards)} known cards is large enough; the largest is {largest.title}")
