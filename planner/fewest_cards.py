"""Answers "how many cards do I need?": the smallest number of cards, 1, 2, 4, ..., with which a plan fits.

A plan with half as many cards may need only one change that the user has not allowed or asked for, such as a lower
precision. Such changes are tried, too. Each that is reported has a certified plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from planner import pipeline
from planner.adapted import ADAPTERS, plan_or_adapt
from planner.choose.relaxations import relaxations, single_relaxations
from planner.errors import StepError, TimeLimitError, WorkloadError
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import Fidelity
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import format_size
from planner.plan_types.words import counted
from planner.profiles.device import DeviceProfile
from planner.progress import TimeIsUp, Watch
from planner.questions.known_plans import plan_that_fits
from planner.sharded import comparison, plan_sharded, sharded_plan_that_fits, smallest_sharded_plan, smallest_way
from planner.space.sharding import Cards, asks_for_divided_parameters
from planner.workload.adapters import adapted_workload, why_not_adapted
from planner.workload.budget import Budget
from planner.workload.workload import Workload

_POWERS = 11
"""Number of powers of two that are tried: up to 1,024 cards."""
_MORE = 2
"""After the smallest number of cards, this many doublings are planned, too, to compare their step times."""
_SECONDS = 60
"""Time limit in seconds for the search for changes with which fewer cards are enough."""
_CHANGES = 3
"""Maximum number of such changes that are reported."""


def plan_on_cards(
    workload: Workload,
    card: DeviceProfile,
    cards: Cards,
    *,
    vram_bytes: int | None,
    constraints: Constraints,
    watch: Watch | None = None,
) -> Plan:
    """Return the plan for `cards.count` cards, or that of `plan_fewest_cards`, which has the same arguments.

    If no plan for a given number of cards fits, adapters are tried, as for one card (`plan_or_adapt`).
    """
    options: dict[str, Any] = {"vram_bytes": vram_bytes, "constraints": constraints, "watch": watch}
    if cards.fewest:
        return plan_fewest_cards(workload, card, cards, **options)
    if cards.own is not None:
        return plan_sharded(workload, card, cards, **options)
    return plan_or_adapt(
        workload,
        card,
        **options,
        plan_step=lambda work, card, **settings: plan_sharded(work, card, cards, **settings),
        plan_fitting=lambda work, card, **settings: sharded_plan_that_fits(work, card, cards, **settings),
        plan_smallest=lambda work, card, **settings: smallest_sharded_plan(work, card, cards, **settings),
        adapters=[one for one in ADAPTERS if not (one.is_quantized and asks_for_divided_parameters(cards))],
    )


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
    fits, say which single change would make the next smaller number enough, and compare larger numbers with the chosen
    one. If no plan fits with any number, the smallest plan for the largest number of cards is returned.

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
            f"a batch of {counted(samples, 'sample')} cannot be divided evenly among 2 cards: give the batch of all "
            "cards, with an even number of samples"
        )
    notes: list[str] = []
    too_few: list[int] = []
    chosen: Plan | None = None
    left = _MORE
    watch = watch or Watch()
    for count in counts:
        watch.stage(f"planning for {_cards(count)}")
        try:
            plan = _plan_on(count, workload, card, cards, vram_bytes=vram_bytes, constraints=constraints, watch=watch)
        except (StepError, TimeLimitError) as error:
            if chosen is None:
                raise
            notes.append(f"{_cards(count)}: not compared: {error}")  # the answer is known already
            break
        if chosen is None and plan is None:
            notes.append(f"{_cards(count)}: no plan fits")
            too_few.append(count)
        elif chosen is None:
            chosen = plan
        else:
            notes.append(f"{_cards(count)}: {comparison(plan, chosen)}")
            left -= 1
            if not left:
                break
    if chosen is None:
        options: dict[str, Any] = {"vram_bytes": vram_bytes, "constraints": constraints, "watch": watch}
        if counts[-1] == 1:
            chosen = pipeline.plan_workload(workload, card, **options)
        else:
            chosen = plan_sharded(workload, card, dataclasses.replace(cards, count=counts[-1]), **options)
        more = 2 * counts[-1]
        why = (
            f"a batch of {counted(samples, 'sample')} cannot be divided evenly among them; choose a batch size "
            f"that is a multiple of {more}"
            if samples % more
            else f"plan for them with --cards {more} (cards={more} in Python)"
        )
        notes.append(f"{_cards(more)} were not tried: {why}")
    elif too_few:
        changes = _Changes(
            workload, card, cards, too_few[-1], vram_bytes=vram_bytes, constraints=constraints, watch=watch
        )
        notes += changes.that_fit(chosen)
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


class _Changes:
    """Single changes with which a number of cards might be enough that is too small without them."""

    def __init__(
        self,
        workload: Workload,
        card: DeviceProfile,
        cards: Cards,
        count: int,
        *,
        vram_bytes: int,
        constraints: Constraints,
        watch: Watch,
    ) -> None:
        self._workload, self._card, self._cards, self._count = workload, card, cards, count
        self._vram_bytes, self._constraints, self._watch = vram_bytes, constraints, watch

    def that_fit(self, chosen: Plan) -> list[str]:
        """Return a note for each change for which a certified plan was found in time, the mildest changes first.

        Args:
            chosen: the plan for more cards, with which step times are compared.
        """
        found: list[str] = []
        self._watch.stage(f"looking for changes that make a plan for {_cards(self._count)} fit")
        with contextlib.suppress(TimeIsUp), self._watch.at_most(_SECONDS):
            for change, total_bytes, step_ns in self._fitting():
                slower = step_ns / max(chosen.peak.step_ns, 1)
                size = format_size(total_bytes) + (" on each card" if self._count > 1 else "")
                found.append(
                    f"{_cards(self._count)} would be enough with one change ({change}): the plan needs {size}, and its "
                    f"step takes {slower:.2f} times as long as that of the chosen plan"
                )
                if len(found) == _CHANGES:
                    break
        return found

    def _fitting(self) -> Iterator[tuple[str, int, int]]:
        """Yield each change with which a plan fits, its total in bytes on each card, and its step time in ns."""
        yield from self._relaxed()
        if self._count > 1 and self._cards.way not in (None, "fsdp"):
            of_shards = dataclasses.replace(self._cards, way="fsdp")
            yield from self._planned("--sharding fsdp", lambda: self._workload, of_shards)
        if self._count > 1 and not self._cards.prepared_by and not self._cards.offload:
            on_host = dataclasses.replace(self._cards, way="fsdp", offload=True)
            yield from self._planned("--offload-shards", lambda: self._workload, on_host)
        if self._workload.adapter is None and not why_not_adapted(self._workload):
            for adapter in ADAPTERS:
                cards = self._cards
                if adapter.is_quantized and self._count > 1:  # 4-bit weights cannot be divided
                    if asks_for_divided_parameters(cards):
                        continue
                    cards = dataclasses.replace(cards, way=cards.way or ("ddp" if cards.prepared_by else "zero1"))
                option = f"--{'qlora' if adapter.is_quantized else 'lora'} {adapter.rank}:{','.join(adapter.targets)}"
                adapted = functools.partial(adapted_workload, self._workload, adapter)
                yield from self._planned(option, adapted, cards)

    def _relaxed(self) -> Iterator[tuple[str, int, int]]:
        """Yield the techniques that are forbidden, and the fidelity that is not allowed, with which a plan fits."""
        if not any(single_relaxations(self._constraints, lowest=Fidelity.ROUNDED)):
            return
        with contextlib.suppress(StepError, TimeLimitError):
            work, card = self._workload, self._card
            if self._count > 1:
                together = dataclasses.replace(self._cards, count=self._count)
                work, card = smallest_way(work, card, together, watch=self._watch)
            budget = Budget.on(card, self._vram_bytes, margin=self._constraints.margin)
            budget.refuse_if_hopeless(work.model, card, sharding=work.sharding)
            with pipeline.open_session(work, card, budget, self._watch) as session:
                rows = relaxations(session, self._constraints, lowest=Fidelity.ROUNDED)
                baseline_ns = session.baseline.measured.footprint.step_ns
            for step in (row.next_step for row in rows if row.next_step is not None):
                yield step.relax, step.total_bytes, round(step.slowdown * baseline_ns)

    def _planned(self, change: str, build: Callable[[], Workload], cards: Cards) -> Iterator[tuple[str, int, int]]:
        """Yield the change if a plan for the changed workload or cards fits.

        Unless the user has chosen a way to divide the work, the one that divides most is planned.
        """
        self._watch.check()
        if not cards.prepared_by and self._count > 1:
            cards = dataclasses.replace(cards, way=cards.way or "fsdp")
        with contextlib.suppress(StepError, TimeLimitError):
            plan = _plan_on(
                self._count,
                build(),
                self._card,
                cards,
                vram_bytes=self._vram_bytes,
                constraints=self._constraints,
                watch=self._watch,
            )
            if plan is not None:
                yield change, plan.peak.total_bytes, plan.peak.step_ns


def _cards(count: int) -> str:
    return counted(count, "card")
