"""Questions that a plan answers when it is asked for many times: the largest batch, the smallest card."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from planner import pipeline, profiles
from planner.assemble import assemble_plan
from planner.choose import fitting
from planner.errors import DecisionError, PlannerError, WorkloadError
from planner.estimate.footprint import smallest_capacity_bytes
from planner.plan_types.constraints import Constraints, kinds_of
from planner.plan_types.decision_base import Decision, Role
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import format_size
from planner.profiles.device import DeviceProfile
from planner.workload.budget import Budget
from planner.workload.workload import Workload

_MOST_SAMPLES = 1 << 20
_FIRST_SAMPLES = 64
_EXACT_TO = 64
"""A batch is the largest to within one sample in so many: finding out takes a rehearsal for each."""
_FAR = 2
"""Sizes so many times as large as those known are searched anew."""
_LEFT_OUT = (
    (Role.MICRO_BATCHING, "with which any batch fits where one sample does"),
    (Role.FREEZING, "since each frozen prefix would make another"),
)
"""Techniques that this question is asked without, and why."""


def largest_batch(
    build: Callable[[int], Workload], card: DeviceProfile, *, vram_bytes: int, constraints: Constraints
) -> Plan:
    """The plan for the largest batch that fits without accumulation; where none does, what a single sample lacks.

    Bytes are nearly affine in the number of samples, so the next size asked is where the line through two known ones
    meets the budget. That only saves questions: the plan of the size found fits by its certificate, of a size above it
    (one sample more, from 128 samples on a few) a search finds none, and what fits is taken to fit at all smaller
    sizes. Frozen prefixes are left out. Where a single sample is refused (BatchNorm), two are the smallest batch.

    Args:
        build: from a batch size to the workload.

    Raises:
        DecisionError: accumulation or freezing is forced, or a slowdown is limited.
    """
    if constraints.max_slowdown is not None:
        raise DecisionError("the largest batch is asked for at any speed: leave out the limit of the slowdown")
    for kind, why in ((kind, why) for role, why in _LEFT_OUT for kind in kinds_of(role)):
        if constraints.force(kind):
            raise DecisionError(f"the largest batch is asked for without {kind.kind}, {why}: do not force it")
        if constraints.allow(kind):
            constraints = dataclasses.replace(constraints, forbidden=(*constraints.forbidden, kind.kind))

    usable_bytes = Budget.on(card, vram_bytes).usable_bytes
    needs = _Needs(build, card, usable_bytes, constraints)
    while True:
        samples, too_many = largest_within(
            needs.total_bytes, limit_bytes=usable_bytes, least=needs.least, first=_FIRST_SAMPLES, most=_MOST_SAMPLES
        )
        if too_many <= _MOST_SAMPLES and not needs.refuted(too_many):
            continue
        plan = pipeline.plan_workload(
            build(max(samples, needs.least)), card, vram_bytes=vram_bytes, constraints=constraints
        )
        if plan.fits or samples < needs.least:
            break
        needs.correct(samples, max(plan.peak.total_bytes, usable_bytes + 1))
    if not plan.fits:
        return plan
    more = f"{too_many:,} do not" if too_many <= _MOST_SAMPLES else "more were not tried"
    return _noted(plan, f"largest batch without accumulation: {samples:,} samples fit, {more}")


class _Needs:
    """How much batches of some size need: searched for, or at most, by rehearsing what was the smallest way elsewhere.

    A search tries every outer choice, a rehearsal one. That a batch fits is certain by either. That it does not is
    asked as a plan is, within the budget: the smallest promise may not be what the allocator gives the least.
    """

    def __init__(
        self, build: Callable[[int], Workload], card: DeviceProfile, vram_bytes: int, constraints: Constraints
    ) -> None:
        self._build, self._card, self._vram_bytes, self._rules = build, card, vram_bytes, constraints
        self._searched: dict[int, int] = {}
        self._at_most: dict[int, int] = {}
        self._way: tuple[Decision, ...] = ()
        self.searched_bytes(_FIRST_SAMPLES)
        self.least = self._least()

    def total_bytes(self, samples: int) -> int:
        """Of this size, at most. The smallest way of one size says little of others that are far above."""
        if samples in self._searched or samples > _FAR * max(self._searched):
            return self.searched_bytes(samples)
        if samples not in self._at_most:
            try:
                self._at_most[samples] = total_bytes_with(self._build(samples), self._card, self._way)
            except PlannerError:
                return self.searched_bytes(samples)  # this size may need another way, or be refused whatever the way
        return self._at_most[samples]

    def searched_bytes(self, samples: int) -> int:
        """Of this size; the smallest way is then tried on others, too."""
        if samples not in self._searched:
            self._search(smallest_configuration, samples)
        return self._searched[samples]

    def refuted(self, samples: int) -> bool:
        """Whether no plan is found for this size; one that is found is then tried on others, too."""
        self._search(configuration_within, samples)
        return self._searched[samples] > self._vram_bytes

    def _search(self, function: Callable[..., tuple[int, tuple[Decision, ...]]], samples: int) -> None:
        self._searched[samples], self._way = function(
            self._build(samples), self._card, vram_bytes=self._vram_bytes, constraints=self._rules
        )
        self._at_most = {size: total for size, total in self._at_most.items() if total <= self._vram_bytes}

    def correct(self, samples: int, total_bytes: int) -> None:
        """A search has found nothing that fits, and this total to be the smallest."""
        self._searched[samples] = total_bytes

    def _least(self) -> int:
        """Of a model that refuses single samples: 2."""
        try:
            self.total_bytes(1)
        except WorkloadError:
            self.total_bytes(2)
            return 2
        return 1


def largest_within(
    smallest_budget_bytes: Callable[[int], int], *, limit_bytes: int, least: int = 1, first: int, most: int
) -> tuple[int, int]:
    """Largest number in least..most whose need is within the limit, and one above it whose need is not.

    Interpolation search for needs that rise and are nearly affine, and bisection after two answers on one side. The two
    numbers are neighbours below `_EXACT_TO`, and within one in so many above. (least - 1, least) and (most, most + 1)
    where there is none.
    """
    known = {number: smallest_budget_bytes(number) for number in (least, first)}
    sides: list[bool] = []
    while True:
        low = max((number for number, need in known.items() if need <= limit_bytes), default=least - 1)
        too_many = (number for number, need in known.items() if need > limit_bytes and number > low)
        high = min(too_many, default=most + 1)
        if high - low <= max(1, low // _EXACT_TO):
            return low, high
        one, other = sorted(known, key=lambda number: abs(known[number] - limit_bytes))[:2]
        slope = (known[one] - known[other]) / (one - other)
        if slope <= 0 or (len(sides) > 1 and sides[-1] == sides[-2] and high <= most):
            guess = (low + high) // 2 if high <= most else 2 * low  # an allocator's segments make steps
        else:
            guess = one + int((limit_bytes - known[one]) // slope)
        asked = min(max(guess, low + 1), high - 1)
        known[asked] = smallest_budget_bytes(asked)
        sides.append(known[asked] <= limit_bytes)


def smallest_card(work: Workload, constraints: Constraints) -> Plan:
    """The plan on the card with the least memory on which there is one; what the largest card lacks, if on none.

    Every smaller card is tried: kernels and dtypes differ, so that a smaller one may do where a larger one does not.
    """
    cards = sorted((profiles.load(name) for name in profiles.known()), key=lambda card: (card.vram_bytes, card.name))
    for number, card in enumerate(cards):
        plan = plan_that_fits(work, card, vram_bytes=card.vram_bytes, constraints=constraints)
        if plan is not None:
            smaller = f"no plan fits on {number} with as little memory or less" if number else "none known has less"
            return _noted(plan, f"smallest card: {card.title} ({format_size(card.vram_bytes)}); {smaller}")
    largest = cards[-1]
    plan = pipeline.plan_workload(work, largest, vram_bytes=largest.vram_bytes, constraints=constraints)
    return _noted(plan, f"none of {len(cards)} known cards will do; the largest is {largest.title}")


def _noted(plan: Plan, note: str) -> Plan:
    return dataclasses.replace(plan, notes=(note, *plan.notes))


def plan_that_fits(
    workload: Workload, card: DeviceProfile, *, vram_bytes: int, constraints: Constraints
) -> Plan | None:
    """Return the plan of `plan_workload` if one fits; otherwise None, without looking for the smallest plan."""
    began = time.perf_counter()
    budget = Budget.on(card, vram_bytes)
    with pipeline.open_session(workload, card, budget) as session:
        space = session.search_space(constraints)
        certified = fitting.best(session, space, constraints)
        if certified is None or not session.quick_enough(certified, constraints):
            return None
        return assemble_plan(
            session, certified, constraints, vram_bytes, notes=(*budget.notes(card), *space.notes), began=began
        )


def smallest_configuration(
    workload: Workload, card: DeviceProfile, *, vram_bytes: int, constraints: Constraints
) -> tuple[int, tuple[Decision, ...]]:
    """Return the decisions with the smallest promise (no frozen prefix), and the smallest total under which they run.

    This is faster than to look for the smallest plan, which also searches for less allocator slack.
    """
    with pipeline.open_session(workload, card, Budget.on(card, vram_bytes)) as session:
        certified = session.certify(session.chooser(session.search_space(constraints), constraints).smallest())
        return session.smallest_budget_bytes(certified), certified.choice.decisions


def configuration_within(
    workload: Workload, card: DeviceProfile, *, vram_bytes: int, constraints: Constraints
) -> tuple[int, tuple[Decision, ...]]:
    """Return total and decisions of the plan of `plan_workload`, which looks further than the smallest promise."""
    with pipeline.open_session(workload, card, Budget.on(card, vram_bytes)) as session:
        space = session.search_space(constraints)
        certified = fitting.best(session, space, constraints) or fitting.nearest(session, space, constraints)
        return certified.measured.footprint.total_bytes, certified.choice.decisions


def total_bytes_with(workload: Workload, card: DeviceProfile, decisions: tuple[Decision, ...]) -> int:
    """Return the smallest total under which the step with these decisions runs, by rehearsal."""
    return smallest_capacity_bytes(pipeline.record_step(workload, card, decisions), card)
