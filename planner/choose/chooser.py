"""Finds the fastest plan whose promised peak is inside a budget: branch and bound over configurations.

A plan has three levels. A *configuration* (precision, loss, optimizer, time of the update) and a *split* of the batch
make a candidate; on top, *units* are recomputed or offloaded. The first two levels have few alternatives, which are
enumerated. The third is an integer program for each candidate (`search.milp`).

1. Configurations are tried in the order of `_configs`: the fastest precision first, so that its time prunes the others.
2. Before a candidate is recorded, lower bounds of its time are known: from the baseline, and from simpler candidates
   (with the original optimizer, without chunks), minus the maximum time that the difference can save. A candidate that
   cannot beat the best plan so far is neither recorded nor solved. A lower bound of memory (`Bounds.lower_bound_bytes`)
   prunes likewise.
3. For one configuration, splits are tried from few micro-batches to many, until one fits without recompute. Its time
   bounds what recompute may cost with fewer micro-batches, which the integer program then minimizes.

Times within the factor `TIE` count as equal; among equally fast plans the more faithful wins, then the simpler.

Where it is not exact: times are predictions, a program that hits its time limit is treated as if nothing fits
(`undecided`), and if chunks are available, a loss without chunks is tried with the whole batch only.
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
from planner.choose.choice import Choice, Config
from planner.choose.prefetcher import Prefetcher, with_upcoming
from planner.errors import DecisionError, PlannerError
from planner.plan_types.decision_base import (
    Decision,
    Role,
    conflict,
    fidelity_of,
    has_role,
    with_roles,
    without_roles,
)
from planner.search import milp
from planner.search.problem import Selection
from planner.space.micro_batches import MicroBatching
from planner.space.search_space import SearchSpace

TIE = 1.05
"""Factor between predicted step times below which two plans count as equally fast."""


Budget = Callable[[Config], int]
"""A configuration -> maximum number of bytes that its plans may promise."""

_SAVING = (Role.OPTIMIZER, Role.LOSS, Role.UPDATE_TIME)
"""Roles of decisions that may save time."""
_SUBSETS = tuple(itertools.chain.from_iterable(itertools.combinations(_SAVING, n) for n in (1, 2, 3)))
"""The roles in which a configuration may differ from a simpler one that bounds its time."""

T = TypeVar("T")


class _ChunksRefusedError(Exception):
    """The step cannot be rehearsed with its loss in chunks at this time of the update."""

    def __init__(self, update: Config) -> None:
        super().__init__(update)
        self.update = update


class Chooser:
    """Chooses among the plans of one search space, for any budget."""

    def __init__(
        self,
        space: SearchSpace,
        candidates: ChunkedCandidates,
        bounds: Bounds,
        certificates: Certificates,
        *,
        force_recompute: bool,
        slowest_ns: float = math.inf,
    ) -> None:
        """
        Args:
            force_recompute: True if every plan has to recompute or offload at least one unit.
            slowest_ns: maximum step time of a plan.
        """
        self._space, self._candidates, self._bounds = space, candidates, bounds
        self._prefetcher = Prefetcher(candidates, certificates)
        self._force_recompute = force_recompute
        self._above_ns = slowest_ns if math.isinf(slowest_ns) else math.floor(slowest_ns) + 1
        """Step time in ns from which a plan is too slow."""
        self.solve_seconds = 0.0
        self.dropped: dict[tuple[Decision, ...], PlannerError] = {}
        """The error of each configuration with a split that could not be rehearsed."""
        self._unchunked: set[Config] = set()
        """Decisions about the time of the update with which the loss cannot be computed in chunks."""
        self._without_bound: set[Config] = set()
        """Simpler configurations that could not be rehearsed, and therefore give no bounds for others."""
        self.undecided = 0
        """Number of integer programs that hit their time limit without an answer."""

    def fastest(self, budget: int | Budget, *, below_ns: float = math.inf) -> Choice | None:
        """The fastest choice whose promised peak is inside the budget; None if there is none.

        Args:
            budget: in bytes, for all configurations or by configuration.
            below_ns: only plans that take less time count.
        """
        budget_of = budget if callable(budget) else lambda config: budget
        return self._or_without_chunks(lambda: self._fastest(budget_of, min(self._above_ns, below_ns)))

    def smallest(self) -> Choice:
        """The choice with the smallest promised peak. Candidates that cannot beat the best choice are not solved."""
        return self._or_without_chunks(self._smallest)

    def _or_without_chunks(self, search: Callable[[], T]) -> T:
        """Run the search, and run it again if it turns out that the loss cannot be computed in chunks.

        While chunks are available, fewer splits are tried without chunks. The second search tries all splits.
        """
        while True:
            try:
                return search()
            except _ChunksRefusedError as refused:
                if refused.update in self._unchunked:
                    raise
                self._unchunked.add(refused.update)

    def _fastest(self, budget_of: Budget, above_ns: float) -> Choice | None:
        found: list[Choice] = []
        within = (config for config, least_bytes in self._bounded_configs() if least_bytes <= budget_of(config))
        for number, (config, *upcoming) in enumerate(with_upcoming(within)):
            # Prune by time: what is known already may show that this configuration cannot win.
            limit_ns = self._limit_ns(config, found, above_ns)
            if self._bound_ns(config) >= limit_ns:
                continue
            # The first configuration often fits unchanged. If it did not, those that follow will be needed too.
            several = number > 0 and not found
            if several:
                self._prefetcher.several((self._simpler(soon), self._splits(soon)) for soon in (config, *upcoming))
            if self._could_pay(config, budget_of(config), limit_ns):
                if several:
                    self._prefetcher.first_split(config, self._splits(config))
                else:
                    self._prefetcher.with_certificate(config, self._splits(config))
                choices = self._fastest_of(config, budget_of(config), limit_ns)
                found += [dataclasses.replace(choice, config=config) for choice in choices if choice.step_ns < above_ns]
        if not found:
            return None
        # Among those within a tie of the fastest, the most faithful and simplest.
        fastest_ns = min(choice.step_ns for choice in found)
        return min((choice for choice in found if choice.step_ns <= TIE * fastest_ns), key=lambda choice: choice.rank)

    def _smallest(self) -> Choice:
        configs = sorted(
            (bounded for bounded in self._bounded_configs() if not self._has_better(bounded[0])),
            key=lambda bounded: bounded[1],
        )
        found: list[Choice] = []

        def smallest_bytes() -> float:
            return min((choice.peak_bytes for choice in found), default=math.inf)

        for window in with_upcoming(configs):
            config, least_bytes = window[0]
            self._prefetcher.smallest(
                (soon, self._splits_to_the_smallest(soon))
                for soon, least_soon in window
                if least_soon < smallest_bytes()
            )
            for split in self._splits_to_the_smallest(config):
                if least_bytes >= smallest_bytes():
                    continue
                candidate = self._candidate(config, split)
                if candidate is not None and candidate.lower_bound_bytes < smallest_bytes():
                    found.append(dataclasses.replace(self._smallest_of(candidate), config=config))
        if not found:
            raise next(iter(self.dropped.values()), DecisionError(f"no plan is possible: {self._clash()}"))
        if self._force_recompute and not any(candidate.units.units for candidate in self._candidates.all()):
            raise DecisionError(
                f"{self._space.recompute[0].kind} is forced, but it cannot be applied to any module of this model: "
                "do not force it"
            )
        return min(found, key=lambda choice: (choice.peak_bytes, choice.step_ns))

    def _splits_to_the_smallest(self, config: Config) -> tuple[MicroBatching, ...]:
        """The splits one of which has the smallest peak.

        With recompute, the splits with the fewest and the most micro-batches are enough. Without recompute, a split
        between the two may have the smallest peak: accumulation keeps gradients, but reduces activations.
        """
        splits = self._splits(config)
        return tuple(dict.fromkeys(splits[-1:] + splits[:1])) if self._space.recompute else splits[::-1]

    def _candidate(self, config: Config, split: MicroBatching) -> Candidate | None:
        """Returns the candidate; None if its step cannot be rehearsed. The error is kept in `dropped`."""
        try:
            return self._candidates.of(config, split)
        except PlannerError as error:
            self.dropped[(*config, *split.decisions())] = error
            if len(self._space.losses) > 1 and has_role(config, Role.LOSS):
                raise _ChunksRefusedError(_update_of(config)) from error
            return None

    # ---- configurations -----------------------------------------------------------------------------------------

    def _configs(self) -> Iterator[Config]:
        """All configurations in the order in which they are tried.

        The fastest precision comes first, so that its time prunes the others, and simple optimizers before 8-bit ones.
        """
        for optimizer, update in itertools.product(self._space.optimizers, self._space.updates):
            for precision, loss in itertools.product(reversed(self._space.precisions), self._space.losses):
                config = (*precision, *loss, *optimizer, *update)
                if conflict(config) is None and not (loss and update in self._unchunked):
                    yield config

    def _bounded_configs(self) -> Iterator[tuple[Config, int]]:
        """All configurations in the same order, each with the lower bound of its plans' peaks in bytes."""
        return ((config, self._bounds.lower_bound_bytes(config)) for config in self._configs())

    def _clash(self) -> str | None:
        """The reason why no combination of the forced decisions is possible; None if there is no such reason."""
        space = self._space
        alternatives = itertools.product(space.optimizers, space.updates, space.precisions, space.losses)
        pairs = itertools.product((tuple(itertools.chain(*parts)) for parts in alternatives), space.splits)
        return next(filter(None, (conflict((*config, *split.decisions())) for config, split in pairs)), None)

    def _splits(self, config: Config) -> tuple[MicroBatching, ...]:
        """The splits with which a configuration is tried.

        If chunks are available, a configuration without chunks is tried with the whole batch only, because chunks save
        more memory than micro-batches and cost less time.
        """
        whole_only = self._has_better(config)
        return tuple(
            split
            for split in (self._space.splits[:1] if whole_only else self._space.splits)
            if conflict((*config, *split.decisions())) is None
        )

    def _has_better(self, config: Config) -> bool:
        """True if the same configuration with its loss in chunks is available."""
        chunked = has_role(config, Role.LOSS)
        return len(self._space.losses) > 1 and not chunked and _update_of(config) not in self._unchunked

    # ---- bounds -------------------------------------------------------------------------------------------------

    def _limit_ns(self, config: Config, found: list[Choice], above_ns: float) -> float:
        """Step time from which plans of this configuration cannot win: equally fast plans must be more faithful."""
        if not found:
            return above_ns
        fastest_ns = min(choice.step_ns for choice in found)
        more_faithful = fidelity_of(config) < min(choice.rank[0] for choice in found)
        return min(above_ns, fastest_ns * TIE if more_faithful else fastest_ns / TIE)

    def _bound_ns(self, config: Config) -> int:
        """Lower bound of the time of every plan of this configuration, from what is known already.

        A simpler configuration lacks some decisions that may save time. Its time, minus the maximum time that these
        decisions can save, is a bound. The baseline's time is a bound for configurations in the same precision.
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
        """The configuration with the baseline's update after the backward: its candidate bounds other updates."""
        return without_roles(config, Role.OPTIMIZER, Role.UPDATE_TIME)

    def _could_pay(self, config: Config, budget_bytes: int, limit_ns: float) -> bool:
        """True if another update, or a step in backward, may be useful; False is certain.

        It is decided with the candidates of the simpler configuration: their program without the bytes that the update
        saves is a relaxation.
        """
        simpler, least = self._simpler(config), self._bounds.least_update(config)
        if simpler == config:
            return True
        for number, split in enumerate(self._splits(config)):
            # Only the first split is worth a recording.
            candidate = self._candidates.get(simpler, split) if number else self._bounding(simpler, split)
            if candidate is None:
                return True
            below_ns = None
            if not math.isinf(limit_ns):
                saved_ns = self._bounds.saved_by_update_ns(config, candidate.optimizer_ns)
                below_ns = math.floor(limit_ns) - (candidate.step_ns - saved_ns)
                if below_ns <= 0:
                    return False  # and later splits take even longer
            if self._has_better(config):
                below_ns = 1  # it is only tried without recompute
            state_bytes = None if least is None else least.state_bytes
            gradients = not any(decision.steps_in_backward for decision in config)
            if candidate.could_pay(budget_bytes, state_bytes=state_bytes, gradients=gradients, below_ns=below_ns):
                return True
        return False

    def _bounding(self, simpler: Config, split: MicroBatching) -> Candidate | None:
        """A candidate that bounds others; None if it is not in the search space, or cannot be rehearsed."""
        if simpler in self._without_bound or simpler not in self._configs():
            return None
        try:
            return self._candidates.of(simpler, split)
        except PlannerError:  # it is reported when this configuration itself is tried
            self._without_bound.add(simpler)
            return None

    # ---- one configuration, one candidate -----------------------------------------------------------------------

    def _fastest_of(self, config: Config, budget_bytes: int, limit_ns: float) -> list[Choice]:
        """Returns the best plan of one configuration; empty if none fits."""
        splits = self._splits(config)
        tight: list[Candidate] = []
        best: list[Choice] = []
        # Without recompute: the first split that fits is the fastest, since more micro-batches take more time.
        for split in splits:
            if tight:
                self._prefetcher.all_splits(config, splits)
            candidate = self._candidate(config, split)
            if candidate is None:
                continue
            if candidate.step_ns >= limit_ns:
                break
            if candidate.peak_bytes <= budget_bytes:
                best = self._without_recompute(candidate, budget_bytes)
                break
            tight.append(candidate)
        # With recompute: splits with fewer micro-batches, if recompute costs less than more micro-batches do.
        for candidate in tight if self._space.recompute and not self._has_better(config) else ():
            limit_ns = min([limit_ns, *(choice.step_ns for choice in best)])
            if candidate.step_ns >= limit_ns:
                break
            below_ns = None if math.isinf(limit_ns) else math.floor(limit_ns) - candidate.step_ns
            if (selection := self._solve(candidate, budget_bytes, below_ns)) is not None:
                best = [_choice(candidate, selection)]
        return best

    def _without_recompute(self, candidate: Candidate, budget_bytes: int) -> list[Choice]:
        """The plan of a candidate that fits without recompute. If recompute is forced, it recomputes one unit."""
        if not self._force_recompute:
            return [_choice(candidate, _nothing(candidate))]
        selection = candidate.cheapest_single(budget_bytes)
        return [] if selection is None else [_choice(candidate, selection)]

    def _solve(self, candidate: Candidate, budget_bytes: int, below_ns: int | None) -> Selection | None:
        try:
            return self._timed(lambda: candidate.cheapest(budget_bytes, below_ns=below_ns))
        except milp.SearchTimeout:
            self.undecided += 1
            return None

    def _smallest_of(self, candidate: Candidate) -> Choice:
        return _choice(candidate, self._timed(candidate.smallest) if self._space.recompute else _nothing(candidate))

    def _timed(self, function: Callable[[], T]) -> T:
        began = time.perf_counter()
        try:
            return function()
        finally:
            self.solve_seconds += time.perf_counter() - began


def _update_of(config: Config) -> Config:
    return with_roles(config, Role.UPDATE_TIME)


def _nothing(candidate: Candidate) -> Selection:
    """The selection without any unit."""
    return Selection(units=(), peak_bytes=candidate.peak_bytes, cost_ns=0, status="optimal", gap=0.0, seconds=0.0)


def _choice(candidate: Candidate, selection: Selection) -> Choice:
    return Choice(
        decisions=candidate.decisions(selection.units),
        peak_bytes=selection.peak_bytes,
        step_ns=candidate.step_ns + selection.cost_ns,
        status=selection.status,
        gap=selection.gap * selection.cost_ns / (candidate.step_ns + selection.cost_ns),
    )
