"""The fastest plan that fits: outer choices by best bound first, checkpoints by the integer program for each.

A case without any recompute bounds the time of all its plans; what cannot beat the best plan found is never recorded
or solved. Plans whose times are within `TIE` count as equally fast; among them the more faithful, then the simpler.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from planner.choose.candidates import Candidate, ChunkedCandidates
from planner.choose.certificates import Certificates
from planner.errors import DecisionError, PlannerError
from planner.plan_types.decisions import (
    ChunkedLoss,
    Decision,
    Optimizer,
    OptimizerKernel,
    Precision,
    StepInBackward,
    conflict,
)
from planner.search import milp
from planner.search.problem import Selection
from planner.space.micro_batches import MicroBatching
from planner.space.outer_choices import SearchSpace

TIE = 1.05
"""Predicted times closer than this factor say nothing about which is faster."""

_AT_ONCE = max(2, min(os.cpu_count() or 2, 4))
"""Outer choices that are recorded at a time, where it is clear that they will be asked for."""

Budget = Callable[[tuple[Decision, ...]], int]
"""An outer choice -> bytes that its plans may promise."""

_SPARING = (Optimizer, OptimizerKernel, ChunkedLoss, StepInBackward)
_SUBSETS = tuple(itertools.chain.from_iterable(itertools.combinations(_SPARING, n) for n in (1, 2, 3)))
"""What may have been left out of a choice that is known, and what then bounds the time with it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to train, with what the program promises of it."""

    decisions: tuple[Decision, ...]
    peak_bytes: int
    step_ns: int
    status: str
    gap: float
    """Share of the step time by which another selection of units could at most be quicker."""
    outer: tuple[Decision, ...] = ()
    """The outer choice that it is a plan of, as offered."""

    @property
    def rank(self) -> tuple[int, int, int]:
        """Order among equally fast plans."""
        return fidelity_of(self.decisions), len(self.decisions), self.step_ns


class _ChunksRefusedError(Exception):
    """The step cannot be rehearsed with its loss in chunks and this kind of update."""

    def __init__(self, update: tuple[Decision, ...]) -> None:
        super().__init__(update)
        self.update = update


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeastUpdate:
    """What an update cannot go below, however its kernels are made."""

    ns: int
    """To move parameters, gradients and state through the card's memory once."""
    state_bytes: int | None
    """Of all that is trained; None: of the state as it is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """What the baseline says of other choices before they are recorded."""

    step_ns: int
    """No plan that keeps the precision is faster, but for its optimizer: the baseline's time, or its forward alone."""
    optimizer_ns: int
    loss_ns: int
    """Time of the baseline's ops that only move logits about: what a loss in chunks could at most spare."""
    updates: Mapping[type[Decision], LeastUpdate]
    """By the kind of decision that puts another update in the optimizer's place."""
    lower_bound_bytes: Callable[[tuple[Decision, ...]], int]
    """Of an outer choice: bytes that none of its plans goes below."""


class Chooser:
    """Chooses under one set of rules, for any budget."""

    def __init__(
        self,
        offer: SearchSpace,
        cases: ChunkedCandidates,
        bounds: Bounds,
        certificates: Certificates,
        *,
        force_recompute: bool,
        slowest_ns: float = math.inf,
    ) -> None:
        self._offer, self._cases, self._bounds, self._certificates = offer, cases, bounds, certificates
        self._force_recompute = force_recompute
        self._above_ns = slowest_ns if math.isinf(slowest_ns) else math.floor(slowest_ns) + 1
        """Plans that take so long are too slow, however few bytes they need."""
        self.solve_seconds = 0.0
        self.dropped: dict[tuple[Decision, ...], PlannerError] = {}
        """Choices, with their split, that could not be rehearsed, and why."""
        self._unchunked: set[tuple[Decision, ...]] = set()
        """Kinds of updates beside which the loss cannot be taken in chunks, although that is offered."""
        self._without_case: set[tuple[Decision, ...]] = set()
        """Choices that could not be rehearsed as bounds of others."""
        self.undecided = 0
        """Programs that hit their time limit without an answer."""

    def fastest(self, budget: int | Budget, *, below_ns: float = math.inf) -> Choice | None:
        """The fastest choice whose promised peak is inside the budget; None if there is none.

        Args:
            budget: in bytes, of all or by the outer choice.
            below_ns: only plans that take less.
        """
        budget_of = budget if callable(budget) else lambda outer: budget
        return self._or_without_chunks(lambda: self._fastest(budget_of, min(self._above_ns, below_ns)))

    def smallest(self) -> Choice:
        """The choice with the smallest promised peak; cases that cannot be smaller than the best are not solved."""
        return self._or_without_chunks(self._smallest)

    def _or_without_chunks(self, search: Callable[[], Any]) -> Any:
        """Where chunks are offered, less is tried without them: if the step then refuses them, all is tried again."""
        while True:
            try:
                return search()
            except _ChunksRefusedError as refused:
                if refused.update in self._unchunked:
                    raise
                self._unchunked.add(refused.update)

    def _fastest(self, budget_of: Budget, above_ns: float) -> Choice | None:
        found: list[Choice] = []
        outers = [outer for outer in self._outer_choices() if self._bounds.lower_bound_bytes(outer) <= budget_of(outer)]
        for number, outer in enumerate(outers):
            limit_ns = self._limit_ns(outer, found, above_ns)
            if self._bound_ns(outer) >= limit_ns:
                continue
            if number and not found:  # it will hardly be this one, and all that follow are looked at
                self._certificates.forget()
                for soon in outers[number : number + _AT_ONCE]:
                    self._cases.prefetch(self._simpler(soon), self._splits(soon)[:1])
            if self._could_pay(outer, budget_of(outer), limit_ns):
                if number and not found:
                    self._cases.prefetch(outer, self._splits(outer)[:1])
                else:
                    self._foresee(outer)
                choices = self._fastest_of(outer, budget_of(outer), limit_ns)
                found += [dataclasses.replace(one, outer=outer) for one in choices if one.step_ns < above_ns]
        if not found:
            return None
        quickest = min(choice.step_ns for choice in found)
        return min((choice for choice in found if choice.step_ns <= TIE * quickest), key=lambda choice: choice.rank)

    def _smallest(self) -> Choice:
        outers = sorted(
            (outer for outer in self._outer_choices() if not self._has_better(outer)),
            key=self._bounds.lower_bound_bytes,
        )
        found: list[Choice] = []
        for number, outer in enumerate(outers):
            smallest_bytes = min((choice.peak_bytes for choice in found), default=math.inf)
            for soon in outers[number : number + _AT_ONCE]:
                if self._bounds.lower_bound_bytes(soon) < smallest_bytes:
                    self._cases.prefetch(soon, self._splits_to_the_smallest(soon))
            for split in self._splits_to_the_smallest(outer):
                smallest_bytes = min((choice.peak_bytes for choice in found), default=math.inf)
                if self._bounds.lower_bound_bytes(outer) >= smallest_bytes:
                    continue
                case = self._case(outer, split)
                if case is not None and case.lower_bound_bytes < smallest_bytes:
                    found.append(dataclasses.replace(self._smallest_of(case), outer=outer))
        if not found:
            raise next(iter(self.dropped.values()), DecisionError(f"nothing is left to choose from: {self._clash()}"))
        if self._force_recompute and not any(case.units.units for case in self._cases.made()):
            raise DecisionError(
                f"{self._offer.recompute[0].kind} is forced, but nothing in this model can be recomputed so: "
                "do not force it"
            )
        return min(found, key=lambda choice: (choice.peak_bytes, choice.step_ns))

    def _splits_to_the_smallest(self, outer: tuple[Decision, ...]) -> tuple[MicroBatching, ...]:
        """Where recompute can follow, the extremes are enough; without it gradients and halves may tip the scale."""
        splits = self._splits(outer)
        return tuple(dict.fromkeys(splits[-1:] + splits[:1])) if self._offer.recompute else splits[::-1]

    def _case(self, outer: tuple[Decision, ...], split: MicroBatching) -> Candidate | None:
        """The case, or None if the step cannot be rehearsed so; then the reason is kept."""
        try:
            return self._cases.of(outer, split)
        except PlannerError as error:
            self.dropped[(*outer, *split.decisions())] = error
            if len(self._offer.losses) > 1 and any(isinstance(decision, ChunkedLoss) for decision in outer):
                raise _ChunksRefusedError(_update_of(outer)) from error
            return None

    # ---- outer choices ------------------------------------------------------------------------------------------

    def _outer_choices(self) -> Iterator[tuple[Decision, ...]]:
        """The quickest precision first, so that its time prunes the others; simple optimizers before 8-bit ones."""
        for optimizer, update in itertools.product(self._offer.optimizers, self._offer.updates):
            for precision, loss in itertools.product(reversed(self._offer.precisions), self._offer.losses):
                outer = (*precision, *loss, *optimizer, *update)
                if conflict(outer) is None and not (loss and update in self._unchunked):
                    yield outer

    def _clash(self) -> str | None:
        """Why what is offered cannot be done together."""
        offer = self._offer
        chosen = itertools.product(offer.optimizers, offer.updates, offer.precisions, offer.losses)
        pairs = itertools.product((tuple(itertools.chain(*kinds)) for kinds in chosen), offer.splits)
        return next(filter(None, (conflict((*outer, *split.decisions())) for outer, split in pairs)), None)

    def _splits(self, outer: tuple[Decision, ...]) -> tuple[MicroBatching, ...]:
        """Where the loss could be taken in chunks, without them only the batch as it is: chunks spare more for less."""
        whole_only = self._has_better(outer)
        return tuple(
            split
            for split in (self._offer.splits[:1] if whole_only else self._offer.splits)
            if conflict((*outer, *split.decisions())) is None
        )

    def _has_better(self, outer: tuple[Decision, ...]) -> bool:
        chunked = any(isinstance(decision, ChunkedLoss) for decision in outer)
        return len(self._offer.losses) > 1 and not chunked and _update_of(outer) not in self._unchunked

    def _limit_ns(self, outer: tuple[Decision, ...], found: list[Choice], above_ns: float) -> float:
        """Plans of this outer choice that take longer are of no use: a tie is one only if it is more faithful."""
        if not found:
            return above_ns
        quickest = min(choice.step_ns for choice in found)
        more_faithful = fidelity_of(outer) < min(choice.rank[0] for choice in found)
        return min(above_ns, quickest * TIE if more_faithful else quickest / TIE)

    def _bound_ns(self, outer: tuple[Decision, ...]) -> int:
        """Time that no plan of this outer choice can go below, from what is known already."""
        bounds = [0]
        if not any(isinstance(decision, Precision) for decision in outer):
            bounds.append(self._bounds.step_ns - self._most_spared_ns(outer, self._bounds.optimizer_ns))
        for kinds in _SUBSETS:
            left_out = tuple(decision for decision in outer if isinstance(decision, kinds))
            simpler = tuple(decision for decision in outer if decision not in left_out)
            if left_out and (case := self._cases.known(simpler, self._offer.splits[0])) is not None:
                bounds.append(case.step_ns - self._most_spared_ns(left_out, case.optimizer_ns))
        return max(bounds)

    def _most_spared_ns(self, decisions: tuple[Decision, ...], optimizer_ns: int) -> int:
        """By these, at most, of a step whose optimizer takes this long."""
        chunked = any(isinstance(decision, ChunkedLoss) for decision in decisions)
        return self._spared_ns(decisions, optimizer_ns) + chunked * self._bounds.loss_ns

    def _spared_ns(self, decisions: tuple[Decision, ...], optimizer_ns: int) -> int:
        """At most, by the update that they put in the place of one that takes this long."""
        least = self._least_update(decisions)
        return 0 if least is None else max(optimizer_ns - least.ns, 0)

    def _least_update(self, decisions: tuple[Decision, ...]) -> LeastUpdate | None:
        updates = self._bounds.updates
        return next((updates[type(decision)] for decision in decisions if type(decision) in updates), None)

    def _simpler(self, outer: tuple[Decision, ...]) -> tuple[Decision, ...]:
        """The outer choice with the update as it is, after the backward: its case bounds those of other updates."""
        return tuple(d for d in outer if type(d) not in self._bounds.updates and not isinstance(d, StepInBackward))

    def _could_pay(self, outer: tuple[Decision, ...], budget_bytes: int, limit_ns: float) -> bool:
        """Whether another update, or a step in backward, can be of use; True if the cases without do not tell."""
        simpler, least = self._simpler(outer), self._least_update(outer)
        if simpler == outer:
            return True
        for number, split in enumerate(self._splits(outer)):
            case = self._cases.known(simpler, split) if number else self._bounding(simpler, split)
            if case is None:
                return True
            below_ns = None
            if not math.isinf(limit_ns):
                below_ns = math.floor(limit_ns) - (case.step_ns - self._spared_ns(outer, case.optimizer_ns))
                if below_ns <= 0:
                    return False  # and later splits take longer still
            if self._has_better(outer):
                below_ns = 1  # only as it is, without recompute
            state_bytes = None if least is None else least.state_bytes
            gradients = not any(isinstance(decision, StepInBackward) for decision in outer)
            if case.could_pay(budget_bytes, state_bytes=state_bytes, gradients=gradients, below_ns=below_ns):
                return True
        return False

    def _bounding(self, simpler: tuple[Decision, ...], split: MicroBatching) -> Candidate | None:
        """A case that others are bounded by; None if it is not offered, or cannot be rehearsed."""
        if simpler in self._without_case or simpler not in self._outer_choices():
            return None
        try:
            return self._cases.of(simpler, split)
        except PlannerError:  # told when it is looked at for itself
            self._without_case.add(simpler)
            return None

    def _fastest_of(self, outer: tuple[Decision, ...], budget_bytes: int, limit_ns: float) -> list[Choice]:
        """The best plan of one outer choice: first without recompute, which then bounds what recompute may cost."""
        splits = self._splits(outer)
        tight: list[Candidate] = []
        best: list[Choice] = []
        for split in splits:
            if tight:
                self._certificates.forget()  # it needs more than this choice, and the cores are wanted
                self._cases.prefetch(outer, splits)
            case = self._case(outer, split)
            if case is None:
                continue
            if case.step_ns >= limit_ns:
                break
            if case.peak_bytes <= budget_bytes:
                best = self._unchanged(case, budget_bytes)
                break
            tight.append(case)
        for case in tight if self._offer.recompute and not self._has_better(outer) else ():
            limit_ns = min([limit_ns, *(choice.step_ns for choice in best)])
            if case.step_ns >= limit_ns:
                break
            below_ns = None if math.isinf(limit_ns) else math.floor(limit_ns) - case.step_ns
            if (selection := self._solve(case, budget_bytes, below_ns)) is not None:
                best = [_choice(case, selection)]
        return best

    def _foresee(self, outer: tuple[Decision, ...]) -> None:
        """Record it as it is, and certify it beside: it may be all that is needed."""
        for split in self._splits(outer)[:1]:
            if self._cases.known(outer, split) is None:
                self._cases.prefetch(outer, (split,))
                self._certificates.foresee((*self._cases.outer(outer, split), *split.decisions()))

    # ---- one case -----------------------------------------------------------------------------------------------

    def _unchanged(self, case: Candidate, budget_bytes: int) -> list[Choice]:
        """The case fits as it is; where recompute is forced it gets its cheapest unit."""
        if not self._force_recompute:
            return [_choice(case, _nothing(case))]
        selection = case.cheapest_single(budget_bytes)
        return [] if selection is None else [_choice(case, selection)]

    def _solve(self, case: Candidate, budget_bytes: int, below_ns: int | None) -> Selection | None:
        try:
            return self._timed(lambda: case.cheapest(budget_bytes, below_ns=below_ns))
        except milp.SearchTimeout:
            self.undecided += 1
            return None

    def _smallest_of(self, case: Candidate) -> Choice:
        return _choice(case, self._timed(case.smallest) if self._offer.recompute else _nothing(case))

    def _timed(self, function: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        try:
            return function()
        finally:
            self.solve_seconds += time.perf_counter() - began


def fidelity_of(decisions: tuple[Decision, ...]) -> int:
    """The least faithful decision decides."""
    return max((decision.fidelity for decision in decisions), default=0)


def _update_of(outer: tuple[Decision, ...]) -> tuple[Decision, ...]:
    return tuple(decision for decision in outer if isinstance(decision, StepInBackward))


def _nothing(case: Candidate) -> Selection:
    return Selection(units=(), peak_bytes=case.peak_bytes, cost_ns=0, status="optimal", gap=0.0, seconds=0.0)


def _choice(case: Candidate, selection: Selection) -> Choice:
    return Choice(
        decisions=case.decisions(selection.units),
        peak_bytes=selection.peak_bytes,
        step_ns=case.step_ns + selection.cost_ns,
        status=selection.status,
        gap=selection.gap * selection.cost_ns / (case.step_ns + selection.cost_ns),
    )
