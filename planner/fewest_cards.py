"""Answers "how many cards do I need?": the smallest number of cards, 1, 2, 4, ..., with which a plan fits."""

from __future__ import annotations

import dataclasses
import time

from planner.errors import WorkloadError
from planner.plan_types.constraints import Constraints
from planner.plan_types.plan import Plan
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.questions import plan_that_fits
from planner.sharded import comparison, plan_sharded, sharded_plan_that_fits
from planner.space.sharding import Cards
from planner.workload.workload import Workload

_POWERS = 11
"""Number of powers of two that are tried: up to 1,024 cards."""
_MORE = 2
"""After the smallest number of cards, this many doublings are planned, too, to compare their step times."""


def plan_on_cards(
    workload: Workload,
    card: DeviceProfile,
    cards: Cards,
    *,
    vram_bytes: int | None,
    constraints: Constraints,
    watch: Watch | None = None,
) -> Plan:
    """Return the plan for `cards.count` cards, or that of `plan_fewest_cards`, which has the same arguments."""
    plan = plan_fewest_cards if cards.fewest else plan_sharded
    return plan(workload, card, cards, vram_bytes=vram_bytes, constraints=constraints, watch=watch)


def plan_fewest_cards(
    workload: Workload,
    card: DeviceProfile,
    cards: Cards,
    *,
    vram_bytes: int | None,
    constraints: Constraints,
    watch: Watch | None = None,
) -> Plan:
    """Return the plan for the smallest number of cards (a power of two) with which a plan fits.

    The batch is the same for all numbers of cards, and is divided among them. Notes name the numbers with which no plan
    fits, and compare larger numbers with the chosen one. If no plan fits with any number, the smallest plan for the
    largest number of cards is returned.

    Args:
        workload: the step with the batch of all cards.
        cards: the cards; `count` is not used.
        vram_bytes: budget of each card.

    Raises:
        WorkloadError: there is no budget, or the work has to be divided, and the number of samples is odd.
    """
    began = time.perf_counter()
    if vram_bytes is None:
        raise WorkloadError("the smallest number of cards depends on the memory of a card: give a budget (--vram)")
    samples = workload.batch_size
    counts = [count for count in (2**n for n in range(_POWERS)) if not samples % count]
    if cards.way is not None or cards.offload:
        counts = [count for count in counts if count > 1]  # a single card shards nothing
    if not counts:
        raise WorkloadError(
            f"a batch of {samples} samples cannot be divided evenly among 2 cards: give the batch of all cards, with "
            "an even number of samples"
        )
    notes: list[str] = []
    chosen: Plan | None = None
    left = _MORE
    for count in counts:
        if watch is not None:
            watch.stage(f"planning for {_cards(count)}")
        plan = _plan_on(count, workload, card, cards, vram_bytes=vram_bytes, constraints=constraints, watch=watch)
        if chosen is None and plan is None:
            notes.append(f"{_cards(count)}: no plan fits")
        elif chosen is None:
            chosen = plan
        else:
            notes.append(f"{_cards(count)}: {comparison(plan, chosen)}")
            left -= 1
            if not left:
                break
    if chosen is None:
        together = dataclasses.replace(cards, count=counts[-1])
        chosen = plan_sharded(workload, card, together, vram_bytes=vram_bytes, constraints=constraints, watch=watch)
        more = 2 * counts[-1]
        why = (
            f"a batch of {samples} samples cannot be divided evenly among them; give a batch that can"
            if samples % more
            else "give their number to plan for them"
        )
        notes.append(f"{_cards(more)} were not tried: {why}")
    seconds = time.perf_counter() - began
    return dataclasses.replace(chosen, notes=(*chosen.notes, *notes), seconds=seconds)


def _plan_on(
    count: int,
    workload: Workload,
    card: DeviceProfile,
    cards: Cards,
    *,
    vram_bytes: int,
    constraints: Constraints,
    watch: Watch | None,
) -> Plan | None:
    """Return the fastest plan for a number of cards; None if no plan fits."""
    if count == 1:
        return plan_that_fits(workload, card, vram_bytes=vram_bytes, constraints=constraints, watch=watch)
    together = dataclasses.replace(cards, count=count)
    return sharded_plan_that_fits(workload, card, together, vram_bytes=vram_bytes, constraints=constraints, watch=watch)


def _cards(count: int) -> str:
    return "1 card" if count == 1 else f"{count} cards"
