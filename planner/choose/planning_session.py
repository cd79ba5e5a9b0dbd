"""The state of planning one workload for one card and budget: baseline, recordings, candidates and certificates.

Costly results are computed once, and shared between searches under different constraints and budgets (`with_budget`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Hashable

import torch

from planner.choose.bounds import Bounds, least_updates, optimizer_peak_bytes
from planner.choose.candidates import Candidates, ChunkedCandidates
from planner.choose.certificates import Certificates
from planner.choose.choice import BestPlans, Certified, Choice
from planner.choose.chooser import Chooser
from planner.choose.recordings import Recordings, Start
from planner.choose.searches import Searches
from planner.derive.shortening import Shortening, runs_to_shorten
from planner.estimate.add_workspaces import with_least_workspaces, with_workspaces
from planner.estimate.footprint import AllocatingStep, Measured, measure, runs_within
from planner.estimate.smallest_total import missing_bytes, smallest_of
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import Decision, Role, changed_options, has_role
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.recording.repeats.layer_runs import LayerRun
from planner.recording.step_graph import Category, StepGraph
from planner.space.by_sample import BySampleCheck, StartForward
from planner.space.carried_state import carried_state
from planner.space.lm_head import loss_in_chunks
from planner.space.lower_bounds import TrainedParameters, lower_bound_bytes
from planner.space.micro_batches import MicroBatching
from planner.space.search_space import SearchSpace, search_space
from planner.spawned.interrupts import interrupts_held_back
from planner.virtual_gpu.forked_process import Running
from planner.virtual_gpu.values.shadow_ops import ASSUMED_VALUES
from planner.workload.budget import Budget
from planner.workload.workload import Workload

StartUpdate = Callable[[tuple[Decision, ...], tuple[str, ...]], Running]
"""Starts a child process that records the optimizer update alone.

Arguments: the decisions of the step, the names of the trained parameters.
"""

_MEASUREMENTS = 12
"""A search for the smallest budget in which a plan runs takes about as long as this number of measurements."""


class PlanningSession:
    """The state of planning one workload for one card and budget."""

    def __init__(
        self,
        workload: Workload,
        card: DeviceProfile,
        *,
        budget: Budget | None,
        start_what_if: Start,
        start_shortened: Callable[[tuple[LayerRun, ...]], Running],
        start_forward: StartForward,
        start_update: StartUpdate,
        certificates: Certificates,
        watch: Watch | None = None,
    ) -> None:
        """
        Args:
            budget: the user's budget; None if there is none. Without a budget only `baseline` and `with_budget` work.
            start_what_if: starts the recording of a step.
            start_shortened: starts the recording of two steps of the baseline with a few layers of each run.
            start_forward: starts the rehearsal of forward and loss.
            start_update: starts the recording of an optimizer update.
            certificates: rehearses rewritten steps.
            watch: limits the time of planning, and receives its progress; None for no limit.
        """
        self.workload, self.card, self._budget, self.watch = workload, card, budget, watch or Watch()
        self._plans = {False: BestPlans(), True: BestPlans()}
        """The best plans that were certified under this budget. Keys: False for those from before recordings were
        dropped as wrong, True for those from after it."""
        self._asked: Constraints | None = None
        """The constraints whose plans are reported as progress; None if none are."""
        self._guessed_trained: tuple[str, ...] | None = None
        """Names of the trained parameters in a what-if recording that is there before the baseline; None if unknown."""
        self.certificates = certificates
        self.recordings = Recordings(
            start_what_if,
            None if workload.step else lambda decisions: start_update(decisions, self._names_of_trained()),
            self._with_workspaces,
            is_last_different=any(way.keeps_whole_gradients for way in workload.sharding),
            shortening=Shortening(runs_to_shorten(workload), start_shortened, lambda: self.baseline_graph),
        )
        self._finished_recordings = self.recordings
        """Recordings with the workspaces that plans promise: of the fastest algorithms, or the smallest workspaces."""
        self._candidates: dict[Hashable, Candidates] = {}
        """All candidates, for each pair of techniques that they may use and modules that are excluded."""
        self._only_fastest = True
        """False if convolutions whose workspace does not fit may run a slower algorithm, as in PyTorch."""
        self._start_forward = start_forward
        self.searches = Searches()
        self._seconds_to_measure = [0.0]
        """Wall times in seconds of all measurements, after a first 0. Copies of the session share this list."""

    def search_space(self, constraints: Constraints) -> SearchSpace:
        """Return the search space of the plan. Raises `DecisionError` if a forced technique cannot be used."""
        graph = self.baseline_graph
        if self.workload.step is not None:
            return self._first_space(constraints)
        return search_space(
            self.workload,
            self.card,
            constraints,
            batch_statistics=graph.batch_statistics,
            carried=self._carried if constraints.allow(Role.MICRO_BATCHING) else None,
            values_needed=next((text for text in graph.assumptions if ASSUMED_VALUES in text), None),
            why_no_samples=self._by_sample_check.why_not if constraints.allow(Role.MICRO_BATCHING) else None,
            chunks=loss_in_chunks(graph, self.workload.model, vram_bytes=self.budget.usable_bytes),
        )

    @functools.cached_property
    def _carried(self) -> str | None:
        return carried_state(self.baseline_graph)

    def expect(self, constraints: Constraints) -> None:
        """Start the recording that the search will probably need first, while the baseline is still being recorded.

        Plans under these constraints are reported as progress.
        """
        self._asked = constraints
        if constraints.allow(Role.MICRO_BATCHING) and self.workload.step is None:
            _ = self._by_sample_check  # the first access starts its rehearsal
        if constraints.force(Role.LOSS) or constraints.force(Role.UPDATE_TIME):
            return  # forced chunks follow from the baseline, and a forced step in backward excludes configurations
        space = self._first_space(constraints)
        self.recordings.prefetch(space.precisions[-1], space.splits[:1])

    def _first_space(self, constraints: Constraints) -> SearchSpace:
        """Returns the search space, without what depends on the baseline."""
        return search_space(self.workload, self.card, constraints, batch_statistics=(), chunks=None)

    def close(self) -> None:
        """End the recordings and rehearsals that are still running. After that, the session cannot be used."""
        with interrupts_held_back():
            for part in (self.certificates, self.recordings, vars(self).get("_by_sample_check")):
                if part is not None:
                    part.close()
        vars(self).clear()  # breaks reference cycles: recordings hold functions that refer to this session

    def with_budget(self, total_bytes: int) -> PlanningSession:
        """Returns a session with `total_bytes` as the budget. It shares recordings, candidates and certificates."""
        _ = self.baseline_graph  # made before the copy, so that both have it
        if self.workload.step is None:
            _ = self._by_sample_check
        other = self._copy()
        other._budget = Budget.of_total(self.card, total_bytes)
        return other

    def _copy(self) -> PlanningSession:
        """Returns a session without plans, which shares recordings, candidates and certificates."""
        other = copy.copy(self)
        other._plans, other._asked = {False: BestPlans(), True: BestPlans()}, None
        other.__dict__.pop("baseline", None)
        return other

    def before_baseline(self, constraints: Constraints) -> PlanningSession:
        """Returns a session with a what-if recording in place of the baseline. Call `expect` before.

        Its choices are guesses. It shares recordings and candidates. Raises `StepError` if the step cannot be recorded.
        """
        precisions, size = self._first_space(constraints).precisions, self.workload.batch_size
        config, whole = (() if () in precisions else precisions[-1]), MicroBatching(micro_batches=1, size=size)
        self._guessed_trained = self.recordings.trained(config, whole)
        other = self._copy()
        other.searches = self.searches.add_guesses()
        other.baseline_graph = self.recordings.of(config, whole)()
        return other

    def is_ready(self, choice: Choice) -> bool:
        """True if a choice can be certified and compared with the baseline without waiting for a rehearsal."""
        has_baseline = "baseline_graph" in vars(self) or self.certificates.is_ready(())
        return has_baseline and self.certificates.is_ready(choice.decisions)

    def _names_of_trained(self) -> tuple[str, ...]:
        """Returns the names of the trained parameters, as far as they are known before the baseline."""
        if self._guessed_trained is not None and "baseline_graph" not in vars(self):
            return self._guessed_trained
        return self.baseline_graph.trained

    @property
    def has_slower_algorithms(self) -> bool:
        """True if convolutions have slower algorithms with smaller workspaces, and these plans do not use them."""
        return self._only_fastest and any(storage.trials for storage in self.baseline_graph.storages)

    def with_slower_algorithms(self) -> PlanningSession:
        """Returns a session whose convolutions may run slower algorithms. Its plans promise the smallest workspaces.

        It shares recordings, certificates and noted plans. How much slower those algorithms are is not known, so that
        plans with the fastest ones come first (`fitting.best`).
        """
        if not self.has_slower_algorithms:
            return self
        other = copy.copy(self)
        other._only_fastest = False
        least = self.recordings.finished_by(lambda graph: with_least_workspaces(self._with_workspaces(graph)))
        other._finished_recordings, other._candidates = least, {}
        other.__dict__.pop("baseline", None)
        return other

    @functools.cached_property
    def _by_sample_check(self) -> BySampleCheck:
        return BySampleCheck(self.workload, self._start_forward)

    @functools.cached_property
    def baseline_graph(self) -> StepGraph:
        """The recording of the baseline."""
        self.watch.stage("rehearsing the step")
        return self.certificates.of(())

    @functools.cached_property
    def baseline(self) -> Certified:
        """The user's unchanged step, with its footprint on the card."""
        graph = self.baseline_graph
        measured = self._measured(graph, self._usable_bytes)
        step_ns, peak_bytes = measured.footprint.step_ns, measured.curve_bytes
        choice = Choice(decisions=(), peak_bytes=peak_bytes, step_ns=step_ns, status="not needed", gap=0.0)
        return Certified(choice=choice, graph=graph, measured=measured)

    def certify(self, choice: Choice) -> Certified:
        """Return a choice with its certificate, and with its footprint under the budget."""
        self.watch.check()
        return self.certified_within(choice, self.certificate_of(choice), self._usable_bytes)

    def certificate_of(self, choice: Choice) -> StepGraph:
        """Return the recording of the rewritten step. Raises `StepError` if the step cannot be rehearsed."""
        return self.certificates.of(choice.rehearsed_decisions) if choice.rehearsed_decisions else self.baseline_graph

    def certified_within(self, choice: Choice, graph: StepGraph, total_bytes: int | None) -> Certified:
        """Return a choice with its certificate `graph`, and with its footprint under a budget (None for no limit).

        The alternatives for the options of the allocator are tried in order of preference. The choice gets the first
        one with which the step fits without releasing cached memory, or else the first one with which it fits.
        """
        possible: list[Certified] = []
        for decisions in choice.with_each_allocator:
            if changed_options(decisions, self.card.alloc_conf):  # what the user has set is changed last
                fitting = next((certified for certified in possible if certified.measured.fits), None)
                if fitting is not None:
                    return fitting
            if possible and not runs_within(graph, self.card, total_bytes, decisions, fastest=self._only_fastest):
                continue
            measured = self._measured(graph, total_bytes, decisions)
            chosen = dataclasses.replace(choice, decisions=decisions)
            # A promise may count the smallest workspaces. If larger ones fit after all, the peak is higher.
            more_bytes = 0 if self._only_fastest else measured.curve_bytes - measured.least_bytes
            possible.append(Certified(choice=chosen, graph=graph, measured=measured, more_bytes=more_bytes))
            if measured.fits and not measured.retries:
                return possible[-1]
        return next((certified for certified in possible if certified.measured.fits), possible[0])

    def note(self, certified: Certified, constraints: Constraints) -> None:
        """Note a certified plan of the search, so that it is known if the time is up, and report it if it is better."""
        self._plans[self.recordings.is_dropped].add(certified)
        if constraints == self._asked and certified.measured.fits and self.quick_enough(certified, constraints):
            footprint, baseline = certified.measured.footprint, self.baseline.measured.footprint
            self.watch.found(footprint.total_bytes, footprint.step_ns / max(baseline.step_ns, 1))

    def best_known(self, constraints: Constraints) -> Certified | None:
        """Returns the fastest certified plan that fits, or the baseline if it fits; None if no such plan is known."""
        known = self._plans[self.recordings.is_dropped].fastest, None if constraints.forced else self.baseline
        fitting = [plan for plan in known if plan and plan.measured.fits and self.quick_enough(plan, constraints)]
        return min(fitting, key=lambda plan: plan.time_rank, default=None)

    def smallest_known(self) -> Certified:
        """Returns the smallest certified plan so far, or the baseline, under the smallest budget in which it runs."""
        smallest = self._plans[self.recordings.is_dropped].smallest or self.baseline
        known = min(smallest, self.baseline, key=lambda plan: plan.measured.curve_bytes)
        return self.measure_at_smallest_budget(known)

    @property
    def seconds_to_measure_smallest(self) -> float:
        """Estimated time in seconds that `smallest_known` takes."""
        return _MEASUREMENTS * max(self._seconds_to_measure)

    def chooser(self, space: SearchSpace, constraints: Constraints) -> Chooser:
        """Return a new chooser for a search space, and add it to `searches`."""
        space = self.searches.without_failed(space, constraints)
        is_frozen = has_role(space.precisions[0], Role.FREEZING)
        chooser = Chooser(
            space,
            self.candidates(space),
            Bounds.of(
                self.baseline_graph,
                self.card,
                updates=least_updates(
                    self.workload, self.card, self.baseline_graph, self._trained.with_state, is_frozen=is_frozen
                ),
                lower_bound_bytes=self.lower_bound_bytes,
                is_frozen=is_frozen,
            ),
            self.certificates,
            force_recompute=constraints.force(Role.RECOMPUTE),
            why_no_units=self.searches.error_of(space.recompute),
            slowest_ns=self.slowest_ns(constraints),
        )
        self.searches.add(constraints, chooser)
        return chooser

    def candidates(self, space: SearchSpace) -> ChunkedCandidates:
        """Returns the candidates of a search space."""
        key = recompute, excluded = space.recompute, self.searches.excluded()
        if key not in self._candidates:
            self._candidates[key] = Candidates(
                self._finished_recordings,
                self.card,
                batch_bytes=self.workload.batch_bytes,
                watch=self.watch,
                recompute=recompute,
                excluded=excluded,
                sharding=self.workload.sharding,
            )
        return ChunkedCandidates(self._candidates[key], space.chunks)

    def quick_enough(self, certified: Certified, constraints: Constraints) -> bool:
        """True if the rehearsed step is no slower than the constraints allow."""
        return certified.measured.footprint.step_ns <= self.slowest_ns(constraints)

    @property
    def budget(self) -> Budget:
        """The budget. Raises `RuntimeError` in a session without one."""
        if self._budget is None:
            raise RuntimeError("this session has no budget: call with_budget first")
        return self._budget

    @property
    def _usable_bytes(self) -> int | None:
        return None if self._budget is None else self._budget.usable_bytes

    def measure_at_smallest_budget(self, certified: Certified) -> Certified:
        """Measures a certified step under the budget or, if it does not fit, under the smallest one in which it runs.

        `measured.fits` of the result says whether the step fits the session's budget.
        """
        total_bytes = max(self.budget.usable_bytes, self.smallest_budget_bytes(certified))
        measured = self.certified_within(certified.choice, certified.graph, total_bytes)
        fits = total_bytes <= self.budget.usable_bytes
        return dataclasses.replace(measured, measured=dataclasses.replace(measured.measured, fits=fits))

    def predicted_missing_bytes(self, choice: Choice) -> int:
        """Returns how many bytes a plan will probably lack; 0 if it may fit, or if nothing is known."""
        if choice.prediction is None:
            return 0
        usable_bytes, alternatives = self.budget.usable_bytes, choice.with_each_allocator
        return choice.prediction.missing_bytes(self.card, usable_bytes, alternatives, self._only_fastest)

    def smallest_budget_bytes(self, certified: Certified) -> int:
        """Returns the smallest total in bytes in which a certified step runs, or up to 1 MiB more (`smallest_of`).

        It is larger if the time is up before the search for it is complete.
        """
        fastest, alternatives = self._only_fastest, certified.choice.with_each_allocator
        return smallest_of(certified.graph, self.card, alternatives, fastest=fastest, until=self.watch)

    def missing_bytes(self, certified: Certified) -> int:
        """Returns the number of bytes that a certified plan lacks to fit the budget, at least 1.

        The plan must not fit. The result may be too large (`smallest_total.missing_bytes`).
        """
        step = AllocatingStep(certified.graph, self.card, fastest=self._only_fastest, watch=self.watch)
        return missing_bytes(step, self.budget.usable_bytes, certified.choice.with_each_allocator)

    @functools.cached_property
    def lower_bound_bytes(self) -> Callable[[tuple[Decision, ...]], int]:
        """Returns for a configuration a lower bound in bytes on the peak of every plan with it."""
        workload, trained, graph = self.workload, self._trained, self.baseline_graph
        peak_bytes, state_bytes = optimizer_peak_bytes(graph), graph.bytes_of(Category.OPTIMIZER_STATE)
        known = {"optimizer_peak_bytes": peak_bytes, "state_bytes": state_bytes}
        return functools.cache(lambda config: lower_bound_bytes(workload, trained, **known, config=config))

    def slowest_ns(self, constraints: Constraints) -> float:
        """Returns the maximum step time in nanoseconds that the constraints allow; infinite if there is none."""
        allowed = constraints.max_slowdown
        return math.inf if allowed is None else allowed * self.baseline.measured.footprint.step_ns

    @functools.cached_property
    def _trained(self) -> TrainedParameters:
        return TrainedParameters.of(self.workload, self.baseline_graph.trained)

    def _measured(self, graph: StepGraph, total_bytes: int | None, decisions: tuple[Decision, ...] = ()) -> Measured:
        began = time.monotonic()
        measured = measure(graph, self.card, vram_bytes=total_bytes, decisions=decisions, fastest=self._only_fastest)
        self._seconds_to_measure.append(time.monotonic() - began)
        return measured

    def _with_workspaces(self, graph: StepGraph) -> StepGraph:
        return with_workspaces(graph, self.card, torch.__version__)
