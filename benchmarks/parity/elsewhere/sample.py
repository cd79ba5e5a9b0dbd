"""A sample of the cases and techniques, and the comparison of two ways to train them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from benchmarks.parity.case import Case, default_dtype
from benchmarks.parity.judge import (
    DIFFERENT,
    EQUAL,
    ERROR,
    PLAIN_FAILS,
    REFUSED,
    ROUNDED,
    WARNED,
    Outcome,
    allowed,
    difference,
    first_line,
    listening,
)
from benchmarks.parity.models import cases
from benchmarks.parity.plain import Trained
from benchmarks.parity.techniques import Offer, Technique, offer
from planner.errors import PlannerError

NAMES = (
    "perceptron",
    "perceptron, adamw, clipping",
    "convolutions, group norm",
    "convolutions, batch norm",
    "transformer, by hand",
    "transformer, tied weights",
    "gru",
    "block called three times, adamw",
    "scheduler and clipping, groups",
    "transformers: gpt2",
    "transformers: llama, adamw",
    "transformers: bert",
    "loss: tokens, ignore_index",
    "loss: class weights",
)
"""Cases without random numbers, whose parameters all get a gradient."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A case and a technique to train it with. It can be sent to another process."""

    name: str
    offer: Offer
    technique: Technique

    @property
    def case(self) -> Case:
        return case_of(self.name)


def case_of(name: str) -> Case:
    """Returns the case with this name."""
    return next(case for case in cases() if case.name == name)


def jobs(names: Sequence[str], each: int, *, without: Sequence[str] = ()) -> Iterator[Job]:
    """Yields jobs with each case. For each case, the techniques that earlier cases used least are chosen.

    Args:
        each: number of techniques for a case.
        without: techniques to leave out.
    """
    taken: Counter[str] = Counter()
    for name in names:
        offered = offer(case_of(name))
        found = [technique for technique in offered.techniques if technique.name not in without]
        for technique in sorted(found, key=lambda technique: taken[technique.name])[:each]:
            taken[technique.name] += 1
            yield Job(name, offered, technique)


def outcome_of(
    job: Job, way: str, train: Callable[[], Trained], truth: Callable[[], Trained], *, others: bool = True,
    losses: bool = True,
) -> Outcome:  # fmt: skip
    """Train in two ways, and compare them.

    Args:
        train: trains with the plan.
        truth: trains by the plain loop.
        others: also compare buffers, optimizer state and attributes.
        losses: also compare the losses of the steps.
    """
    outcome = Outcome(job.name, job.technique.name, way, EQUAL)
    with default_dtype(job.technique.dtype_for(job.case)):
        with listening() as heard:
            try:
                found = train()
            except Exception as why:  # the table lists every error
                refuses = isinstance(why, PlannerError) or type(why).__name__ == "RecomputeDifference"
                note = f"{type(why).__name__}: {first_line(why)}"
                if not refuses:
                    try:
                        truth()
                    except Exception:  # the plain loop fails as well, so that the error is not the planner's
                        return dataclasses.replace(outcome, result=PLAIN_FAILS, note=note)
                return dataclasses.replace(outcome, result=REFUSED if refuses else ERROR, note=note)
        wanted = truth()
    if not losses:
        found, wanted = dataclasses.replace(found, losses=[]), dataclasses.replace(wanted, losses=[])
    if not others or job.technique.micro_batch_size is not None:  # attributes are those of the last micro-batch
        found, wanted = _without_attributes(found), _without_attributes(wanted)
    size, where = difference(wanted, found, others=others)
    if size == 0:
        return outcome
    if size <= allowed(job.case, job.technique):
        return dataclasses.replace(outcome, result=ROUNDED, size=size, note=where)
    # The Trainer's callback may warn about a promised peak, which does not explain a difference.
    warned = [message for message in heard if "promise" not in message]
    result = WARNED if warned else DIFFERENT
    return dataclasses.replace(outcome, result=result, size=size, note="; ".join([where, *warned[:1]]))


def _without_attributes(trained: Trained) -> Trained:
    others = {name: value for name, value in trained.others.items() if not name.startswith("attribute")}
    return dataclasses.replace(trained, others=others)
