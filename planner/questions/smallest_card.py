"""The smallest card: the known card with the least memory on which a plan fits."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from planner import pipeline, profiles
from planner.errors import TimeLimitError
from planner.plan_types.constraints import Constraints
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import format_size
from planner.plan_types.words import counted
from planner.profiles.device import DeviceProfile
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
        TimeLimitError: the time was up before a plan was certified. If other cards were tried before, the message says
            how many.
    """
    watch = watch or Watch()
    known = (dataclasses.replace(profiles.load(name), **settings) for name in profiles.known())
    cards = sorted(known, key=lambda card: (card.vram_bytes, card.name))
    for number, card in enumerate(cards):
        before = f"no plan fits the {counted(number, 'card')} tried before it" if number else ""
        progress = functools.partial("card {} of {}, {}".format, number + 1, len(cards), card.title)
        with _naming(card, before, watch), watch.apart(progress):
            plan = plan_that_fits(workload, card, vram_bytes=card.vram_bytes, constraints=constraints, watch=watch)
        if plan is not None:
            smaller = before or "no known card has less memory"
            return noted(plan, f"smallest card: {card.title} ({format_size(card.vram_bytes)}); {smaller}")
    largest = cards[-1]
    with _naming(largest, f"no plan fits any of the {len(cards)} known cards", watch):
        plan = pipeline.plan_workload(
            workload, largest, vram_bytes=largest.vram_bytes, constraints=constraints, watch=watch
        )
    return noted(plan, f"none of the {len(cards)} known cards is large enough; the largest is {largest.title}")


@contextlib.contextmanager
def _naming(card: DeviceProfile, known: str, watch: Watch) -> Iterator[None]:
    """Adds the card, and what is known of the cards that were tried before, to the message of a `TimeLimitError`."""
    try:
        yield
    except TimeLimitError as error:
        more = "let it run longer" if watch.is_ended else "give more time (--time-limit)"
        raise TimeLimitError(
            f"planning ended {watch.cause}, during the search for a plan for the card {card.title}"
            f"{known and '; '}{known}; {more}, or name a card (--gpu) and its --vram"
        ) from error
