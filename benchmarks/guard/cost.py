"""Measures the cost of the accumulation check: memory and time of steps with a check, compared with those without."""

from __future__ import annotations

import dataclasses
import time
import unittest.mock as mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.guard.losses import Case
from benchmarks.guard.trying import plan_of
from benchmarks.quality.counting import LiveBytes
from benchmarks.quality.models import GPT, Classifier
from planner import rewrite
from planner.plan_types.decisions import Accumulation, Decision, Precision
from planner.plan_types.recompute_decisions import Checkpoint
from planner.rewrite.accumulation_check import gradient_probe
from planner.rewrite.accumulation_check.coupling_check import _CHECKED_BATCHES
from planner.rewrite.accumulation_check.side_effects import _CopyOnWrite

STEPS = 7
SPLIT = {
    "16 x 1": (Accumulation(micro_batch_size=1, micro_batches=16),),
    "16 x 1, bf16": (Accumulation(micro_batch_size=1, micro_batches=16), Precision(dtype="bf16")),
    "8 x 2, checkpoints": (
        Accumulation(micro_batch_size=2, micro_batches=8),
        Checkpoint(modules=tuple(f"body.blocks.{number}" for number in range(6))),
    ),
    "6 x 3, checkpoints": (
        Accumulation(micro_batch_size=3, micro_batches=6),
        Checkpoint(modules=tuple(f"body.blocks.{number}" for number in range(6))),
    ),
    "4 x 4": (Accumulation(micro_batch_size=4, micro_batches=4),),
    "4 x 4, bf16": (Accumulation(micro_batch_size=4, micro_batches=4), Precision(dtype="bf16")),
}


@dataclasses.dataclass(frozen=True)
class Cost:
    """Memory and time of each step of one split."""

    split: str
    peaks: list[int]
    """Peak of each step in bytes, above the memory alive at its start."""
    seconds: list[float]

    def relative(self) -> list[tuple[int, float, float]]:
        """Returns (number, peak, time) of the checked steps, relative to the smallest of the unchecked ones."""
        unchecked = [number for number in range(1, STEPS + 1) if number not in _CHECKED_BATCHES]
        peak, seconds = (min(row[number - 1] for number in unchecked) for row in (self.peaks, self.seconds))
        checked = [number for number in _CHECKED_BATCHES if number <= STEPS]
        return [(number, self.peaks[number - 1] / peak, self.seconds[number - 1] / seconds) for number in checked]


def costs() -> Iterator[Cost]:
    """Yields the cost for each split."""
    case = Case("GPT", _build, lambda: tuple(torch.randint(0, 4096, (16, 128)) for _ in range(2)))
    plan = plan_of(case)
    for name, decisions in SPLIT.items():
        peaks = _of_steps(case, dataclasses.replace(plan, decisions=decisions), _peak_bytes)
        seconds = [
            min(row) for row in zip(*(_of_steps(case, _with(plan, decisions), _seconds) for _ in range(2)), strict=True)
        ]
        yield Cost(name, peaks, seconds)


def _build() -> torch.nn.Module:
    return Classifier(GPT(depth=6, width=256, heads=8, vocabulary=4096, length=128))


def _with(plan: Any, decisions: tuple[Decision, ...]) -> Any:
    return dataclasses.replace(plan, decisions=decisions)


def _of_steps(case: Case, plan: Any, measure: Callable[..., Any]) -> list[Any]:
    torch.manual_seed(0)
    model = case.build()
    result = rewrite.apply(plan, model, torch.optim.SGD(model.parameters(), lr=1e-3))
    return [measure(model, result.step, case.batch()) for _ in range(STEPS)]


def _peak_bytes(model: torch.nn.Module, step: Callable[[Any], torch.Tensor], batch: Any) -> int:
    """Returns the peak of a step, without what a check keeps in host memory, which is the same memory here.

    Those are copies of written tensors, and samples of gradients.
    """
    with (
        mock.patch.object(_CopyOnWrite, "_copy", _uncounted(_CopyOnWrite._copy)),
        mock.patch.object(gradient_probe, "_spread", lambda gradient, stride: gradient.sum().view(1)),
        LiveBytes([*model.parameters(), *model.buffers(), *batch]) as memory,
    ):
        step(batch)
    return memory.peak_bytes


def _uncounted(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with _disable_current_modes():
            return function(*arguments)

    return call


def _seconds(model: torch.nn.Module, step: Callable[[Any], torch.Tensor], batch: Any) -> float:
    began = time.perf_counter()
    step(batch)
    return time.perf_counter() - began
