"""Finds the best plan whose certificate fits the budget, or the plan to report if there is none.

The chooser promises a peak of tensors, and the allocator needs some bytes more (its slack). So a plan is chosen and
certified, and if its certificate does not fit, another plan is chosen with a smaller limit on the promised bytes
(`budget_search`). On top of this loop there are three functions:

- `best` finds the plan for the user: the fastest plan that fits. If no plan fits in which all convolutions run their
  fastest algorithms, slower ones are used. A prefix of the model is frozen only if nothing else fits, and then the
  shortest prefix that is enough (searched from a guess by the bytes that freezing saves).
- `smallest` finds out how little memory is possible, where the allocator's slack matters most.
- `nearest` finds the plan to report if nothing fits.

If a certificate shows that a recording was lengthened wrongly, the search is repeated with recordings of all layers.

Where it is not exact: a plan that promises less may have more slack, and the number of certificates is limited, so a
faster plan may exist. A plan that is returned as fitting always has a certificate that fits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from planner.allocator.settings import SMALL_SEGMENT_BYTES
from planner.choose.budget_search import PromiseBudgets, search
from planner.choose.choice import TIE, Certified, Choice
from planner.choose.chooser import Chooser
from planner.choose.planning_session import PlanningSession
from planner.errors import StepError
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import Decision, Role, has_role, with_roles
from planner.plan_types.recompute_decisions import Recomputing
from planner.progress import TimeIsUp
from planner.recompute.failing import failing, setting_of
from planner.search.threshold import first_true
from planner.space.frozen_prefixes import prefixes
from planner.space.search_space import SearchSpace

_SEARCHING = 0.6
"""Fraction of the time limit after which a plan is certified, although the search is not finished."""
_ATTEMPTS, _FEW_ATTEMPTS = 10, 4
"""Maximum number of certificates in a search for the fastest plan, and in a search in which a good plan is enough."""
_PREDICTIONS = 2
"""Maximum number of plans that are predicted to fail, for each certificate that a search may make."""
_HOPELESS = 6
"""A search is given up after this number of certificates if no plan has fit."""
_FINEST_STEP = 512
"""The limit on promised bytes is lowered at least by the budget for tensors divided by this number."""
_LARGE_SLACK = 0.05
"""If the allocator's slack takes more than this fraction of a plan's total, a smaller plan is searched for."""
_DESCENTS = 2
"""Maximum number of searches for a plan with a smaller total. Each search asks for one small segment (2 MiB) less."""


T = TypeVar("T")


class _DroppedError(Exception):
    """Recordings that a search has used were lengthened wrongly, or a technique that it has chosen cannot be used."""


def best(session: PlanningSession, space: SearchSpace, constraints: Constraints) -> Certified | None:
    """Returns the fastest certified plan, with a frozen prefix only if no other plan fits; None if nothing fits."""
    if not constraints.force(Role.FREEZING):
        certified = fastest_in_chunks(session, space, constraints)
        if certified is None and session.has_slower_algorithms:
            certified = fastest_in_chunks(session.with_slower_algorithms(), space, constraints)
        if certified is not None or not constraints.allow(Role.FREEZING):
            return certified
    return with_prefix(session.with_slower_algorithms(), space, constraints)


def best_in_time(session: PlanningSession, space: SearchSpace, constraints: Constraints) -> Certified | None:
    """Like `best`, but makes sure that a plan is certified before the time is up, if the search has found any.

    A search certifies its first plan when it has compared all configurations. If that takes too long, the best choice
    so far is certified, and the search goes on from what is known.

    Raises:
        TimeIsUp: the time is up; `session.best_known` is the best plan so far.
    """
    watch = session.watch
    try:
        with watch.at_most(_SEARCHING * watch.left_seconds):
            return best(session, space, constraints)
    except TimeIsUp:
        with watch.after_end():
            _certify_promised(session, constraints)
    return best(session, space, constraints)


def _certify_promised(session: PlanningSession, constraints: Constraints) -> None:
    """Certify the best choice so far and, if it does not fit, the smallest one. Skip those that are not faster."""
    known = session.best_known(constraints)
    below_ns = math.inf if known is None else known.measured.footprint.step_ns / TIE
    for choice in (choice for choice in session.searches.promised(constraints) if choice.step_ns < below_ns):
        session.watch.stage("certifying a plan")
        with contextlib.suppress(_DroppedError):
            certified = certify(session, choice)
            session.note(certified, constraints)
            if certified.measured.fits:
                return


def with_prefix(
    session: PlanningSession, space: SearchSpace, constraints: Constraints, *, roughly: bool = False
) -> Certified | None:
    """Returns the fastest certified plan with the shortest frozen prefix that is enough; None if no prefix is enough.

    Args:
        roughly: True to search only the configuration with the smallest peak, which is quicker: the plan fits, but
            another configuration may be faster.
    """
    space = space.with_most_chunks() or space
    candidates = frozen_prefixes(session)
    # Only the configuration with the smallest peak decides how short a prefix may be: this saves recordings.
    smallest_choice = session.chooser(space, constraints).smallest()
    narrow = space.restricted_to(smallest_choice.config)

    def promises(number: int) -> bool:
        chooser = session.chooser(narrow.with_frozen(candidates[number]), constraints)
        return chooser.fastest(session.budget.tensor_bytes) is not None

    def holds(number: int) -> bool:
        return fastest(session, narrow.with_frozen(candidates[number]), constraints) is not None

    # Three answers, each the guess for the next: by bytes that freezing saves, by promises, by certificates.
    guess = _guessed_prefix(session, candidates, smallest_choice)
    guess = first_true(len(candidates), promises, guess=guess)
    shortest = first_true(len(candidates), holds, guess=guess)
    if shortest == len(candidates):
        return None
    return fastest(session, (narrow if roughly else space).with_frozen(candidates[shortest]), constraints)


def fastest_in_chunks(
    session: PlanningSession, space: SearchSpace, constraints: Constraints, *, attempts: int = _ATTEMPTS
) -> Certified | None:
    """Returns the fastest certified plan with the number of loss chunks that follows from the budget.

    If nothing fits, the search is repeated with the maximum number of chunks. None if nothing fits then either.
    """
    certified = fastest(session, space, constraints, attempts=attempts)
    if certified is None and (finer := space.with_most_chunks()) is not None:
        return fastest(session, finer, constraints, attempts=_FEW_ATTEMPTS)
    return certified


def roughly_fastest(session: PlanningSession, space: SearchSpace, constraints: Constraints) -> Certified | None:
    """Like `fastest_in_chunks`, but certifies only a few plans: a faster plan may be missed."""
    return fastest_in_chunks(session, space, constraints, attempts=_FEW_ATTEMPTS)


def fastest(
    session: PlanningSession,
    space: SearchSpace,
    constraints: Constraints,
    *,
    attempts: int = _ATTEMPTS,
) -> Certified | None:
    """Returns the fastest certified plan, found by `budget_search`; None if no plan fits.

    Args:
        attempts: maximum number of plans that are certified.

    Raises:
        TimeIsUp: the session's time is up; `session.best_known` is the best plan so far.
    """
    return _search(session, space, constraints, attempts)[0]


def certify_found(session: PlanningSession, find: Callable[[], Choice]) -> Certified:
    """Returns a choice with its certificate; if recordings turn out to be wrong, the choice is searched again."""

    def search() -> Certified:
        certified = certify(session, find())
        check_recordings(session, certified)
        return certified

    return repeated_if_dropped(session, search)


def repeated_if_dropped(session: PlanningSession, search: Callable[[], T]) -> T:
    """Returns the result of a search, which is repeated if recordings or techniques are dropped meanwhile.

    Recordings are dropped at most once (`check_recordings`), and each technique at most once (`certify`).
    """
    while True:
        was_dropped = session.recordings.is_dropped
        with contextlib.suppress(_DroppedError):
            result = search()
            if session.recordings.is_dropped == was_dropped:
                return result


def certify(session: PlanningSession, choice: Choice) -> Certified:
    """Return a choice with its certificate. The search has to be called by `repeated_if_dropped`.

    If the rewritten step cannot be rehearsed because it recomputes or offloads some modules, the technique is left out
    of later searches for modules like these (`Searches.leave_out`), and the present search ends.

    Raises:
        StepError: a step that recomputes and offloads nothing cannot be rehearsed.
    """
    try:
        return session.certify(choice)
    except StepError as error:
        failed = _failed(session, choice, error)
        if not failed:
            raise
        session.searches.leave_out(failed, setting_of(choice.decisions), session.workload.model)
        raise _DroppedError from error


def _failed(session: PlanningSession, choice: Choice, error: StepError) -> dict[Recomputing, StepError]:
    """Returns the decisions because of which the step of a choice fails, each with its error; empty if there are none.

    Only decisions that recompute or offload are considered, and only techniques that are not left out already.
    """
    used = [d for d in choice.decisions if isinstance(d, Recomputing) and not session.searches.is_left_out(type(d))]

    def error_with(tried: Sequence[Recomputing]) -> StepError | None:
        parts: dict[type[Decision], Decision] = {type(decision): decision for decision in tried}
        decisions = tuple(
            parts.get(type(d), d) for d in choice.decisions if type(d) in parts or d.role is not Role.RECOMPUTE
        )
        try:
            session.certify(dataclasses.replace(choice, decisions=decisions))
        except StepError as found:
            return found
        return None

    return failing(used, error_with, error)


def check_recordings(session: PlanningSession, certified: Certified) -> None:
    """Ends the present search if the lengthened recordings on which the promise of a plan is based are wrong.

    They are compared with recordings of all layers only if the certificate is not what was promised. This happens for
    other reasons, too. The search has to be called by `repeated_if_dropped`.
    """
    if not certified.is_as_promised and session.recordings.drop_if_wrong(certified.choice.decisions):
        raise _DroppedError


def _search(
    session: PlanningSession, space: SearchSpace, constraints: Constraints, attempts: int, most_bytes: int | None = None
) -> tuple[Certified | None, tuple[Certified, ...]]:
    """Returns the fastest plan that fits (None if no plan fits), and all plans that were certified on the way.

    Args:
        most_bytes: maximum number of bytes that a plan may promise; None for those of the budget.
    """
    return repeated_if_dropped(session, lambda: _search_once(session, space, constraints, attempts, most_bytes))


def _search_once(
    session: PlanningSession, space: SearchSpace, constraints: Constraints, attempts: int, most_bytes: int | None
) -> tuple[Certified | None, tuple[Certified, ...]]:
    session.watch.stage("searching")
    chooser, budget_bytes = session.chooser(space, constraints), most_bytes or session.budget.tensor_bytes
    if most_bytes is None and chooser.fastest(budget_bytes) is None:
        budget_bytes = session.budget.allocator_bytes  # the slack may be smaller than its first estimate
    tried: dict[Choice, Certified] = {}

    def certify_fits(choice: Choice) -> bool:
        session.watch.stage("certifying a plan")
        tried[choice] = certified = certify(session, choice)
        check_recordings(session, certified)
        session.note(certified, constraints)
        session.watch.stage("searching")
        return certified.measured.fits

    def missing_bytes_of(choice: Choice) -> int:
        return session.missing_bytes(tried[choice])

    limits = {"attempts": attempts, "predictions": _PREDICTIONS * attempts}
    choice = _searched(session, chooser, budget_bytes, certify_fits, missing_bytes_of, **limits)
    return None if choice is None else tried[choice], tuple(tried.values())


def _searched(
    session: PlanningSession,
    chooser: Chooser,
    budget_bytes: int,
    certify_fits: Callable[[Choice], bool],
    missing_bytes_of: Callable[[Choice], int],
    **limits: int,
) -> Choice | None:
    """Returns the fastest plan that was found to fit. Its limits are `attempts` and `predictions` of `search`."""
    return search(
        lambda budget_of, below_ns: chooser.fastest(budget_of, below_ns=below_ns),
        certify_fits,
        missing_bytes_of,
        session.predicted_missing_bytes,
        budgets=PromiseBudgets(budget_bytes, finest_bytes=session.budget.tensor_bytes // _FINEST_STEP, tie=TIE),
        tie=TIE,
        hopeless=_HOPELESS,
        **limits,
    )


def first_to_certify(session: PlanningSession, space: SearchSpace, constraints: Constraints) -> Choice | None:
    """Returns the plan that a search for the fastest plan certifies first; None if no plan promises to fit."""
    chooser, budget_bytes = session.chooser(space, constraints), session.budget.tensor_bytes
    if chooser.fastest(budget_bytes) is None:
        return None
    # Every plan that would be certified counts as one that fits, so that the search returns the first one.
    limits = {"attempts": 1, "predictions": _PREDICTIONS * _ATTEMPTS}
    return _searched(session, chooser, budget_bytes, lambda choice: True, lambda choice: 1, **limits)


def smallest(session: PlanningSession, space: SearchSpace, constraints: Constraints) -> Certified:
    """Returns the plan with the smallest total that was found; of plans with the same total, a fast one.

    As soon as a plan fits the budget, it is returned, although smaller plans may exist.

    Raises:
        TimeIsUp: the session's time is up; `session.smallest_known` is the smallest plan so far.
    """
    session.watch.stage("searching for the smallest plan")
    smallest = session.measure_at_smallest_budget(
        certify_found(session, lambda: choice_with_smallest_promise(session, space, constraints))
    )
    session.note(smallest, constraints)
    # If slack is a large part of the total, a faster plan with a larger promise may need no more memory, or even less.
    # So search first within the same total, then within a total that is one segment smaller. A plan with micro-batches
    # is compared with faster plans in any case: some of its micro-batches may not lower the total.
    for less_bytes in (0, *[SMALL_SEGMENT_BYTES] * _DESCENTS):
        footprint = smallest.measured.footprint
        reserved_bytes, total_bytes = footprint.reserved_bytes, footprint.total_bytes
        slack_bytes = reserved_bytes - smallest.choice.peak_bytes
        is_split = not less_bytes and has_role(smallest.choice.decisions, Role.MICRO_BATCHING)
        if smallest.measured.fits or not (is_split or slack_bytes > _LARGE_SLACK * total_bytes):
            return smallest
        at_total = session.with_budget(total_bytes - less_bytes)
        attempts, most_bytes = _FEW_ATTEMPTS, None
        if slack_bytes <= _LARGE_SLACK * reserved_bytes:  # a faster plan within the total can promise only little more
            attempts, most_bytes = 1, smallest.choice.peak_bytes + reserved_bytes // _FINEST_STEP
        certified, tried = _search(at_total, space, constraints, attempts, most_bytes)
        if certified is None and less_bytes:
            break
        if tried:
            least = min(tried, key=lambda plan: (plan.measured.footprint.total_bytes, plan.choice.step_ns))
            smallest = min(
                (session.measure_at_smallest_budget(least), smallest),
                key=lambda plan: plan.measured.footprint.total_bytes,
            )
            session.note(smallest, constraints)
    return smallest


def choice_with_smallest_promise(session: PlanningSession, space: SearchSpace, constraints: Constraints) -> Choice:
    """Returns the choice with the smallest promised peak. The loss may be in the maximum number of chunks.

    Among equal peaks, the choice with the number of chunks that follows from the budget is returned.
    """
    choice, finer = session.chooser(space, constraints).smallest(), space.with_most_chunks()
    if finer is None or not has_role(choice.decisions, Role.LOSS):
        return choice
    narrow = dataclasses.replace(
        space.restricted_to(choice.config), losses=tuple(filter(None, finer.losses)), chunks=finer.chunks
    )
    return min(choice, session.chooser(narrow, constraints).smallest(), key=lambda choice: choice.peak_bytes)


def nearest(session: PlanningSession, space: SearchSpace, constraints: Constraints) -> Certified:
    """Returns the plan to report if no allowed plan fits.

    It is the fastest plan that fits but is slower than the constraints allow or, if nothing fits, the smallest plan.
    """
    if constraints.max_slowdown is not None:
        slower = dataclasses.replace(constraints, max_slowdown=None)
        if (certified := best(session, space, slower)) is not None:
            return certified
    return smallest(session.with_slower_algorithms(), space, constraints)


def frozen_prefixes(session: PlanningSession) -> tuple[Decision, ...]:
    """Returns a decision for each prefix of the model that can be frozen, from short to long."""
    starts = [(call.module, call.start) for call in session.baseline_graph.calls]
    modules = session.workload.model.named_modules()
    owners = [name for name, module in modules if any(True for _ in module.parameters(recurse=False))]
    return prefixes(starts, owners)


def _guessed_prefix(session: PlanningSession, candidates: tuple[Decision, ...], chosen: Choice) -> int:
    """Returns the index of the shortest prefix that would be enough if freezing saved only gradients and state.

    If no prefix would be enough, the result is the number of prefixes.
    """
    config = with_roles(chosen.decisions, Role.PRECISION, Role.OPTIMIZER, Role.UPDATE_TIME)
    missing = chosen.peak_bytes - session.budget.tensor_bytes
    saved = [session.lower_bound_bytes(config) - session.lower_bound_bytes((frozen, *config)) for frozen in candidates]
    return next((number for number, size in enumerate(saved) if size >= missing), len(candidates))
