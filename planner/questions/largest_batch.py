"""The largest batch that fits without gradient accumulation and without frozen layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from planner import pipeline
from planner.errors import DecisionError, TimeLimitError
from planner.plan_types.constraints import Constraints, kinds_of
from planner.plan_types.decision_base import Role
from planner.plan_types.plan import Plan
from planner.plan_types.words import counted
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.questions.batch_needs import BatchNeeds
from planner.questions.known_plans import noted
from planner.search.largest_within import largest_within
from planner.workload.workload import Workload

_MOST_SAMPLES = 1 << 20
"""Maximum batch size that is tried."""
_FIRST_SAMPLES = 64
"""Batch size that is tried first."""
_LEFT_OUT = (
    (Role.MICRO_BATCHING, "with which any batch fits if a single sample fits"),
    (Role.FREEZING, "since each number of frozen layers has its own largest batch"),
)
"""Techniques that the search for the largest batch does not use, each with the reason."""


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

    The returned plan is certified. If the search is complete, the planner found no plan for a slightly larger batch
    (one sample more, and from 128 samples on up to 1/64 more). Not all other batch sizes are tried: a batch is assumed
    to fit if a larger batch fits.

    Args:
        build: function that takes a batch size and returns the workload with a batch of this size.
        watch: limits the time, and receives progress; None for no limit. If the time is up, the plan for the largest
            batch that is known to fit is returned, and its first note says that a larger batch may fit.

    Raises:
        DecisionError: accumulation or freezing is forced, or the slowdown is limited.
        TimeLimitError: the time was up before any plan that fits was certified.
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

    watch = watch or Watch()
    needs = BatchNeeds(build, card, vram_bytes, constraints, watch)
    try:
        with watch.apart(lambda: _progress(needs)), watch.leaving(lambda: needs.seconds_to_certify):
            samples, too_many = _largest_batch(needs)
    except TimeLimitError:
        known = needs.largest_known()
        if known is None:
            raise
        samples, largest = known
        return noted(largest, f"planning ended {watch.cause}: {_fitting(samples)}, and a larger batch may fit, too")
    plan = needs.plan(samples)
    if plan is None:  # the smallest batch does not fit
        return pipeline.plan_workload(build(samples), card, vram_bytes=vram_bytes, constraints=constraints, watch=watch)
    more = f"no plan was found for {too_many:,}" if too_many <= _MOST_SAMPLES else "more were not tried"
    return noted(plan, f"largest batch without accumulation: {_fitting(samples)}, {more}")


def _largest_batch(needs: BatchNeeds) -> tuple[int, int]:
    """Returns the largest batch size with a plan, and a larger one without; the smallest size if no size has a plan."""
    least = needs.begin(_FIRST_SAMPLES)
    while True:
        samples, too_many = largest_within(
            needs.total_bytes,
            limit_bytes=needs.usable_bytes,
            least=least,
            first=(_FIRST_SAMPLES, *needs.sizes_that_fit()),
            most=_MOST_SAMPLES,
        )
        # `too_many` may be known to be too large for one set of decisions only. Search at this size, too: if a plan
        # is found, continue with larger sizes. If no plan is found for `samples`, continue with smaller ones.
        if too_many <= _MOST_SAMPLES and needs.plan(too_many) is not None:
            continue
        if samples < least or needs.plan(samples) is not None:
            return max(samples, least), too_many


def _progress(needs: BatchNeeds) -> str:
    known = max(needs.sizes_that_fit(), default=None)
    return "searching for the largest batch" if known is None else f"at least {_fitting(known)}"


def _fitting(samples: int) -> str:
    return f"{counted(samples, 'sample', with_commas=True)} {'fits' if samples == 1 else 'fit'}"
