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
from planner.estimate.smallest_total import approximate_smallest_of
from planner.plan_types.constraints import Constraints, kinds_of
from planner.plan_types.decision_base import Role
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import format_size
from planner.plan_types.words import counted
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.search.largest_within import largest_within
from planner.space.search_space import SearchSpace
from planner.workload.budget import Budget
from planner.workload.workload import Workload

_MOST_SAMPLES = 1 << 20
"""Maximum batch size that is tried."""
_FIRST_SAMPLES = 64
"""Batch size that is tried first."""
_FAR = 8
"""Known decisions are tried for batch sizes up to this factor above the largest batch size that was searched."""
_LEFT_OUT = (
    (Role.MICRO_BATCHING, "with which any batch fits if a single sample fits"),
    (Role.FREEZING, "since each number of frozen layers has its own largest batch"),
)
"""Techniques that the search for the largest batch does not use, each with the reason."""
_NOT_FOUND = (
    "the search for the fastest plan found no plan that fits the budget. This plan uses decisions that were chosen for "
    "a small peak, at this or another batch size, and it is certified to fit; a faster plan may exist"
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
        known = max(needs.sizes_that_fit(), default=None)
        if watch is None or known is None:
            raise
        raise TimeLimitError(
            f"planning ended {watch.cause}, before the largest batch was known: {_fitting(known)}, and more may; "
            f"plan with --batch-size {known}, or give more time (--time-limit)"
        ) from error
    more = f"no plan was found for {too_many:,}" if too_many <= _MOST_SAMPLES else "more were not tried"
    return _noted(plan, f"largest batch without accumulation: {_fitting(samples)}, {more}")


def _largest_batch(needs: _Needs) -> tuple[int, int]:
    """Returns the largest batch size with a plan, and a larger one without; `needs.least` if no size has a plan."""
    while True:
        samples, too_many = largest_within(
            needs.total_bytes,
            limit_bytes=needs.usable_bytes,
            least=needs.least,
            first=(_FIRST_SAMPLES, *needs.sizes_that_fit()),
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
class _MemoryBound:
    """An upper bound on the memory that a batch of one size needs, and the decisions with which the step runs in it."""

    total_bytes: int
    """A total in bytes in which the step runs with these decisions. If it exceeds the budget, the step does not run in
    the budget with them."""
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
        self._bounds: dict[int, _MemoryBound] = {}
        self._latest = self._search(_FIRST_SAMPLES)
        """The result of the latest search."""
        self.least = self._least()

    def total_bytes(self, samples: int) -> int:
        """Upper bound on the bytes that a batch needs; more than the budget if it is known that no plan fits.

        It comes from a rehearsal, or from a search if the size is more than `_FAR` times the largest searched size.
        """
        if samples in self._plans and self._plans[samples] is None:
            return self.usable_bytes + 1
        if samples not in self._bounds:
            far = _FAR * max(size for size, bound in self._bounds.items() if bound.is_searched)
            try:
                found = None if samples > far else self._rehearsed(samples)
            except StepError:
                found = None  # this size may need other decisions, or the model refuses it
            self._bounds[samples] = found or self._search(samples)
        plan, total_bytes = self._plans.get(samples), self._bounds[samples].total_bytes
        return total_bytes if plan is None else min(total_bytes, plan.peak.total_bytes)

    def plan(self, samples: int) -> Plan | None:
        """Returns the fastest plan that the search finds for a batch of `samples`.

        If the search finds none, a plan with decisions that are known to fit is certified and returned. The result is
        None if there is neither. If a plan fits although the known decisions do not, the smallest configuration is
        searched for again.
        """
        if samples not in self._plans:
            fits = self.total_bytes(samples) <= self.usable_bytes
            known = self._bounds[samples].choice if fits else None
            with _naming(samples):
                work = self._build(samples)
                self._plans[samples] = plan_that_fits(work, self._card, **self._question, known=known)
            if self._plans[samples] is not None and not fits:
                self._search(samples)
        return self._plans[samples]

    def _search(self, samples: int) -> _MemoryBound:
        """Search for the smallest configuration. Forget upper bounds above the budget: its decisions may need less."""
        with _naming(samples):
            total_bytes, choice = smallest_configuration(self._build(samples), self._card, **self._question)
        self._latest = _MemoryBound(total_bytes=total_bytes, choice=choice, is_searched=True)
        self._bounds = {
            size: bound
            for size, bound in self._bounds.items()
            if bound.is_searched or bound.total_bytes <= self.usable_bytes
        } | {samples: self._latest}
        return self._latest

    def _rehearsed(self, samples: int) -> _MemoryBound:
        """Rehearse a step with the decisions that the latest search has found."""
        card, choice, usable_bytes = self._card, self._latest.choice, self.usable_bytes
        graph = pipeline.record_step(self._build(samples), card, choice.rehearsed_decisions, watch=self._watch)
        total_bytes = approximate_smallest_of(graph, card, choice.with_each_allocator, vram_bytes=usable_bytes)
        return _MemoryBound(total_bytes=total_bytes, choice=choice, is_searched=False)

    def sizes_that_fit(self) -> list[int]:
        """Batch sizes that are known to fit."""
        return [samples for samples in self._bounds if self.total_bytes(samples) <= self.usable_bytes]

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
    """Return the fastest plan that fits; None if none is found.

    Unlike `plan_workload`, this function does not search for the smallest plan if nothing fits.

    Args:
        known: decisions with which a rehearsal has shown that the step fits; None if no such decisions are known. If
            the search finds no plan, a plan with these decisions is certified, and returned if it fits and is not too
            slow.
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
        if certified is None:
            return None
        return assemble_plan(session, certified, constraints, budget, notes=notes, is_early=bool(early), began=began)


def _certified_known(
    session: PlanningSession, space: SearchSpace, constraints: Constraints, known: Choice
) -> Certified | None:
    """Return a plan with known decisions, which were not searched for; None if it does not fit or is too slow.

    Its gap is the fraction of its step time by which the fastest plan that promises to fit is faster; 1 if no plan
    promises to fit.
    """
    slower = session.with_slower_algorithms()
    plan = slower.certify(known)
    if not (plan.measured.fits and session.quick_enough(plan, constraints)):
        return None
    fastest = slower.chooser(space, constraints).fastest(slower.budget.allocator_bytes)
    if fastest is None:
        return plan.with_measured_promise(gap=1.0)
    fastest = fastest.passed_over or fastest
    least_ns = fastest.step_ns * (1 - fastest.gap)
    return plan.with_measured_promise(gap=max(0.0, 1 - least_ns / max(plan.measured.footprint.step_ns, 1)))


def smallest_configuration(
    workload: Workload, card: DeviceProfile, *, vram_bytes: int, constraints: Constraints, watch: Watch | None = None
) -> tuple[int, Choice]:
    """Find the configuration with the smallest predicted peak of tensors, without frozen layers.

    This is faster than searching for the smallest plan, which also tries to reduce the allocator's slack.

    Returns:
        A total in bytes in which the step runs with this configuration, near the smallest one
        (`approximate_smallest_of`), and the plan as a choice.
    """
    with pipeline.open_session(
        workload, card, Budget.on(card, vram_bytes, margin=constraints.margin), watch
    ) as session:
        space = session.search_space(constraints)
        certified = fitting.certify_found(session, lambda: session.chooser(space, constraints).smallest())
        choice, usable_bytes = certified.choice, session.budget.usable_bytes
        return approximate_smallest_of(
            certified.graph, card, choice.with_each_allocator, vram_bytes=usable_bytes
        ), choice
