"""Questions that are answered by planning several times: the largest batch that fits, the smallest card."""

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
"""Maximum batch size that is tried."""
_FIRST_SAMPLES = 64
"""Batch size that is tried first."""
_EXACT_TO = 64
"""Relative precision of the answer above 64 samples: 1/64. Every further step would cost one rehearsal."""
_FAR = 2
"""The decisions with the smallest peak at one batch size are tried for sizes up to this factor larger."""
_LEFT_OUT = (
    (Role.MICRO_BATCHING, "with which any batch fits where one sample does"),
    (Role.FREEZING, "since each frozen prefix would make another"),
)
"""Techniques that the search for the largest batch leaves out, with the reasons."""


def largest_batch(
    build: Callable[[int], Workload], card: DeviceProfile, *, vram_bytes: int, constraints: Constraints
) -> Plan:
    """Returns the plan for the largest batch that fits without accumulation, or for the smallest batch if none fits.

    The answer is checked on both sides: the returned plan is certified, and for a batch above it (one sample more, from
    128 samples on a few more) the planner finds no plan. Batch sizes in between and below are not all tried: a batch is
    assumed to fit if a larger one does. Techniques in `_LEFT_OUT` are not used. The smallest batch is a single sample,
    or two samples for a model that refuses a single one (BatchNorm).

    Args:
        build: returns the workload for a batch size.

    Raises:
        DecisionError: accumulation or freezing is forced, or the slowdown is limited.
    """
    if constraints.max_slowdown is not None:
        raise DecisionError(
            "the largest batch is searched at any speed: leave out the limit on the slowdown (--max-slowdown)"
        )
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
        # The upper end may rest on one set of decisions. Search there, too; if a plan is found, go on above it.
        if too_many <= _MOST_SAMPLES and not needs.does_not_fit(too_many):
            continue
        plan = pipeline.plan_workload(
            build(max(samples, needs.least)), card, vram_bytes=vram_bytes, constraints=constraints
        )
        if plan.fits or samples < needs.least:
            break
        # The search finds no plan although the smallest one was predicted to fit: note that, and go on below it.
        needs.correct(samples, max(plan.peak.total_bytes, usable_bytes + 1))
    if not plan.fits:
        return plan
    more = f"{too_many:,} do not" if too_many <= _MOST_SAMPLES else "more were not tried"
    return _noted(plan, f"largest batch without accumulation: {samples:,} samples fit, {more}")


class _Needs:
    """Bytes that a batch needs, by batch size: from a search, or an upper bound from rehearsing known decisions.

    A search tries every configuration; a rehearsal tries only the decisions that were smallest at another size, and is
    several times cheaper. Either shows that a batch fits. Only a search within the budget shows that it does not,
    because the configuration with the smallest predicted peak may not have the least allocator slack.

    Measured on examples/sequential.py:build with --vram 1GiB --fidelity exact: 5 searches and 10 rehearsals, 56 s of
    CPU time. Bisection between powers of two with a search for each size took 17 searches and over 71 s.
    """

    def __init__(
        self, build: Callable[[int], Workload], card: DeviceProfile, vram_bytes: int, constraints: Constraints
    ) -> None:
        self._build, self._card, self._vram_bytes, self._constraints = build, card, vram_bytes, constraints
        self._searched: dict[int, int] = {}
        self._at_most: dict[int, int] = {}
        self._decisions: tuple[Decision, ...] = ()
        self.searched_bytes(_FIRST_SAMPLES)
        self.least = self._least()

    def total_bytes(self, samples: int) -> int:
        """Upper bound on the bytes needed for `samples`. Sizes over `_FAR` times the known ones are searched."""
        if samples in self._searched or samples > _FAR * max(self._searched):
            return self.searched_bytes(samples)
        if samples not in self._at_most:
            try:
                self._at_most[samples] = total_bytes_with(self._build(samples), self._card, self._decisions)
            except PlannerError:
                return self.searched_bytes(samples)  # this size may need other decisions, or be refused with any
        return self._at_most[samples]

    def searched_bytes(self, samples: int) -> int:
        """Bytes needed for `samples` by a search. Its decisions are then tried on other sizes, too."""
        if samples not in self._searched:
            self._search(smallest_configuration, samples)
        return self._searched[samples]

    def does_not_fit(self, samples: int) -> bool:
        """True if the planner finds no plan for `samples`. Decisions it finds are then tried on other sizes, too."""
        self._search(configuration_within, samples)
        return self._searched[samples] > self._vram_bytes

    def _search(self, function: Callable[..., tuple[int, tuple[Decision, ...]]], samples: int) -> None:
        """Run the search, and forget upper bounds above the budget: the new decisions may need less."""
        self._searched[samples], self._decisions = function(
            self._build(samples), self._card, vram_bytes=self._vram_bytes, constraints=self._constraints
        )
        self._at_most = {size: total for size, total in self._at_most.items() if total <= self._vram_bytes}

    def correct(self, samples: int, total_bytes: int) -> None:
        """Record the result of a search for `samples` that found nothing that fits."""
        self._searched[samples] = total_bytes

    def _least(self) -> int:
        """Smallest batch size: 1, or 2 for a model that refuses a single sample."""
        try:
            self.total_bytes(1)
        except WorkloadError:
            self.total_bytes(2)
            return 2
        return 1


def largest_within(
    smallest_budget_bytes: Callable[[int], int], *, limit_bytes: int, least: int = 1, first: int, most: int
) -> tuple[int, int]:
    """Returns the largest number in least..most whose need is within the limit, and one above it whose need is not.

    Interpolation search (regula falsi): bytes are nearly affine in the number of samples, so the next number is where
    the line through the two known points nearest to the limit meets it. After two answers on the same side, bisection.
    The two numbers are neighbours below `_EXACT_TO`, and at most 1/64 apart above. Returns (least - 1, least) if none
    is within the limit, and (most, most + 1) if all are. Exact only for needs that do not fall.
    """
    known = {number: smallest_budget_bytes(number) for number in (least, first)}
    sides: list[bool] = []
    while True:
        low = max((number for number, need in known.items() if need <= limit_bytes), default=least - 1)
        too_many = (number for number, need in known.items() if need > limit_bytes and number > low)
        high = min(too_many, default=most + 1)
        if high - low <= max(1, low // _EXACT_TO):
            return low, high
        nearest, second = sorted(known, key=lambda number: abs(known[number] - limit_bytes))[:2]
        slope = (known[nearest] - known[second]) / (nearest - second)
        if slope <= 0 or (len(sides) > 1 and sides[-1] == sides[-2] and high <= most):
            guess = (low + high) // 2 if high <= most else 2 * low  # allocator segments make steps
        else:
            guess = nearest + int((limit_bytes - known[nearest]) // slope)
        asked = min(max(guess, low + 1), high - 1)
        known[asked] = smallest_budget_bytes(asked)
        sides.append(known[asked] <= limit_bytes)


def smallest_card(workload: Workload, constraints: Constraints) -> Plan:
    """Returns the plan on the card with the least memory on which one fits, or the shortfall on the largest card.

    Tries all cards from the smallest to the largest, without bisection: kernels and dtypes differ between cards, so a
    plan may fit a smaller card and not a larger one.
    """
    cards = sorted((profiles.load(name) for name in profiles.known()), key=lambda card: (card.vram_bytes, card.name))
    for number, card in enumerate(cards):
        plan = plan_that_fits(workload, card, vram_bytes=card.vram_bytes, constraints=constraints)
        if plan is not None:
            smaller = f"no plan fits the {number} cards tried before it" if number else "no known card has less memory"
            return _noted(plan, f"smallest card: {card.title} ({format_size(card.vram_bytes)}); {smaller}")
    largest = cards[-1]
    plan = pipeline.plan_workload(workload, largest, vram_bytes=largest.vram_bytes, constraints=constraints)
    return _noted(plan, f"none of the {len(cards)} known cards is large enough; the largest is {largest.title}")


def _noted(plan: Plan, note: str) -> Plan:
    """Returns the plan with the note in front of its own."""
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
