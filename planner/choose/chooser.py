"""Finds the fastest plan whose promised peak is inside a budget: branch and bound over configurations.

A *configuration* (precision, loss, optimizer, time of the update) and a *split* of the batch together are a candidate.
Candidates are few, so they are enumerated. In each, the *units* to be recomputed or offloaded are selected by an
integer program (`search.milp`).

1. Configurations are tried in the order of `configs`: the fastest precision first, so that its time prunes the others.
2. Before a candidate is recorded, a lower bound on its time is computed: the time of the baseline or of a simpler
   candidate (with the user's optimizer, or without chunks), minus the maximum time that the additional decisions can
   save. A candidate whose bound shows that it cannot beat the best plan so far is neither recorded nor solved. A lower
   bound on memory (`Bounds.lower_bound_bytes`) prunes in the same way.
3. For each configuration, splits are tried from few micro-batches to many, until one fits without recompute. The time
   of that split limits what recompute may cost in the splits with fewer micro-batches, which are solved next.
4. If the whole batch cannot fit whatever is recomputed, the most micro-batches are recorded next: if they cannot fit
   either, the search ends (`_is_hopeless`).

Times within the factor `TIE` count as equal: then the more faithful plan wins, then the plan with fewer decisions.

Where it is not exact: times are predictions. An integer program that hits its time limit without an answer is treated
as if nothing fits (and counted in `undecided`). If the loss can be computed in chunks, configurations without chunks
are tried with the whole batch only.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from planner.choose.bounds import Bounds
from planner.choose.candidates import Candidate, ChunkedCandidates
from planner.choose.certificates import Certificates
from planner.choose.choice import TIE, Choice, simplest_in_tie
from planner.choose.prefetcher import Prefetcher, with_upcoming
from planner.errors import DecisionError, StepError
from planner.plan_types.decision_base import (
    Decision,
    Role,
    fidelity_of,
    has_role,
    with_roles,
    without_roles,
)
from planner.search import milp
from planner.search.problem import Selection
from planner.space.configurations import Config, Configurations
from planner.space.micro_batches import MicroBatching
from planner.space.search_space import SearchSpace

Budget = Callable[[Config], int]
"""A configuration -> maximum number of bytes that its plans may promise."""

_SAVING = (Role.OPTIMIZER, Role.LOSS, Role.UPDATE_TIME)
"""Roles of decisions that may make the step faster."""
_SUBSETS = tuple(itertools.chain.from_iterable(itertools.combinations(_SAVING, n) for n in (1, 2, 3)))
"""Sets of roles. A configuration without its decisions in one of these sets is simpler, and its time gives a bound."""

T = TypeVar("T")


class _ChunksRefusedError(Exception):
    """A step with its loss in chunks cannot be rehearsed. `update` is its decision about the time of the update."""

    def __init__(self, update: Config) -> None:
        super().__init__(update)
        self.update = update


class Chooser:
    """Chooses plans from one search space, for any budget. Plans are not certified here."""

    def __init__(
        self,
        space: SearchSpace,
        candidates: ChunkedCandidates,
        bounds: Bounds,
        certificates: Certificates,
        *,
        force_recompute: bool,
        why_no_units: StepError | None = None,
        slowest_ns: float = math.inf,
    ) -> None:
        """
        Args:
            force_recompute: True if every plan has to recompute or offload at least one unit.
            why_no_units: the error because of which modules may not be recomputed or offloaded; None if there is none.
            slowest_ns: maximum step time of a plan, in nanoseconds.
        """
        self._space, self._candidates, self._bounds = space, candidates, bounds
        self.configurations = Configurations(space)
        self._prefetcher = Prefetcher(candidates, certificates)
        self._force_recompute, self._why_no_units = force_recompute, why_no_units
        self._above_ns = slowest_ns if math.isinf(slowest_ns) else math.floor(slowest_ns) + 1
        """A plan that takes this many nanoseconds or more is too slow."""
        self.solve_seconds = 0.0
        self.dropped: dict[tuple[Decision, ...], StepError] = {}
        """Errors of the steps that could not be rehearsed, by their decisions about configuration and split."""
        self._without_bound: set[Config] = set()
        """Configurations from `_simpler` that could not be rehearsed, and therefore give no bounds for others."""
        self._is_hopeful = False
        """True if a plan is known to fit, or may fit as far as `_is_hopeless` can tell. It stays so in later calls."""
        self._hopeless_bytes = -1
        """Largest budget that is known to be too small for any plan."""
        self.tried: set[Config] = set()
        """Configurations that `fastest` has searched or pruned under at least one budget."""
        self.promised: list[Choice] = []
        """Choices that the latest call of `fastest` has found so far, also if its time was up."""
        self.undecided = 0
        """Number of integer programs that hit their time limit without an answer."""

    def fastest(self, budget: int | Budget, *, below_ns: float = math.inf) -> Choice | None:
        """Returns the fastest choice whose promised peak is inside the budget; None if there is none.

        Args:
            budget: maximum peak in bytes: one number for all configurations, or a function of the configuration.
            below_ns: only plans that take less than this time in nanoseconds are considered. If it is finite, a slower
                plan is known to fit.
        """
        self._is_hopeful |= below_ns < math.inf
        budget_of = budget if callable(budget) else lambda config: budget
        return self._or_without_chunks(lambda: self._fastest(budget_of, min(self._above_ns, below_ns)))

    def smallest(self) -> Choice:
        """Returns the choice with the smallest promised peak, whatever its step time.

        Raises `PlannerError` if no step can be rehearsed, or if what the user forces is not possible.
        """
        return self._or_without_chunks(self._smallest)

    def _or_without_chunks(self, search: Callable[[], T]) -> T:
        """Returns the result of `search`. If a step with its loss in chunks cannot be rehearsed, `search` is repeated.

        In the repetition, configurations without chunks are tried with all splits (`Configurations.splits`).
        """
        while True:
            try:
                return search()
            except _ChunksRefusedError as refused:
                if not self.configurations.leave_chunks_out(refused.update):
                    raise

    def _fastest(self, budget_of: Budget, above_ns: float) -> Choice | None:
        found = self.promised = []
        for number, (config, *upcoming) in enumerate(self._in_turn(budget_of)):
            # Prune by time: what is known already may show that this configuration cannot win.
            limit_ns = self._limit_ns(config, found, above_ns)
            if self._bound_ns(config) >= limit_ns or budget_of(config) <= self._hopeless_bytes:
                continue
            splits = self.configurations.splits(config)
            is_likely = not found and self._probably_fits(config, budget_of(config))
            if number > 0 and not found and not is_likely:  # the next configurations will probably be needed, too
                soon = (config, *upcoming)
                self._prefetcher.several((self._simpler(c), self.configurations.splits(c)) for c in soon)
            if self._may_be_faster(config, budget_of(config), limit_ns):
                best = simplest_in_tie(found).decisions if found else ()
                self._prefetcher.first_split(config, splits, best=best, is_likely=is_likely)
                if found:
                    others = (c for c in self.configurations if self._bound_ns(c) < self._limit_ns(c, found, above_ns))
                    self._prefetcher.updates((other, self.configurations.splits(other)) for other in others)
                choices = self._fastest_of(config, budget_of(config), limit_ns)
                found += [self._complete(choice, config) for choice in choices if choice.step_ns < above_ns]
        return simplest_in_tie(found) if found else None

    def _is_hopeless(self, budget_bytes: int) -> bool:
        """Returns True if no plan fits, as the recordings with the most micro-batches show, one for each precision.

        A step with fewer micro-batches has at least the same peak, apart from gradients: only accumulation keeps them
        during a forward. So they are not counted, and the state of the optimizer is the least of any configuration.
        """
        if budget_bytes > self._hopeless_bytes and not self._is_hopeful:
            self._is_hopeful = any(self._may_fit(budget_bytes))
            self._hopeless_bytes = self._hopeless_bytes if self._is_hopeful else budget_bytes
        return budget_bytes <= self._hopeless_bytes

    def _may_fit(self, budget_bytes: int) -> Iterator[bool]:
        """Yields for each configuration that may recompute whether it may fit with the most micro-batches."""
        configs = list(self.configurations.that_may_recompute())
        self._prefetcher.smallest(
            (self._simpler(config), self.configurations.splits(config)[-1:]) for config in configs
        )
        for config in configs:
            update = dataclasses.replace(self._bounds.update_memory_bound(config), counts_gradients=False)
            for split in self.configurations.splits(config)[-1:]:
                candidate = self._bounding(self._simpler(config), split)
                yield candidate is None or candidate.may_fit_with(update, budget_bytes, below_ns=None, recompute=True)

    def _complete(self, choice: Choice, config: Config) -> Choice:
        return dataclasses.replace(choice, config=config, allocators=self._space.allocators)

    def _in_turn(self, budget_of: Budget) -> Iterator[tuple[Config, ...]]:
        """Yields each configuration that may fit, with the next ones, and notes which have been tried or cannot fit."""
        bounded = list(self._bounded_configs())
        self.tried.update(config for config, least_bytes in bounded if least_bytes > budget_of(config))
        for window in with_upcoming(config for config, least_bytes in bounded if least_bytes <= budget_of(config)):
            yield window
            self.tried.add(window[0])

    def _smallest(self) -> Choice:
        configs = sorted(
            (bounded for bounded in self._bounded_configs() if not self.configurations.could_use_chunks(bounded[0])),
            key=lambda bounded: bounded[1],
        )
        found: list[Choice] = []
        smallest_bytes = math.inf

        def splits(config: Config, least_bytes: int) -> tuple[MicroBatching, ...]:
            """Returns the splits of a configuration with which a peak may be as small as the smallest one so far."""
            update, simpler = self._bounds.update_memory_bound(config), self._simpler(config)
            splits = self._splits_to_the_smallest(config) if least_bytes < smallest_bytes else ()
            recorded = [(s, self._candidates.get(simpler, s) if found and simpler != config else None) for s in splits]
            return tuple(s for s, of in recorded if not of or of.may_fit_with(update, int(smallest_bytes), None, True))

        for window in with_upcoming(configs):
            config, least_bytes = window[0]
            self._prefetcher.smallest((soon, splits(soon, least_soon)) for soon, least_soon in window)
            tried: set[MicroBatching] = set()
            while rest := set(splits(config, least_bytes)) - tried:
                split = max(rest, key=lambda split: split.micro_batches)
                tried.add(split)
                if (candidate := self._candidate(config, split)) and candidate.lower_bound_bytes < smallest_bytes:
                    choice = self._smallest_of(candidate, smallest_bytes)
                    found += [] if choice is None else [self._complete(choice, config)]
                    smallest_bytes = min(choice.peak_bytes for choice in found) if found else math.inf
        if not found:
            clash = self.configurations.clash()
            impossible = DecisionError(f"no plan is possible: {clash}; force only one of the two techniques")
            raise next(iter(self.dropped.values()), impossible)
        if self._force_recompute and not any(candidate.can_recompute for candidate in self._candidates.all()):
            raise self._why_no_units or DecisionError(
                f"{self._space.recompute[0].kind} is forced, but it cannot be applied to any module of this model: "
                "do not force it"
            )
        return min(found, key=lambda choice: (choice.peak_bytes, choice.step_ns))

    def _splits_to_the_smallest(self, config: Config) -> tuple[MicroBatching, ...]:
        """Returns the splits to try for the smallest peak of a configuration, without those that cannot be rehearsed.

        With recompute the splits with the most and the fewest micro-batches are enough. Without it all are tried:
        accumulation keeps gradients alive but reduces activations, so a split between the two may be the best.
        """
        splits = tuple(s for s in self.configurations.splits(config) if (*config, *s.decisions()) not in self.dropped)
        return tuple(dict.fromkeys(splits[-1:] + splits[:1])) if self._space.recompute else splits[::-1]

    def _candidate(self, config: Config, split: MicroBatching) -> Candidate | None:
        """Returns the candidate; None if its step cannot be rehearsed. The error is then kept in `dropped`."""
        try:
            return self._candidates.of(config, split)
        except StepError as error:
            self.dropped[(*config, *split.decisions())] = error
            if len(self._space.losses) > 1 and has_role(config, Role.LOSS):
                raise _ChunksRefusedError(with_roles(config, Role.UPDATE_TIME)) from error
            return None

    def _bounded_configs(self) -> Iterator[tuple[Config, int]]:
        """Yields all configurations in order, each with a lower bound in bytes on its plans' peaks."""
        return ((config, self._bounds.lower_bound_bytes(config)) for config in self.configurations)

    # ---- bounds -------------------------------------------------------------------------------------------------

    def _limit_ns(self, config: Config, found: list[Choice], above_ns: float) -> float:
        """Returns the step time in nanoseconds below which a plan of this configuration may win against `found`.

        A plan that is more faithful than all in `found` wins unless it is slower than the fastest by more than a tie.
        Any other plan has to be faster by more than a tie.
        """
        if not found:
            return above_ns
        fastest_ns = min(choice.step_ns for choice in found)
        more_faithful = fidelity_of(config) < min(choice.rank[0] for choice in found)
        return min(above_ns, fastest_ns * TIE if more_faithful else fastest_ns / TIE)

    def _bound_ns(self, config: Config) -> int:
        """Returns a lower bound in nanoseconds on the step time of this configuration's plans, without a new recording.

        A simpler configuration lacks some of the decisions that may save time. If it has been recorded, its step time
        minus the maximum time that these decisions can save is a bound. So is the baseline's step time minus that
        maximum, if the configuration has the baseline's precision. The largest bound is returned.
        """
        bounds = [0]
        if not has_role(config, Role.PRECISION):
            bounds.append(self._bounds.step_ns - self._bounds.most_saved_ns(config, self._bounds.optimizer_ns))
        for roles in _SUBSETS:
            left_out = with_roles(config, *roles)
            simpler = without_roles(config, *roles)
            if left_out and (candidate := self._candidates.get(simpler, self._space.splits[0])) is not None:
                bounds.append(candidate.step_ns - self._bounds.most_saved_ns(left_out, candidate.optimizer_ns))
        return max(bounds)

    def _simpler(self, config: Config) -> Config:
        """Returns `config` with the baseline's optimizer and update. Its plans give lower bounds for `config`."""
        return without_roles(config, Role.OPTIMIZER, Role.UPDATE_TIME)

    def _may_be_faster(self, config: Config, budget_bytes: int, limit_ns: float) -> bool:
        """Returns False if it is proven that no plan of `config` fits in less than `limit_ns`. True proves nothing.

        This is decided without a recording of `config`, from the candidates of the simpler configuration (`_simpler`).
        If the bytes that the update of `config` saves are subtracted from their memory, their integer program is a
        relaxation of the program of `config`.
        """
        simpler, update = self._simpler(config), self._bounds.update_memory_bound(config)
        if simpler == config:
            return True
        for number, split in enumerate(self.configurations.splits(config)):
            # Only the first split is recorded for this question. Others are used if they have been recorded.
            candidate = self._candidates.get(simpler, split) if number else self._bounding(simpler, split)
            if candidate is None:
                return True
            below_ns = None
            if not math.isinf(limit_ns):
                saved_ns = self._bounds.saved_by_update_ns(config, candidate.optimizer_ns)
                below_ns = math.floor(limit_ns) - (candidate.step_ns - saved_ns)
                if below_ns <= 0:
                    return False  # and later splits take even longer
            recompute = not self.configurations.could_use_chunks(config)  # as in `_fastest_of`
            if candidate.may_fit_with(update, budget_bytes, below_ns=below_ns, recompute=recompute):
                return True
        return False

    def _probably_fits(self, config: Config, budget_bytes: int) -> bool:
        """Returns True if `config` probably fits without recompute, by a recording with its precision alone."""
        simpler, splits = without_roles(self._simpler(config), Role.LOSS), self.configurations.splits(config)
        candidate = self._candidates.get(simpler, splits[0]) if splits else None
        if candidate is None or not candidate.has_update:
            return False
        update, in_chunks = self._bounds.update_memory_bound(config), has_role(config, Role.LOSS)
        update = dataclasses.replace(update, counts_logits=not in_chunks)
        return candidate.may_fit_with(update, budget_bytes, below_ns=None, recompute=False)

    def _bounding(self, simpler: Config, split: MicroBatching) -> Candidate | None:
        """Returns the candidate of `simpler`; None if it is not in the search space or cannot be rehearsed."""
        if simpler in self._without_bound or simpler not in self.configurations:
            return None
        try:
            return self._candidates.of(simpler, split)
        except StepError:  # the error is reported when the simpler configuration itself is tried
            self._without_bound.add(simpler)
            return None

    # ---- one configuration, one candidate -----------------------------------------------------------------------

    def _fastest_of(self, config: Config, budget_bytes: int, limit_ns: float) -> list[Choice]:
        """Returns a list with the fastest plan of one configuration; an empty list if no plan fits and can win."""
        splits = self.configurations.splits(config)
        tight: list[Candidate] = []
        best: list[Choice] = []
        # Without recompute: the first split that fits is the fastest, since more micro-batches take more time.
        for split in splits:
            candidate = self._candidate(config, split)
            if candidate is None:
                continue
            if candidate.step_ns >= limit_ns:
                break
            if candidate.peak_bytes <= budget_bytes:
                best = self._without_recompute(candidate, budget_bytes)
                break
            never_fits = not (tight or self._is_hopeful) and candidate.lower_bound_bytes > budget_bytes
            if never_fits and self._is_hopeless(budget_bytes):
                return []
            tight.append(candidate)
            self._prefetcher.all_splits(config, splits)
        # With recompute: splits with fewer micro-batches, if recompute costs less than more micro-batches do.
        for candidate in () if self.configurations.could_use_chunks(config) else filter(Candidate.can_free, tight):
            limit_ns = min([limit_ns, *(choice.step_ns for choice in best)])
            if candidate.step_ns >= limit_ns:
                break
            below_ns = None if math.isinf(limit_ns) else math.floor(limit_ns) - candidate.step_ns
            if (selection := self._solve(candidate, budget_bytes, below_ns)) is not None:
                best = [candidate.choice(selection)]
        return best

    def _without_recompute(self, candidate: Candidate, budget_bytes: int) -> list[Choice]:
        """Returns the plan of a candidate that fits without recompute; if recompute is forced, with one unit."""
        if not self._force_recompute:
            return [candidate.choice(candidate.without_units())]
        selection = candidate.cheapest_single(budget_bytes)
        return [] if selection is None else [candidate.choice(selection)]

    def _solve(self, candidate: Candidate, budget_bytes: int, below_ns: int | None) -> Selection | None:
        try:
            return self._timed(lambda: candidate.cheapest(budget_bytes, below_ns=below_ns))
        except milp.SearchTimeout:
            self.undecided += 1
            return None

    def _smallest_of(self, candidate: Candidate, most_bytes: float) -> Choice | None:
        """Returns the choice with the smallest peak of a candidate; None if its peak is above `most_bytes`."""
        if not candidate.can_free():
            return candidate.choice(candidate.without_units())
        selection = self._timed(lambda: candidate.smallest(most_bytes=most_bytes))
        return None if selection is None else candidate.choice(selection)

    def _timed(self, function: Callable[[], T]) -> T:
        began = time.perf_counter()
        try:
            return function()
        finally:
            self.solve_seconds += time.perf_counter() - began
