"""Finds out how many bytes a batch of a given size needs, by searches and by rehearsals."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from planner import pipeline
from planner.choose.choice import Choice
from planner.errors import StepError, TimeLimitError, WorkloadError
from planner.estimate.smallest_total import approximate_smallest_of
from planner.plan_types.constraints import Constraints
from planner.plan_types.plan import Plan
from planner.plan_types.words import counted
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.questions.known_plans import plan_by, plan_that_fits, smallest_configuration
from planner.workload.budget import Budget
from planner.workload.workload import Workload

_FAR = 8
"""Known decisions are tried for batch sizes up to this factor above the largest batch size that was searched."""
_REHEARSALS_TO_CERTIFY = 3
"""Estimated time to certify a plan with known decisions, as a multiple of the time of one rehearsal.

One is for the baseline, one for the plan, and one for all other work.
"""


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


class BatchNeeds:
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
        watch: Watch,
    ) -> None:
        self._load, self._card, self._watch = build, card, watch
        self._question: dict[str, Any] = {"vram_bytes": vram_bytes, "constraints": constraints, "watch": watch}
        self.usable_bytes = Budget.on(card, vram_bytes, margin=constraints.margin).usable_bytes
        self._plans: dict[int, Plan | None] = {}
        self._bounds: dict[int, _MemoryBound] = {}
        self._rehearsal_seconds = 0.0
        """Longest time in seconds of one rehearsal, without the time to find the total in which the step runs."""
        self._search_seconds = 0.0
        """Longest time in seconds of one search for the smallest configuration."""

    def _build(self, samples: int) -> Workload:
        self._watch.stage("loading the model")
        return self._load(samples)

    def begin(self, samples: int) -> int:
        """Search for the smallest configuration at a first batch size.

        Returns the smallest batch size that the model accepts: 1, or 2 for a model that refuses one sample.
        """
        self._search(samples)
        try:
            self.total_bytes(1)
        except WorkloadError:
            self.total_bytes(2)
            return 2
        return 1

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
        began = time.monotonic()
        with _naming(samples):
            total_bytes, choice = smallest_configuration(self._build(samples), self._card, **self._question)
        self._search_seconds = max(self._search_seconds, time.monotonic() - began)
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
        work, began = self._build(samples), time.monotonic()
        graph = pipeline.record_step(work, card, choice.rehearsed_decisions, watch=self._watch)
        self._rehearsal_seconds = max(self._rehearsal_seconds, time.monotonic() - began)
        total_bytes = approximate_smallest_of(graph, card, choice.with_each_allocator, vram_bytes=usable_bytes)
        return _MemoryBound(total_bytes=total_bytes, choice=choice, is_searched=False)

    def sizes_that_fit(self) -> list[int]:
        """Batch sizes that are known to fit."""
        return [samples for samples in self._bounds if self.total_bytes(samples) <= self.usable_bytes]

    @property
    def seconds_to_certify(self) -> float:
        """Estimated time in seconds that `largest_known` takes."""
        largest = max(self.sizes_that_fit(), default=None)
        is_needed = largest is not None and self._plans.get(largest) is None
        seconds = _REHEARSALS_TO_CERTIFY * self._rehearsal_seconds or self._search_seconds
        return seconds if is_needed else 0.0

    def largest_known(self) -> tuple[int, Plan] | None:
        """Returns the largest batch size with a certified plan, and the plan; None if there is none.

        It is called when the time is up. If a larger batch is known to fit, its plan is certified first, provided that
        the time that is left until the limit is enough.
        """
        largest = max(self.sizes_that_fit(), default=None)
        if largest is not None and self._plans.get(largest) is None:
            words = f"certifying a plan for {counted(largest, 'sample', with_commas=True)}"
            with contextlib.suppress(TimeLimitError), self._watch.after_end(), self._watch.apart(lambda: words):
                work, known = self._build(largest), self._bounds[largest].choice
                self._plans[largest] = plan_by(known, work, self._card, **self._question)
        certified = {samples: plan for samples, plan in self._plans.items() if plan is not None}
        return max(certified.items(), key=lambda item: item[0], default=None)


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
