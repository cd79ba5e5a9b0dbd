"""Questions that are answered by planning several times: the largest batch that fits, the smallest card."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from planner import pipeline, profiles
from planner.assemble import assemble_plan
from planner.choose import fitting
from planner.choose.choice import Certified, Choice
from planner.choose.planning_session import PlanningSession
from planner.errors import BudgetError, DecisionError, StepError, TimeLimitError, WorkloadError
from planner.estimate.smallest_total import nearly_smallest_of
from planner.plan_types.constraints import Constraints, kinds_of
from planner.plan_types.decision_base import Role
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import format_size
from planner.plan_types.words import counted
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.space.search_space import SearchSpace
from planner.workload.budget import Budget
from planner.workload.workload import Workload

_MOST_SAMPLES = 1 << 20
"""Maximum batch size that is tried."""
_FIRST_SAMPLES = 64
"""Batch size that is tried first."""
_EXACT_TO = 64
"""The answer is exact below twice this number of samples. Above it, the relative error is at most 1/64."""
_FAR = 8
"""Known decisions are tried for batch sizes up to this factor above the largest batch size that was searched."""
_LEFT_OUT = (
    (Role.MICRO_BATCHING, "with which any batch fits if a single sample fits"),
    (Role.FREEZING, "since each number of frozen layers has its own largest batch"),
)
"""Techniques that the search for the largest batch does not use, each with the reason."""
_NOT_FOUND = (
    "the search found no plan that fits this batch. This plan has the decisions that need the least memory for another "
    "batch size; a faster plan may exist"
)


def largest_batch(
    build: Callable[[int], Workload],
    card: DeviceProfile,
    *,
    vram_bytes: int,
    constraints: Constraints,
    watch: Watch | None = None,
) -> Plan:
    """Returns the plan for the largest batch that fits without gradient accumulation and without frozen layers.

    If no batch fits, returns the plan for the smallest batch, which does not fit. The smallest batch has one sample, or
    two samples for a model that refuses a single sample (BatchNorm).

    The returned plan is certified. For a slightly larger batch (one sample more, and from 128 samples on up to 1/64
    more) the planner finds no plan. Not all other batch sizes are tried: a batch is assumed to fit if a larger batch
    fits.

    Args:
        build: function that takes a batch size and returns the workload with a batch of this size.
        watch: limits the time, and receives progress; None for no limit.

    Raises:
        DecisionError: accumulation or freezing is forced, or the slowdown is limited.
        TimeLimitError: the time was up before the largest batch was known.
    """
    if constraints.max_slowdown is not None:
        raise DecisionError(
            "the search for the largest batch ignores the step time: leave out the limit on the slowdown "
            "(--max-slowdown)"
        )
    for kind, why in ((kind, why) for role, why in _LEFT_OUT for kind in kinds_of(role)):
        if constraints.force(kind):
            raise DecisionError(
                f"the search for the largest batch does not use {kind.kind}, {why}: do not force {kind.kind}"
            )
        if constraints.allow(kind):
            constraints = dataclasses.replace(constraints, forbidden=(*constraints.forbidden, kind.kind))

    needs = _Needs(build, card, vram_bytes, constraints, watch)
    try:
        samples, too_many = _largest_batch(needs)
        plan = needs.plan(samples)
        if plan is None:  # the smallest batch does not fit
            return pipeline.plan_workload(
                build(samples), card, vram_bytes=vram_bytes, constraints=constraints, watch=watch
            )
    except TimeLimitError as error:
        known = needs.largest_known()
        if watch is None or known is None:
            raise
        raise TimeLimitError(
            f"planning ended {watch.cause}, before the largest batch was known: {_fitting(known)}, and more may; "
            f"plan with --batch-size {known}, or give more time (--time-limit)"
        ) from error
    more = f"{too_many:,} do not" if too_many <= _MOST_SAMPLES else "more were not tried"
    return _noted(plan, f"largest batch without accumulation: {_fitting(samples)}, {more}")


def _largest_batch(needs: _Needs) -> tuple[int, int]:
    """Returns the largest batch size with a plan, and a larger one without; `needs.least` if no size has a plan."""
    while True:
        samples, too_many = largest_within(
            needs.total_bytes,
            limit_bytes=needs.usable_bytes,
            least=needs.least,
            first=_FIRST_SAMPLES,
            most=_MOST_SAMPLES,
        )
        # `too_many` may be known to be too large for one set of decisions only. Search at this size, too: if a plan
        # is found, continue with larger sizes. If no plan is found for `samples`, continue with smaller ones.
        if too_many <= _MOST_SAMPLES and needs.plan(too_many) is not None:
            continue
        if samples < needs.least or needs.plan(samples) is not None:
            return max(samples, needs.least), too_many


def _fitting(samples: int) -> str:
    return f"{counted(samples, 'sample', with_commas=True)} {'fits' if samples == 1 else 'fit'}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Need:
    """About how many bytes a batch needs at most, and the decisions with which it does."""

    total_bytes: int
    """A total in bytes in which the step runs. If it is larger than the budget, the step does not run in the budget."""
    choice: Choice
    is_searched: bool
    """True if the decisions are those of the smallest configuration for this batch; False if they were found for a
    batch of another size."""


class _Needs:
    """Finds out how many bytes a batch of a given size needs, by searches and by rehearsals.

    A search considers every configuration. A rehearsal considers only the decisions that the latest search for the
    smallest configuration found at another batch size; it is several times cheaper, and its result is an upper bound.
    Both can show that a batch fits. Only a search for a plan (`plan`) can show that a batch does not fit: the
    configuration with the smallest predicted peak may not be the configuration with the least allocator slack.
    """

    def __init__(
        self,
        build: Callable[[int], Workload],
        card: DeviceProfile,
        vram_bytes: int,
        constraints: Constraints,
        watch: Watch | None,
    ) -> None:
        self._build, self._card, self._watch = build, card, watch
        self._question: dict[str, Any] = {"vram_bytes": vram_bytes, "constraints": constraints, "watch": watch}
        self.usable_bytes = Budget.on(card, vram_bytes, margin=constraints.margin).usable_bytes
        self._plans: dict[int, Plan | None] = {}
        self._needs: dict[int, _Need] = {}
        self._latest = self._search(_FIRST_SAMPLES)
        """What the latest search found."""
        self.least = self._least()

    def total_bytes(self, samples: int) -> int:
        """Upper bound on the bytes that a batch needs; more than the budget if it is known that no plan fits.

        It comes from a rehearsal, or from a search if the size is more than `_FAR` times the largest searched size.
        """
        if samples in self._plans and self._plans[samples] is None:
            return self.usable_bytes + 1
        if samples not in self._needs:
            far = _FAR * max(size for size, need in self._needs.items() if need.is_searched)
            try:
                found = self._search(samples) if samples > far else self._rehearsed(samples)
            except StepError:
                found = self._search(samples)  # this size may need other decisions, or be refused with any
            self._needs[samples] = found
        plan, total_bytes = self._plans.get(samples), self._needs[samples].total_bytes
        return total_bytes if plan is None else min(total_bytes, plan.peak.total_bytes)

    def plan(self, samples: int) -> Plan | None:
        """Fastest plan for a batch of `samples`; None if no plan fits.

        If a plan fits although the known decisions do not, the smallest configuration is searched for again.
        """
        if samples not in self._plans:
            fits = self.total_bytes(samples) <= self.usable_bytes
            known = self._needs[samples].choice if fits else None
            with _naming(samples):
                work = self._build(samples)
                self._plans[samples] = plan_that_fits(work, self._card, **self._question, known=known)
            if self._plans[samples] is not None and not fits:
                self._search(samples)
        return self._plans[samples]

    def _search(self, samples: int) -> _Need:
        """Search for the smallest configuration. Forget upper bounds above the budget: its decisions may need less."""
        with _naming(samples):
            total_bytes, choice = smallest_configuration(self._build(samples), self._card, **self._question)
        self._latest = _Need(total_bytes=total_bytes, choice=choice, is_searched=True)
        self._needs = {
            size: need
            for size, need in self._needs.items()
            if need.is_searched or need.total_bytes <= self.usable_bytes
        } | {samples: self._latest}
        return self._latest

    def _rehearsed(self, samples: int) -> _Need:
        """Rehearse a step with the decisions that the latest search has found."""
        card, choice, usable_bytes = self._card, self._latest.choice, self.usable_bytes
        graph = pipeline.record_step(self._build(samples), card, choice.rehearsed_decisions, watch=self._watch)
        total_bytes = nearly_smallest_of(graph, card, choice.alternatives, vram_bytes=usable_bytes)
        return _Need(total_bytes=total_bytes, choice=choice, is_searched=False)

    def largest_known(self) -> int | None:
        """Largest batch size that is known to fit; None if none is known."""
        sizes = (samples for samples in self._needs if self.total_bytes(samples) <= self.usable_bytes)
        return max(sizes, default=None)

    def _least(self) -> int:
        """Smallest batch size: 1, or 2 for a model that refuses a single sample."""
        try:
            self.total_bytes(1)
        except WorkloadError:
            self.total_bytes(2)
            return 2
        return 1


@contextlib.contextmanager
def _naming(samples: int) -> Iterator[None]:
    """Adds the batch size to the message of a `WorkloadError`."""
    try:
        yield
    except WorkloadError as error:
        raise WorkloadError(
            f"the largest batch cannot be found, because the step fails with {counted(samples, 'sample')}: {error}; "
            "if the model takes only some batch sizes, plan for each of them with --batch-size"
        ) from error


def largest_within(
    smallest_budget_bytes: Callable[[int], int], *, limit_bytes: int, least: int = 1, first: int, most: int
) -> tuple[int, int]:
    """Finds the largest number of samples whose smallest budget is within a limit.

    This is an interpolation search (regula falsi): bytes are nearly affine in the number of samples. So the next number
    is where the line through the two known points nearest to the limit reaches the limit; after two answers on the same
    side of the limit, it is the middle of the interval.

    Args:
        smallest_budget_bytes: function that takes a number of samples and returns the bytes that it needs. The result
            is right only if a larger number never needs fewer bytes.
        limit_bytes: the limit.
        least: the smallest number to try.
        first: a number to try at the beginning.
        most: the largest number to try.

    Returns:
        A number within the limit, and a larger number that is not. They differ by 1 below twice `_EXACT_TO`, and by at
        most 1/64 above. The result is (least - 1, least) if no number is within the limit, and (most, most + 1) if all
        are.
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
        settings: what the user has set for the process on the card: values by the name of a field of `DeviceProfile`.
    """
    known = (dataclasses.replace(profiles.load(name), **settings) for name in profiles.known())
    cards = sorted(known, key=lambda card: (card.vram_bytes, card.name))
    for number, card in enumerate(cards):
        plan = plan_that_fits(workload, card, vram_bytes=card.vram_bytes, constraints=constraints, watch=watch)
        if plan is not None:
            before = f"no plan fits the {counted(number, 'card')} tried before it"
            smaller = before if number else "no known card has less memory"
            return _noted(plan, f"smallest card: {card.title} ({format_size(card.vram_bytes)}); {smaller}")
    largest = cards[-1]
    plan = pipeline.plan_workload(
        workload, largest, vram_bytes=largest.vram_bytes, constraints=constraints, watch=watch
    )
    return _noted(plan, f"none of the {len(cards)} known cards is large enough; the largest is {largest.title}")


def _noted(plan: Plan, note: str) -> Plan:
    """Returns the plan with `note` as its first note."""
    return dataclasses.replace(plan, notes=(note, *plan.notes))


def plan_that_fits(
    workload: Workload,
    card: DeviceProfile,
    *,
    vram_bytes: int,
    constraints: Constraints,
    watch: Watch | None = None,
    known: Choice | None = None,
) -> Plan | None:
    """Return the plan of `plan_workload` if it fits, else None. This saves the search for the smallest plan.

    Args:
        known: decisions with which the step fits. The plan has these decisions if the search finds no plan.
    """
    began = time.perf_counter()
    budget = Budget.on(card, vram_bytes, margin=constraints.margin)
    try:
        budget.refuse_if_hopeless(workload.model, card, sharding=workload.sharding)
    except BudgetError:
        return None
    with pipeline.open_session(workload, card, budget, watch) as session:
        session.expect(constraints)
        space = session.search_space(constraints)
        certified, early = pipeline.fastest_in_time(session, space, constraints)
        notes = (*early, *budget.notes(card), *space.notes)
        if certified is None and known is not None:
            certified = _certified_known(session, space, constraints, known)
            notes = (_NOT_FOUND, *notes)
        if certified is None or not certified.measured.fits:
            return None
        return assemble_plan(session, certified, constraints, budget, notes=notes, is_early=bool(early), began=began)


def _certified_known(
    session: PlanningSession, space: SearchSpace, constraints: Constraints, known: Choice
) -> Certified:
    """Return a plan with known decisions. Its gap compares its step time with the fastest promise under the budget."""
    plan = session.with_slower_algorithms().certify(known).promising_what_was_measured()
    fastest = session.chooser(space, constraints).fastest(session.budget.allocator_bytes)
    least_ns = 0.0 if fastest is None else fastest.step_ns * (1 - fastest.gap)
    choice = dataclasses.replace(plan.choice, gap=max(0.0, 1 - least_ns / max(plan.choice.step_ns, 1)))
    return dataclasses.replace(plan, choice=choice)


def smallest_configuration(
    workload: Workload, card: DeviceProfile, *, vram_bytes: int, constraints: Constraints, watch: Watch | None = None
) -> tuple[int, Choice]:
    """Find the configuration with the smallest predicted peak of tensors, without frozen layers.

    This is faster than searching for the smallest plan, which also tries to reduce the allocator's slack.

    Returns:
        About the smallest total in bytes in which the step runs with this configuration (`nearly_smallest_of`), and the
        configuration.
    """
    with pipeline.open_session(
        workload, card, Budget.on(card, vram_bytes, margin=constraints.margin), watch
    ) as session:
        space = session.search_space(constraints)
        certified = fitting.certify_found(session, lambda: session.chooser(space, constraints).smallest())
        choice, usable_bytes = certified.choice, session.budget.usable_bytes
        return nearly_smallest_of(certified.graph, card, choice.alternatives, vram_bytes=usable_bytes), choice
