"""Runs one case: the true error of its accumulated gradient, in double precision, and the check's verdict."""

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

Seen = Literal["refused", "warned", "nothing"]
"""Verdict of the check."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of one way to split the batches of a case."""

    case: str
    dtype: str
    size: int
    """Samples per micro-batch."""
    off: float
    """Largest relative error of the accumulated gradient against the whole batch's, in fp64, over the first batches."""
    seen: Seen
    """Verdict over all batches."""
    at: int
    """Number of the batch with the verdict; 0 if there was none."""
    compared: float | None
    """Largest relative error that the check itself found; None if it compared no gradients."""


def plan_of(case: Case) -> Plan:
    """Returns the plan of the baseline."""
    torch.manual_seed(0)
    work = workload(case.build(), case.batch(), loss_fn=case.loss_fn, optimizer="sgd")
    constraints = Constraints(fidelity=Fidelity.PARTIAL, forced=(), forbidden=())
    return plan_workload(work, profiles.bare(), vram_bytes=None, constraints=constraints)


def outcomes(
    case: Case, plan: Plan, *, seed: int, sizes: tuple[int, ...], dtypes: tuple[str, ...], trains: bool, batches: int
) -> Iterator[Outcome]:
    """Yields the outcome for each micro-batch size and dtype.

    Args:
        trains: True if the true gradient is taken in training mode. Evaluation mode avoids random numbers.
        batches: number of batches to train.
    """
    torch.manual_seed(seed)
    model, drawn = case.build(), [case.batch() for _ in range(batches)]
    held = drawn[:_HELD]
    whole = [_gradient(case, plan, model, batch, None, trains) for batch in held]
    if not all(gradient.isfinite().all() for gradient in whole):
        raise ValueError("the gradient of the whole batch is not finite")
    for size in sizes:
        split = Accumulation(micro_batch_size=size, micro_batches=-(-plan.workload.batch_size // size))
        off = max(
            _off(_gradient(case, plan, model, batch, split, trains), right)
            for batch, right in zip(held, whole, strict=True)
        )
        for dtype in dtypes:
            lower = () if dtype == "fp32" else (Precision(dtype=dtype),)
            seen = _seen(case, plan, copy.deepcopy(model), drawn, (split, *lower))
            yield Outcome(case.name, dtype, size, off, *seen)


_HELD = 3
"""Number of batches with a true gradient. More than one, as a batch may split into parts of equal weight by chance."""


def _off(gradient: torch.Tensor, right: torch.Tensor) -> float:
    """Returns the relative error of a gradient; infinity if it is not a number."""
    size = max(float(right.norm()), float(gradient.norm()))
    off = float((gradient - right).norm()) / size if size else 0.0
    return math.inf if math.isnan(off) else off


def _gradient(
    case: Case, plan: Plan, model: torch.nn.Module, batch: Any, split: Accumulation | None, trains: bool
) -> torch.Tensor:
    """Returns the gradient in fp64, as the change of the parameters by an unchecked SGD step with learning rate 1."""
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
    """Returns the verdict, its batch, and the largest error that the check found.

    The learning rate is 0, so that the parameters stay the same for all batches.
    """
    plan = dataclasses.replace(plan, decisions=decisions)
    result = rewrite.apply(plan, model.train(), torch.optim.SGD(model.parameters(), lr=0.0), loss_fn=case.loss_fn)
    seen: tuple[Seen, int] = "nothing", 0
    with _listening() as (compared, warnings):
        for number, batch in enumerate(batches, 1):
            try:
                result.step(batch)
            except DecisionError:
                seen = "refused", number
                break
            if warnings and seen[0] == "nothing":
                seen = "warned", number
    return *seen, max((probe.error for probe in compared if probe is not None), default=None)


@contextlib.contextmanager
def _listening() -> Iterator[tuple[list[ProbeResult | None], list[str]]]:
    """Collects the results of the gradient probes and the warnings that are logged inside the context."""
    compared: list[ProbeResult | None] = []
    warnings: list[str] = []

    class RecordedProbe(GradientProbe):
        def compare_gradients(self, *args: Any, **options: Any) -> ProbeResult | None:
            compared.append(super().compare_gradients(*args, **options))
            return compared[-1]

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    logger, handler = logging.getLogger("planner.rewrite"), Collector(level=logging.WARNING)
    logger.addHandler(handler)
    coupling_check.GradientProbe = RecordedProbe
    try:
        yield compared, warnings
    finally:
        coupling_check.GradientProbe = GradientProbe
        logger.removeHandler(handler)
