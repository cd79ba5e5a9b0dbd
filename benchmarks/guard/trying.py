"""One case: how far its parts are off, measured in double precision, and what the guard says of it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
from collections.abc import Iterator
from typing import Any, Literal

import torch

from benchmarks.guard.losses import Case
from planner import profiles, rewrite
from planner.errors import DecisionError
from planner.pipeline import plan_workload
from planner.plan_types.constraints import Constraints
from planner.plan_types.decisions import Accumulation, Decision, Fidelity, Precision
from planner.plan_types.plan import Plan
from planner.rewrite.accumulation_check import coupling_check
from planner.rewrite.accumulation_check.gradient_probe import GradientProbe, ProbeResult
from planner.rewrite.application import apply_decisions
from planner.workload.call_convention import Calling
from planner.workload.workload import map_batch, workload

Seen = Literal["refused", "told", "nothing"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    case: str
    dtype: str
    size: int
    """Samples of a micro-batch."""
    off: float
    """The gradient of the micro-batches by their weights from that of the batch, of its norm, in fp64: the largest of
    the first batches."""
    seen: Seen
    """In all the batches."""
    at: int
    """In which batch that was; 0: in none."""
    compared: float | None
    """How far off gradients were in a trial, at most; None where none were compared."""


def plan_of(case: Case) -> Plan:
    """Of the step as it is."""
    torch.manual_seed(0)
    work = workload(case.build(), case.batch(), loss_fn=case.loss_fn, optimizer="sgd")
    constraints = Constraints(fidelity=Fidelity.PARTIAL, forced=(), forbidden=())
    return plan_workload(work, profiles.bare(), vram_bytes=None, constraints=constraints)


def outcomes(
    case: Case, plan: Plan, *, seed: int, sizes: tuple[int, ...], dtypes: tuple[str, ...], trains: bool, batches: int
) -> Iterator[Outcome]:
    """What comes of each way to split so many batches.

    Args:
        trains: whether the truth is taken in training mode; without it random numbers are out of the way.
    """
    torch.manual_seed(seed)
    model, given = case.build(), [case.batch() for _ in range(batches)]
    held = given[:_HELD]
    whole = [_gradient(case, plan, model, batch, None, trains) for batch in held]
    if not all(gradient.isfinite().all() for gradient in whole):
        raise ValueError("the gradient of the batch is no number")
    for size in sizes:
        split = Accumulation(micro_batch_size=size, micro_batches=-(-plan.workload.batch_size // size))
        off = max(
            _off(_gradient(case, plan, model, batch, split, trains), right)
            for batch, right in zip(held, whole, strict=True)
        )
        for dtype in dtypes:
            lower = () if dtype == "fp32" else (Precision(dtype=dtype),)
            seen = _seen(case, plan, copy.deepcopy(model), given, (split, *lower))
            yield Outcome(case.name, dtype, size, off, *seen)


_HELD = 3
"""Batches in which the truth is taken: one may be split into parts that weigh the same by chance."""


def _off(gradient: torch.Tensor, right: torch.Tensor) -> float:
    size = max(float(right.norm()), float(gradient.norm()))
    off = float((gradient - right).norm()) / size if size else 0.0
    return math.inf if math.isnan(off) else off


def _gradient(
    case: Case, plan: Plan, model: torch.nn.Module, batch: Any, split: Accumulation | None, trains: bool
) -> torch.Tensor:
    """By the step that is applied without a guard: what a descent of 1 takes off each parameter, in fp64."""
    model = copy.deepcopy(model).double().train(trains)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    result = apply_decisions(
        () if split is None else (split,),
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        calling=Calling[plan.workload.calling],
        batch_size=plan.workload.batch_size,
        loss_fn=case.loss_fn,
    )
    torch.manual_seed(0)
    result.step(map_batch(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, batch))
    return torch.cat([(b - p.detach()).flatten() for b, p in zip(before, model.parameters(), strict=True)])


def _seen(
    case: Case, plan: Plan, model: torch.nn.Module, batches: list[Any], decisions: tuple[Decision, ...]
) -> tuple[Seen, int, float | None]:
    """Nothing is trained between the batches, so that what is right stays so."""
    plan = dataclasses.replace(plan, decisions=decisions)
    result = rewrite.apply(plan, model.train(), torch.optim.SGD(model.parameters(), lr=0.0), loss_fn=case.loss_fn)
    seen: tuple[Seen, int] = "nothing", 0
    with _listening() as (compared, told):
        for number, batch in enumerate(batches, 1):
            try:
                result.step(batch)
            except DecisionError:
                seen = "refused", number
                break
            if told and seen[0] == "nothing":
                seen = "told", number
    return *seen, max((tried.error for tried in compared if tried is not None), default=None)


@contextlib.contextmanager
def _listening() -> Iterator[tuple[list[ProbeResult | None], list[str]]]:
    """To the gradients that are compared, and to what is told."""
    compared: list[ProbeResult | None] = []
    told: list[str] = []

    class Listened(GradientProbe):
        def compare_gradients(self, *args: Any, **options: Any) -> ProbeResult | None:
            compared.append(super().compare_gradients(*args, **options))
            return compared[-1]

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    logger, handler = logging.getLogger("planner.rewrite"), Told(level=logging.WARNING)
    logger.addHandler(handler)
    coupling_check.GradientProbe = Listened
    try:
        yield compared, told
    finally:
        coupling_check.GradientProbe = GradientProbe
        logger.removeHandler(handler)
