"""Starts the certificate of a plan while the baseline is still being rehearsed.

The rehearsals of the baseline and of the chosen step take the most time of planning, and the search between them needs
the baseline. But what-if recordings are finished earlier, because they have one step instead of two and only a few of
many identical layers. So a search runs on them first, with a what-if recording in place of the baseline, and the
rehearsal of its choice is started. The result of this first search is used for nothing else. The search that follows
finds recordings, candidates and answers of integer programs in the cache. Nearly always it makes the same choice, whose
rehearsal has then been running for a while.
"""

from __future__ import annotations

import contextlib

from planner.choose.fitting import first_to_certify
from planner.choose.planning_session import PlanningSession
from planner.errors import StepError
from planner.plan_types.constraints import Constraints
from planner.progress import TimeIsUp

_FRACTION = 0.2
"""Maximum fraction of the remaining time for the first search. The rehearsal of the baseline needs the rest."""


def rehearse_baseline(session: PlanningSession, constraints: Constraints) -> None:
    """Rehearse the baseline, and meanwhile start the certificate of the plan that will probably be chosen.

    The certificate is started only if recordings have a few of many identical layers, because only then are they
    finished much earlier than the baseline.

    Raises:
        StepError: the step cannot be rehearsed.
        TimeIsUp: the time was up before the baseline was recorded.
    """
    # For a step of the user's own, only the baseline shows how many calls of the step are recorded. Without identical
    # layers, what-if recordings are finished no earlier than the baseline.
    if session.workload.step is not None or not session.recordings.are_shortened:
        session.expect(constraints)
        _ = session.baseline_graph
        return
    watch, recordings = session.watch, session.recordings
    with recordings.assumed_right():
        session.expect(constraints)
        session.begin_baseline()
        # Errors of this search are ignored: the next search, which has the baseline, raises or reports them again.
        with contextlib.suppress(StepError, TimeIsUp), watch.at_most(_FRACTION * watch.left_seconds):
            guessing = session.before_baseline(constraints)
            recordings.begin_comparison()
            space = guessing.search_space(constraints)
            choice = first_to_certify(guessing, space, constraints)
            if choice is not None and choice.decisions:
                session.begin_certificate(choice)
    recordings.begin_comparison()  # unless it was begun
    _ = session.baseline_graph
    recordings.confirm()
