"""Compare the memory that training takes with the plan's promise, and explain out-of-memory errors by the plan."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Iterator
from typing import Any, Literal, final

import torch

from planner.errors import PromiseError
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import format_size
from planner.rewrite.application import Rewritten
from planner.rewrite.on_gpu.oom_location import bytes_by_purpose
from planner.rewrite.step_observer import StepObserver

logger = logging.getLogger(__name__)

LOOP_BYTES = 2**16
"""Bytes that scalars and other small tensors of a training loop may take in addition to the promise."""
_SEGMENT_BYTES = 2**21
"""Size of the allocator's segments for blocks of up to 1 MiB (`kSmallBuffer`, c10/cuda/CUDACachingAllocator.cpp)."""
_PURPOSES = ("parameters", "gradients", "optimizer state")
"""Purposes of memory that are known of any loop. The rest is one sum, in the plan and in use."""
_NOT_IN_USE = ("allocator slack", "CUDA context", "NCCL")
"""Categories of a plan that are not memory of tensors."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Promise:
    """The peak memory that the plan promised, and the peak memory that was measured in the first steps, in bytes."""

    allocated_bytes: int | None
    """Measured peak of `torch.cuda.max_memory_allocated`; None if it could not be measured."""
    reserved_bytes: int | None
    """Measured peak of `torch.cuda.max_memory_reserved`; None if it could not be measured."""
    promised_allocated_bytes: int
    promised_reserved_bytes: int
    own_bytes: int = 0
    """Bytes that the training loop may allocate in addition to the promise."""
    why_not_measured: str = ""
    """The reason why the peaks are None; empty if they were measured."""

    @property
    def kept(self) -> bool | None:
        """True if both peaks are within the promise plus the loop's own memory; None if they were not measured.

        For reserved memory, the loop's own memory counts as one segment of the caching allocator (2 MiB).
        """
        if self.allocated_bytes is None or self.reserved_bytes is None:
            return None
        return (
            self.allocated_bytes <= self.promised_allocated_bytes + self.own_bytes
            and self.reserved_bytes <= self.promised_reserved_bytes + _SEGMENT_BYTES
        )

    def __str__(self) -> str:
        if self.allocated_bytes is None or self.reserved_bytes is None:
            return f"the plan's promise could not be measured: {self.why_not_measured}"
        allocated, reserved = format_size(self.allocated_bytes), format_size(self.reserved_bytes)
        return (
            f"the plan's promise was {'kept' if self.kept else 'broken'}: "
            f"{allocated} allocated of {format_size(self.promised_allocated_bytes)}, "
            f"{reserved} reserved of {format_size(self.promised_reserved_bytes)}"
        )


def measured_promise(plan: Plan, device: torch.device, *, own_bytes: int = LOOP_BYTES) -> Promise:
    """Return the plan's promise, and the peaks since the device's counters were last reset.

    Args:
        own_bytes: bytes that the training loop may allocate in addition to the promise.
    """
    peaks = peaks_on(device)
    why_not = f"there is no CUDA device here, the model is trained on {device.type}" if peaks is None else ""
    if plan.card == "bare":
        peaks, why_not = None, "the plan is for a bare card, which counts bytes of tensors and no allocator blocks"
    allocated_bytes, reserved_bytes = peaks or (None, None)
    return Promise(
        allocated_bytes=allocated_bytes,
        reserved_bytes=reserved_bytes,
        why_not_measured=why_not,
        promised_allocated_bytes=plan.peak.allocated_bytes,
        promised_reserved_bytes=plan.peak.reserved_bytes,
        own_bytes=own_bytes,
    )


def peaks_on(device: torch.device) -> tuple[int, int] | None:
    """Return the peaks of allocated and reserved bytes; None for a device that is not a CUDA device."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


@final
class MemoryWatch(StepObserver):
    """The memory of a training loop; `watch_memory` makes it.

    Attributes:
        promise: the comparison of the first steps with the plan; None until they are done.
        out_of_memory: what was in use when memory ran out, compared with the plan; None if it never did.
    """

    def __init__(self, plan: Plan, rewritten: Rewritten, *, steps: int, on_broken: Literal["warn", "raise"]) -> None:
        self.promise: Promise | None = None
        self.out_of_memory: str | None = None
        self._plan, self._rewritten, self._steps, self._on_broken = plan, rewritten, steps, on_broken
        self._device = next(rewritten.module.parameters()).device
        self._begun = 0
        self._phase = "before the first step"

    def before_step(self, batch: Any) -> None:
        """Count the step. After the first steps, compare their peaks with the promise."""
        self.finish(at_least=self._steps)
        self._begun += 1
        self._phase = "forward"

    def before_forward(self, weight: torch.Tensor | float | None) -> None:
        """Note that a forward begins."""
        self._phase = "forward"

    def after_loss(self, loss: torch.Tensor) -> None:
        """Note that a backward begins."""
        self._phase = "backward"

    def before_update(self, batch: Any) -> None:
        """Note that the update begins."""
        self._phase = "optimizer"

    def after_error(self) -> None:
        """If memory ran out, note what is in use, before the step frees its gradients."""
        if isinstance(error := sys.exception(), torch.OutOfMemoryError):
            self.explain(error)

    def finish(self, *, at_least: int) -> None:
        """Compare the peaks with the promise, once, if at least this number of steps is done."""
        if self.promise is not None or self._begun < at_least:
            return
        self.promise = measured_promise(self._plan, self._device)
        if self.promise.kept is False and self._on_broken == "raise":
            raise PromiseError(str(self.promise))
        logger.log(logging.INFO if self.promise.kept else logging.WARNING, "%s", self.promise)

    def explain(self, error: torch.OutOfMemoryError) -> None:
        """Note what is in use, compared with the plan, and add it to the error. Only the first error counts."""
        if self.out_of_memory is None:
            allocated, reserved, others = in_use(self._device)
            used = bytes_by_purpose(self._rewritten.module, self._rewritten.optimizers, allocated)
            self.out_of_memory = _explanation(self._plan, self._place(error), used, allocated, reserved, others)
            error.add_note(self.out_of_memory)

    def _place(self, error: torch.OutOfMemoryError) -> str:
        """Returns the phase, and the innermost module of the model that was running."""
        names = {id(module): name for name, module in self._rewritten.module.named_modules()}
        found, frame = "", error.__traceback__
        while frame is not None:
            found = names.get(id(frame.tb_frame.f_locals.get("self")), found)
            frame = frame.tb_next
        return f"in {self._phase}" + (f", in '{found}'" if found else "")


def in_use(device: torch.device) -> tuple[int, int, int]:
    """Return the bytes of tensors, the bytes that the allocator holds, and the bytes of the card that others hold."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return torch.cuda.memory_allocated(device), reserved, max(total - free - reserved, 0)


def _explanation(
    plan: Plan, place: str, used: dict[str, int], allocated_bytes: int, reserved_bytes: int, others_bytes: int
) -> str:
    """Returns a sentence that compares what is in use with the plan's peak, and says what to do."""
    breakdown = {name: size for name, size in plan.peak.breakdown.items() if name not in _NOT_IN_USE}
    planned = {purpose: breakdown.pop(purpose, 0) for purpose in _PURPOSES}
    planned["the rest"] = sum(breakdown.values())
    parts = ", ".join(
        f"{purpose} {format_size(used[purpose])} (plan: {format_size(planned[purpose])})" for purpose in planned
    )
    more = [purpose for purpose in planned if used[purpose] > planned[purpose] + LOOP_BYTES]
    if more:
        advice = (
            f"{' and '.join(more)} take more than planned: keep no other model, gradients or outputs of earlier steps, "
            "and train with the planned batch, or make the plan again"
        )
    else:
        advice = (
            f"no part takes more than planned, so other memory of the card is missing: {format_size(others_bytes)} "
            "belong to other processes, libraries and the CUDA context; end other processes, or plan with a smaller "
            "--vram"
        )
    return (
        f"out of memory {place}, with {format_size(allocated_bytes)} in tensors (the plan's peak: "
        f"{format_size(plan.peak.allocated_bytes)}) and {format_size(reserved_bytes)} reserved (plan: "
        f"{format_size(plan.peak.reserved_bytes)}): {parts}; {advice}"
    )


@contextlib.contextmanager
def watch_memory(
    plan: Plan, rewritten: Rewritten, *, steps: int = 3, on_broken: Literal["warn", "raise"] = "warn"
) -> Iterator[MemoryWatch]:
    """Compare the memory of your training loop with the plan, and explain an out-of-memory error by the plan.

    The peaks of the first steps are compared with the promise, and logged in one line. If the card runs out of memory,
    the error is raised as usual, with a note: what was in use, by purpose, against what the plan has at its peak. On
    other devices than CUDA nothing is measured, and the line says so.

    Args:
        plan: the plan that was applied.
        rewritten: what `rewrite.apply` returned.
        steps: number of steps that are compared, at least 2, because the optimizer's state is created in the first.
        on_broken: "warn" logs a warning if the promise is broken; "raise" raises `PromiseError` before the next step.

    Yields:
        A `MemoryWatch`, whose `promise` has the measured and the promised bytes after the first steps.

    Raises:
        PromiseError: the promise was broken, and `on_broken` is "raise".
        ValueError: `steps` is below 2.
    """
    if steps < 2:
        raise ValueError(
            f"steps is {steps}: give at least 2, because the optimizer's state is created in the first step"
        )
    watch = MemoryWatch(plan, rewritten, steps=steps, on_broken=on_broken)
    if watch._device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(watch._device)
    rewritten.step.observers += (watch,)
    try:
        yield watch
        watch.finish(at_least=2)
    except torch.OutOfMemoryError as error:
        watch.explain(error)
        raise
    finally:
        rewritten.step.observers = tuple(observer for observer in rewritten.step.observers if observer is not watch)
