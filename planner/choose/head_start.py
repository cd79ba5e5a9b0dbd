"""Starts certificates before they are needed: of the plan that will probably be chosen, and of a fallback.

The rehearsals of the baseline and of the chosen step take the most time of planning, and the search between them needs
the baseline. But what-if recordings are finished earlier, because they have one step instead of two and only a few of
many identical layers. So a search runs on them first, with a what-if recording in place of the baseline, and the
rehearsal of its choice is started. The result of this first search is used for nothing else. The search that follows
finds recordings, candidates and answers of integer programs in the cache. Nearly always it makes the same choice, whose
rehearsal has then been running for a while.

A search for a plan that recomputes modules may take long. Meanwhile the *fallback* is rehearsed: a plan that needs no
search, because it recomputes all layers of the model. So a plan that fits is often known long before the fastest one.
"""

from __future__ import annotations

import contextlib
import dataclasses

import torch

from planner.choose.candidates import Candidate
from planner.choose.choice import Certified, Choice
from planner.choose.fitting import first_to_certify
from planner.choose.planning_session import PlanningSession
from planner.errors import PlannerError, StepError
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import Role
from planner.progress import TimeIsUp
from planner.recompute.units import whole_modules
from planner.space.configurations import Configurations
from planner.space.search_space import SearchSpace

_CONTAINERS = torch.nn.ModuleList, torch.nn.Sequential
"""Classes of modules whose members are layers."""
_FRACTION = 0.2
"""Maximum fraction of the remaining time for the first search. The rehearsal of the baseline needs the rest."""


class Fallback:
    """A plan that recomputes all layers that may be checkpointed, and is certified while the search is running.

    If it fits, it is reported as progress, and it is the result of planning if the time is up before a faster plan is
    certified. Its rehearsal has a low priority. It is not begun if the configuration that the search tries first fits
    without recompute, because then the search is short, or if parameters, gradients and optimizer state alone take
    more than the budget.
    """

    def __init__(self, session: PlanningSession, constraints: Constraints) -> None:
        self._session, self._constraints = session, constraints
        self._possible: tuple[PlanningSession, SearchSpace] | None = None
        """The session and the search space from which the plan will be made; None before `prepare`, and once it is
        decided whether the plan is made."""
        self._is_decided = False
        """True once it is decided whether the plan is made."""
        self._choice: Choice | None = None
        """The plan while it is being rehearsed; None otherwise."""

    def prepare(self, guessing: PlanningSession, space: SearchSpace) -> None:
        """Set the session and the search space from which the plan will be made.

        Does nothing if that is decided already, or if the plan would need micro-batches, a frozen prefix or several
        cards.
        """
        must_split, must_freeze = space.splits[0].micro_batches > 1, self._constraints.force(Role.FREEZING)
        if not (self._is_decided or must_split or must_freeze or guessing.workload.sharding):
            self._possible = guessing, space

    def advance(self) -> None:
        """Begin the rehearsal of the plan, or note the plan when its rehearsal is ready. Never waits.

        A `PlannerError` of the rehearsal is ignored, because the search does not need this plan.
        """
        if self._session.recordings.is_dropped:  # they may have shown wrongly which layers may be checkpointed
            self._possible = self._choice = None
        certified: Certified | None = None
        with contextlib.suppress(PlannerError):
            if self._possible is not None:
                self._decide(*self._possible)
            elif self._choice is not None and self._session.is_ready(self._choice):
                choice, self._choice = self._choice, None
                certified = self._certified(choice)
        if certified is not None:  # the user's function that receives progress may raise errors, too
            self._session.note(certified, self._constraints)

    def _decide(self, guessing: PlanningSession, space: SearchSpace) -> None:
        """Begin the rehearsal if the configuration that the search tries first does not fit without recompute.

        Does nothing as long as this configuration is not recorded.
        """
        narrow = dataclasses.replace(space, precisions=space.precisions[-1:], updates=space.updates[:1])
        configs = tuple(Configurations(narrow))
        candidate = guessing.candidates(space).get(configs[0], space.splits[0]) if configs else None
        if candidate is not None:
            self._possible, self._is_decided = None, True
            if candidate.peak_bytes > guessing.budget.tensor_bytes:
                self._begin(guessing, candidate, narrow)

    def _begin(self, guessing: PlanningSession, candidate: Candidate, space: SearchSpace) -> None:
        """Begin to rehearse the step that recomputes all layers, in the configuration with the smallest lower bound.

        Does nothing if the lower bound on its peak exceeds the budget, or if no layer may be checkpointed.
        """
        config = min(Configurations(space).that_may_recompute(), key=guessing.lower_bound_bytes, default=None)
        if config is None or guessing.lower_bound_bytes(config) > guessing.budget.tensor_bytes:
            return
        layers = candidate.modules_together(lambda path: _is_layer(path, guessing.workload.model))
        if layers:
            self._choice = Choice(
                decisions=(*config, whole_modules(layers)),
                peak_bytes=0,
                step_ns=0,
                status="time limit",
                gap=1.0,
                allocators=space.allocators,
                config=config,
            )
            self._session.certificates.begin_in_background(self._choice.decisions)

    def _certified(self, choice: Choice) -> Certified:
        """Certify the plan. Its promise is the peak and the time of its certificate."""
        certified = self._session.certify(choice)
        peak_bytes, step_ns = certified.measured.curve_bytes, certified.measured.footprint.step_ns
        choice = dataclasses.replace(certified.choice, peak_bytes=peak_bytes, step_ns=step_ns)
        return dataclasses.replace(certified, choice=choice)


def _is_layer(path: str, model: torch.nn.Module) -> bool:
    """True if the module at a path is a member of a `ModuleList` or a `Sequential`."""
    return bool(path) and isinstance(model.get_submodule(path.rpartition(".")[0]), _CONTAINERS)


def rehearse_baseline(session: PlanningSession, constraints: Constraints, fallback: Fallback) -> None:
    """Rehearse the baseline, and meanwhile start the certificate of the plan that will probably be chosen.

    The certificate is started only if recordings have a few of many identical layers, because only then are they
    finished much earlier than the baseline.

    Args:
        fallback: is prepared as soon as a what-if recording shows what is possible, if recordings are shortened.

    Raises:
        StepError: the step cannot be rehearsed.
        TimeIsUp: the time was up before the baseline was recorded.
    """
    # For a step of the user's own, only the baseline shows how many calls of the step are recorded. Without identical
    # layers, what-if recordings are finished no earlier than the baseline.
    if session.workload.step is not None or not session.recordings.runs:
        session.expect(constraints)
        _ = session.baseline_graph
        return
    watch, recordings = session.watch, session.recordings
    with recordings.shortening.assumed_right():
        session.expect(constraints)
        session.certificates.begin(())
        # Errors of this search are ignored: the next search, which has the baseline, raises or reports them again.
        with contextlib.suppress(StepError, TimeIsUp), watch.at_most(_FRACTION * watch.left_seconds):
            guessing = session.before_baseline(constraints)
            recordings.shortening.begin()
            space = guessing.search_space(constraints)
            fallback.prepare(guessing, space)
            choice = first_to_certify(guessing, space, constraints)
            if choice is not None and choice.decisions:
                session.certificates.begin(choice.rehearsed_decisions)
    recordings.shortening.begin()  # unless it was begun
    _ = session.baseline_graph
    recordings.confirm()
