"""Train by a plan on a card, in a process of its own, and say what that took.

    python -m planner.rewrite.on_gpu.worker PLAN.json RESULT.json [--cap BYTES] [--find-op | --parity]

The model is made with random weights, moved to the card, rewritten, and trained by `STEPS` optimizer steps from an
empty allocator that gets no more than `--cap`; then some more steps are timed. RESULT holds `Ran` or `RanOut` as JSON.
With `--parity` copies of it are trained by the plan and without it, and RESULT holds what `rewrite.verify` says.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import statistics
import sys
import time
import warnings
from typing import Any

import torch

from planner.errors import MeasurementError, PlannerError
from planner.plan_types.plan import Plan
from planner.rewrite.application import Rewritten, apply
from planner.rewrite.on_gpu.cuda import Cuda, Device
from planner.rewrite.on_gpu.oom_location import OomLocator
from planner.rewrite.parity.result import Parity, Row
from planner.rewrite.parity.verify import verify
from planner.workload.loading import load_workload
from planner.workload.workload import Workload, map_batch

STEPS = 3
"""The first makes the optimizer's state, the second is the first full one, the third shows that nothing grows."""
TIMED_STEPS, TIMED_SECONDS = 5, 30.0
"""So many, or fewer if they take so long."""
MOST_SKIPPED = 24
"""Steps that a gradient scaler may skip: it begins at 2^16 and halves, and fp16 ends at 2^-24."""
COULD_NOT_RUN = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ran:
    """What training took. Bytes on the card; peaks are of the set-up and of the first steps."""

    device: str
    """What the driver calls the card."""
    allocated_bytes: int
    reserved_bytes: int
    total_bytes: int
    """The largest that was reserved, and what the process holds beside the allocator after the last step."""
    total_source: str
    """How the process was measured, `planner.profiles.process_memory`."""
    peaks: tuple[tuple[int, int], ...]
    """Allocated and reserved so far: after the set-up and after each step."""
    losses: tuple[float, ...]
    skipped: int
    """Steps that a gradient scaler skipped, beside those that trained."""
    step_ms: float
    """Median."""
    step_ms_spread: float
    """Slowest less fastest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RanOut:
    """Where the card had no more memory."""

    device: str
    step: int
    """0: while model and batch were moved to the card."""
    message: str
    """What the allocator said."""
    place: dict[str, Any] | None = None
    """`on_gpu.oom_location.Place` as data; None where it was not looked for, or is none of a step's ops."""


class _StepError(Exception):
    """The number of the step that ran out of memory, and the place."""

    def __init__(self, step: int, place: dict[str, Any] | None) -> None:
        super().__init__(step)
        self.step, self.place = step, place


def run(plan: Plan, device: Device, *, cap_bytes: int | None, find_op: bool = False) -> Ran | RanOut:
    """Train on a device that this process has not used before.

    Args:
        cap_bytes: what the allocator may take from the driver.
        find_op: note which op runs out; what is measured is then a little more.

    Raises:
        MeasurementError: there is no such card, or the plan is for a live model.
        PlannerError: the model cannot be made, or the plan not applied to it.
    """
    work = _with_weights(plan)
    try:
        device.begin(cap_bytes)
        return _trained(plan, work, device, find_op=find_op)
    except torch.OutOfMemoryError as error:
        where = error.__cause__ if isinstance(error.__cause__, _StepError) else _StepError(0, None)
        message = " ".join(str(error).split())
        return RanOut(device=device.title(), step=where.step, message=message, place=where.place)


def _with_weights(plan: Plan) -> Workload:
    if plan.model.reference is None:
        raise MeasurementError("the plan is for a live model, which another process cannot make: name a model instead")
    torch.manual_seed(0)
    return load_workload(
        plan.model.reference,
        batch_size=plan.workload.batch_size,
        seq_len=plan.workload.seq_len,
        optimizer=plan.workload.optimizer,
        with_weights=True,
    )


def _trained(plan: Plan, work: Workload, device: Device, *, find_op: bool) -> Ran:
    model = work.model.to(device.name)
    batch = map_batch(lambda tensor: tensor.to(device.name), work.batch)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the plan does not fit its budget")  # that is what is found out here
        rewritten = apply(plan, model, loss_fn=work.loss_fn)
    steps = _Steps(plan, rewritten, batch, device, find_op=find_op)
    peaks = [device.peaks()]
    while steps.trained < STEPS:
        steps.one()
        peaks.append(device.peaks())
        if steps.skipped > MOST_SKIPPED:
            raise MeasurementError(f"the gradient scaler skipped {steps.skipped} steps: this model overflows in fp16")
    process = device.process_memory()
    beside_bytes = process.process_bytes - device.reserved_bytes()
    times = steps.timed()
    return Ran(
        device=device.title(),
        allocated_bytes=peaks[-1][0],
        reserved_bytes=peaks[-1][1],
        total_bytes=peaks[-1][1] + beside_bytes,
        total_source=process.source,
        peaks=tuple(peaks),
        losses=tuple(steps.losses),
        skipped=steps.skipped,
        step_ms=statistics.median(times),
        step_ms_spread=max(times) - min(times),
    )


class _Steps:
    """Training steps, one after the other."""

    def __init__(self, plan: Plan, rewritten: Rewritten, batch: Any, device: Device, *, find_op: bool) -> None:
        self._rewritten, self._batch, self._device, self._find_op = rewritten, batch, device, find_op
        self._held: tuple[torch.nn.Parameter, ...] = ()
        self._holds = plan.workload.gradients_alive
        self.losses: list[float] = []
        self.skipped = self._begun = 0

    @property
    def trained(self) -> int:
        return len(self.losses) - self.skipped

    def one(self) -> None:
        """A step that is counted and looked at."""
        scaler = self._rewritten.step.scaler
        scale = None if scaler is None else scaler.get_scale()
        self.losses.append(float(self._step()))
        self.skipped += scaler is not None and scaler.get_scale() < scale

    def timed(self) -> list[float]:
        """Milliseconds of some more."""
        self._step()
        began, times = time.perf_counter(), []
        while len(times) < TIMED_STEPS and (not times or time.perf_counter() - began < TIMED_SECONDS):
            times.append(self._device.milliseconds(self._step))
        return times

    def _step(self) -> torch.Tensor:
        """Raises torch's error where memory runs out, from a `_StepError`."""
        self._begun += 1
        last = OomLocator(self._rewritten.module, self._rewritten.optimizer, self._device.allocated_bytes)
        try:
            with last.watching() if self._find_op else contextlib.nullcontext():
                return self._step_with_gradients() if self._holds else self._rewritten.step(self._batch)
        except torch.OutOfMemoryError as error:
            raise error from _StepError(self._begun, None if last.place is None else dataclasses.asdict(last.place))

    def _step_with_gradients(self) -> torch.Tensor:
        """With gradients alive before it, of all parameters that got one in the step before."""
        for parameter in self._held:
            parameter.grad = torch.zeros_like(parameter)
        found: list[torch.nn.Parameter] = []

        def note(*_: object) -> None:
            found.extend(p for p in self._rewritten.module.parameters() if p.grad is not None)

        hook = self._rewritten.optimizer.register_step_pre_hook(note)
        try:
            return self._rewritten.step(self._batch)
        finally:
            hook.remove()
            self._held = tuple(found)


def compared(plan: Plan, device: Device) -> Parity:
    """What `rewrite.verify` says of the plan on this device.

    Raises:
        MeasurementError: there is no such card, or the plan is for a live model.
    """
    work = _with_weights(plan)
    device.begin()
    return verify(plan, work.model, work.batch, loss_fn=work.loss_fn, device=device.name)


Outcome = Ran | RanOut | Parity


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """Inverse of `outcome_from_json`."""
    kind = next(kind for kind, found in _KINDS.items() if isinstance(outcome, found))
    return {"kind": kind, **dataclasses.asdict(outcome)}


def outcome_from_json(data: dict[str, Any]) -> Outcome:
    """What a process wrote."""
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    found = _KINDS[fields.pop("kind")]
    if found is Ran:
        fields["peaks"] = tuple(tuple(pair) for pair in fields["peaks"])
    if found is Parity:
        fields["rows"] = tuple(Row(**row) for row in fields["rows"])
    return found(**fields)


_KINDS: dict[str, type] = {"ran": Ran, "ran out": RanOut, "parity": Parity}


def main(arguments: list[str], device: Device) -> int:
    """0: the result is written, whatever it says; 2: it could not be run, and the last line says why."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=pathlib.Path)
    parser.add_argument("result", type=pathlib.Path)
    parser.add_argument("--cap", type=int)
    parser.add_argument("--find-op", action="store_true")
    parser.add_argument("--parity", action="store_true")
    options = parser.parse_args(arguments)
    try:
        plan = Plan.load(options.plan)
        if options.parity:
            outcome = compared(plan, device)
        else:
            outcome = run(plan, device, cap_bytes=options.cap, find_op=options.find_op)
    except PlannerError as error:
        print(str(error), file=sys.stderr)
        return COULD_NOT_RUN
    options.result.write_text(json.dumps(outcome_to_json(outcome)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Cuda()))
