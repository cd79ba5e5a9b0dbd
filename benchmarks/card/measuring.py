"""Measures three steps of a case on a card, from an empty allocator: peaks, process memory, history, time."""

from __future__ import annotations

import dataclasses
import math
import statistics

from benchmarks.card.by_op import TakenByOp
from benchmarks.card.cases import Case
from benchmarks.card.device import Device
from benchmarks.card.history import History, history_of, signed
from planner.rewrite.application import Rewritten, apply_decisions
from planner.workload.workload import Workload, map_batch

STEPS = 3
"""The first step creates the optimizer state, the second is the first full one, the third shows that nothing grows."""
WARM_STEPS, TIMED_STEPS = 2, 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Result of a measurement."""

    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int
    process_source: str
    context_bytes: int
    """Memory of the process outside the allocator, in bytes, after the last step."""
    peaks: list[tuple[int, int]]
    """Largest allocated and reserved bytes after the set-up and after each step."""
    history: History
    step_ends: list[int]
    """Indices in the stream of `history` at the end of the set-up and of each step."""
    step_ms: float
    """Median time of a step."""
    step_ms_spread: float
    """Slowest minus fastest time."""
    loss: float
    scale: float | None
    """Scale of the gradient scaler, which falls if a step is skipped; None without a scaler."""
    taken_by_op: dict[str, int]
    """Requested bytes by op, in one more step."""


def measure(case: Case, work: Workload, device: Device) -> Measured:
    """Train on the card. The process must not have used CUDA before."""
    device.begin()
    model = work.model.to(device.name)
    batch = map_batch(lambda tensor: tensor.to(device.name), work.batch)
    rewritten = apply_decisions(
        case.decisions(work),
        model,
        optimizer=work.optimizer,
        calling=work.calling,
        batch_size=work.batch_size,
        loss_fn=work.loss_fn,
    )
    peaks, ends, loss = [device.peaks()], [len(signed(history_of(device.snapshot())))], math.nan
    for _ in range(STEPS):
        rewritten.step(batch)
        peaks.append(device.peaks())
        history = history_of(device.snapshot())
        ends.append(len(signed(history)))
    process, reserved_bytes = device.process_memory(), device.reserved_bytes()
    device.stop_recording()
    loss = float(rewritten.step(batch))
    times = _times(rewritten, batch, device)
    return Measured(
        allocated_bytes=peaks[-1][0],
        reserved_bytes=peaks[-1][1],
        process_bytes=process.process_bytes,
        process_source=process.source,
        context_bytes=process.process_bytes - reserved_bytes,
        peaks=peaks,
        history=history,
        step_ends=ends,
        step_ms=statistics.median(times),
        step_ms_spread=max(times) - min(times),
        loss=loss,
        scale=None if rewritten.step.scaler is None else rewritten.step.scaler.get_scale(),
        taken_by_op=_taken_by_op(rewritten, batch, device),
    )


def _times(rewritten: Rewritten, batch: object, device: Device) -> list[float]:
    for _ in range(WARM_STEPS - 1):  # the step for the loss was one of them
        rewritten.step(batch)
    return [device.milliseconds(lambda: rewritten.step(batch)) for _ in range(TIMED_STEPS)]


def _taken_by_op(rewritten: Rewritten, batch: object, device: Device) -> dict[str, int]:
    with TakenByOp(device.taken_bytes) as mode:
        rewritten.step(batch)
    return mode.totals
