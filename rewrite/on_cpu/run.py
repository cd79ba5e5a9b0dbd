"""The result of training with a plan on the CPU."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from planner.plan_types.sizes import format_size
from planner.rewrite.on_cpu.allocations import MeasuredPeak, Peak
from planner.rewrite.parity.result import Parity, Row

_SHOWN_OPS = 5
"""Maximum number of ops that the explanation of a difference names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CpuStep:
    """The peak of one training step on the CPU."""

    predicted_bytes: int
    """Bytes of tensors at the peak of the rehearsed step."""
    measured_bytes: int
    """Bytes of tensors at the peak of the real step."""
    kernel_bytes: int
    outside_bytes: int
    """These two are as in `MeasuredPeak`; they are not predicted."""
    why: str
    """If the bytes differ: the ops whose tensors at the peak differ, with the bytes; else empty."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CpuRun:
    """The result of training with a plan on the CPU, with the same decisions as on a card."""

    steps: tuple[CpuStep, ...]
    parity: Parity | None
    """The comparison with the baseline; None if the plan is the baseline."""
    notes: tuple[str, ...]


def compared(predicted: Peak, measured: MeasuredPeak) -> CpuStep:
    """Compare a rehearsed step with the step that ran."""
    more = Counter(measured.alive_by_op)
    more.subtract(predicted.alive_by_op)
    differing = sorted((item for item in more.items() if item[1]), key=lambda item: -abs(item[1]))
    shown = [f"{op.replace('::', '.') or 'before the first step'} {_signed(size)}" for op, size in differing]
    more_ops = f" and {len(shown) - _SHOWN_OPS} more ops" if len(shown) > _SHOWN_OPS else ""
    equal = predicted.tensor_bytes == measured.tensor_bytes
    return CpuStep(
        predicted_bytes=predicted.tensor_bytes,
        measured_bytes=measured.tensor_bytes,
        kernel_bytes=measured.kernel_bytes,
        outside_bytes=measured.outside_bytes,
        why="" if equal else ", ".join(shown[:_SHOWN_OPS]) + more_ops,
    )


def _signed(size_bytes: int) -> str:
    return f"{'+' if size_bytes > 0 else '-'}{format_size(abs(size_bytes))}"


def run_from_json(data: dict[str, Any]) -> CpuRun:
    """Return the run that a worker wrote."""
    parity = data["parity"]
    if parity is not None:
        parity = Parity(rows=tuple(Row(**row) for row in parity["rows"]), notes=tuple(parity["notes"]))
    return CpuRun(steps=tuple(CpuStep(**step) for step in data["steps"]), parity=parity, notes=tuple(data["notes"]))
