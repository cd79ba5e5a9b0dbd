"""Train with a plan on a card, in its own process, and measure memory and time.

    python -m planner.rewrite.on_gpu.worker PLAN.json RESULT.json [--cap BYTES] [--find-op | --parity]

The model is built with random weights, moved to the card, rewritten, and trained for `STEPS` optimizer steps, starting
with an empty allocator that may reserve at most `--cap` bytes. Then some more steps are timed. RESULT holds `Ran` or
`RanOut` as JSON. With `--parity`, copies of the model are trained with the plan and without it instead, and RESULT
holds the result of `rewrite.verify`.
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
from planner.plan_types.answers import Answers
from planner.plan_types.plan import Plan
from planner.plan_types.words import counted
from planner.rewrite.application import Rewritten, apply
from planner.rewrite.on_gpu.cuda import Cuda, Device
from planner.rewrite.on_gpu.oom_location import OomLocator
from planner.rewrite.parity.result import Parity, Row
from planner.rewrite.parity.verify import verify
from planner.rewrite.rules.allocator import set_options
from planner.workload.loading import load_workload
from planner.workload.synthetic_batch import planned_masking
from planner.workload.workload import Workload, map_batch

STEPS = 3
"""Number of measured steps. The first step creates the optimizer state, the second is the first one that starts with
this state, and the third shows that memory does not grow."""
TIMED_STEPS, TIMED_SECONDS = 5, 30.0
"""Maximum number of timed steps, and maximum seconds after which no further step is started."""
MOST_SKIPPED = 24
"""Maximum number of steps that a gradient scaler may skip. Each skip halves its scale, from 2^16 to 2^-8 after 24."""
COULD_NOT_RUN = 2
"""Exit code if the plan could not be run and no result was written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ran:
    """Measurements of a training that did not run out of memory.

    Peaks include the set-up and the first steps, but not the timed steps that follow.
    """

    device: str
    """The driver's name for the card."""
    allocated_bytes: int
    """Peak of the bytes that tensors used."""
    reserved_bytes: int
    """Peak of the bytes that the allocator held."""
    total_bytes: int
    """`reserved_bytes`, plus what the process held outside of the allocator after the last step."""
    total_source: str
    """The method by which the memory of the process was measured, see `planner.profiles.process_memory`."""
    peaks: tuple[tuple[int, int], ...]
    """Peaks since the start, as (allocated bytes, reserved bytes): after the set-up, and after each step."""
    losses: tuple[float, ...]
    """Loss of each step, also of the skipped ones."""
    skipped: int
    """Number of steps whose update the gradient scaler skipped."""
    step_ms: float
    """Median time of a timed step in milliseconds."""
    step_ms_spread: float
    """Time of the slowest step minus that of the fastest, in milliseconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RanOut:
    """A training that ran out of memory on the card."""

    device: str
    """The driver's name for the card."""
    step: int
    """Number of the step, from 1; 0 if memory ran out while the model and the batch were moved to the card."""
    message: str
    """Message of the allocator, on one line."""
    place: dict[str, Any] | None = None
    """`OomLocation` as a dict; None if the run did not record it, or memory did not run out in an op of a step."""


class _StepError(Exception):
    """The cause of an out-of-memory error: number of the step, and the location if it was recorded."""

    def __init__(self, step: int, location: dict[str, Any] | None) -> None:
        super().__init__(step)
        self.step, self.location = step, location


def run(plan: Plan, device: Device, *, cap_bytes: int | None, find_op: bool = False) -> Ran | RanOut:
    """Train on a device that this process has not used before.

    Args:
        cap_bytes: maximum number of bytes that the allocator may reserve; None for no cap.
        find_op: record which op runs out of memory. This needs a little more memory, see `OomLocator`.

    Raises:
        MeasurementError: if there is no such card, or the plan is for a live model.
        PlannerError: if the model cannot be built, or the plan cannot be applied to it.
    """
    workload = workload_of(plan)
    set_options(plan.decisions, plan.alloc_conf)
    if plan.cudnn_benchmark:
        torch.backends.cudnn.benchmark = True
    try:
        device.begin(cap_bytes)
        return _trained(plan, workload, device, find_op=find_op)
    except torch.OutOfMemoryError as error:
        cause = error.__cause__ if isinstance(error.__cause__, _StepError) else _StepError(0, None)
        message = " ".join(str(error).split())
        return RanOut(device=device.title(), step=cause.step, message=message, place=cause.location)


def workload_of(plan: Plan, *, with_weights: bool = True) -> Workload:
    """Build the plan's model with seeded random weights, or without weights.

    Raises:
        MeasurementError: if the plan is for a live model.
    """
    if plan.model.reference is None:
        raise MeasurementError(
            "the plan is for a live model, which another process cannot build: make the plan for a model that is given "
            "by its name or by file.py:function"
        )
    torch.manual_seed(0)
    return load_workload(
        plan.model.reference,
        batch_size=plan.workload.batch_size,
        seq_len=plan.workload.seq_len,
        optimizer=plan.workload.optimizer,
        gradients_alive=plan.workload.gradients_alive,
        dtype=None if ":" in plan.model.reference else plan.model.dtype,
        adapter=plan.model.adapter,
        program=plan.model.program,
        input_shapes=plan.workload.input_shapes,
        masking=planned_masking(plan),
        answers=Answers(values=plan.workload.values, worst_case=plan.workload.worst_case),
        arguments=plan.model.arguments,
        with_weights=with_weights,
    )


def _trained(plan: Plan, workload: Workload, device: Device, *, find_op: bool) -> Ran:
    model = workload.model.to(device.name)
    batch = map_batch(lambda tensor: tensor.to(device.name), workload.batch)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the plan does not fit its budget")  # this run finds out
        rewritten = apply(plan, model, workload.given_optimizer, loss_fn=workload.loss_fn, step=workload.step)
    steps = Steps(plan, rewritten, batch, locate_on=device if find_op else None)
    peaks = [device.peaks()]
    while steps.trained < STEPS:
        steps.one()
        peaks.append(device.peaks())
    process = device.process_memory()
    outside_bytes = process.process_bytes - device.reserved_bytes()  # CUDA context, kernels, libraries
    times = steps.timed(device)
    return Ran(
        device=device.title(),
        allocated_bytes=peaks[-1][0],
        reserved_bytes=peaks[-1][1],
        total_bytes=peaks[-1][1] + outside_bytes,
        total_source=process.source,
        peaks=tuple(peaks),
        losses=tuple(steps.losses),
        skipped=steps.skipped,
        step_ms=statistics.median(times),
        step_ms_spread=max(times) - min(times),
    )


class Steps:
    """Runs training steps and counts them.

    Args:
        locate_on: device on which to find the op that runs out of memory; None to find none.
    """

    def __init__(self, plan: Plan, rewritten: Rewritten, batch: Any, *, locate_on: Device | None = None) -> None:
        self._rewritten, self._batch, self._locate_on = rewritten, batch, locate_on
        self._keeps_gradients = plan.workload.gradients_alive
        self._with_gradient: tuple[torch.nn.Parameter, ...] = ()
        """Parameters that had a gradient at the update of the previous step."""
        self.losses: list[float] = []
        self.skipped = self._begun = 0

    @property
    def trained(self) -> int:
        """Number of steps that were not skipped."""
        return len(self.losses) - self.skipped

    def one(self) -> None:
        """Run one step, and record its loss and whether the gradient scaler skipped it.

        Raises:
            MeasurementError: if the scaler has skipped more than `MOST_SKIPPED` steps.
        """
        scaler = getattr(self._rewritten.step, "scaler", None)  # a step of the user's own has none
        scale = 0.0 if scaler is None else scaler.get_scale()
        result = self._step()
        self.losses.append(float(result) if isinstance(result, (torch.Tensor, float)) else float("nan"))
        self.skipped += scaler is not None and scaler.get_scale() < scale
        if self.skipped > MOST_SKIPPED:
            raise MeasurementError(
                f"the gradient scaler skipped {counted(self.skipped, 'step')}: this model overflows in fp16. Plan with "
                "mixed-precision forbidden"
            )

    def timed(self, device: Device) -> list[float]:
        """Run one step to warm up and then some more steps, and return the milliseconds of each but the first."""
        self._step()
        began = time.perf_counter()
        times: list[float] = []
        while len(times) < TIMED_STEPS and (not times or time.perf_counter() - began < TIMED_SECONDS):
            times.append(device.milliseconds(self._step))
        return times

    def _step(self) -> torch.Tensor:
        """Run a step. If memory runs out, torch's error is raised with a `_StepError` as its cause."""
        self._begun += 1
        locator = None
        if self._locate_on is not None:
            locator = OomLocator(self._rewritten.module, self._rewritten.optimizer, self._locate_on.allocated_bytes)
        try:
            with contextlib.nullcontext() if locator is None else locator.watching():
                return self._step_with_gradients() if self._keeps_gradients else self._rewritten.step(self._batch)
        except torch.OutOfMemoryError as error:
            found = None if locator is None else locator.location
            location = None if found is None else dataclasses.asdict(found)
            raise error from _StepError(self._begun, location)

    def _step_with_gradients(self) -> torch.Tensor:
        """Run a step that starts with gradients (zeros), as in a loop that accumulates gradients of several batches."""
        for parameter in self._with_gradient:
            parameter.grad = torch.zeros_like(parameter)
        with_gradient: list[torch.nn.Parameter] = []

        def note(*_: object) -> None:
            with_gradient.extend(p for p in self._rewritten.module.parameters() if p.grad is not None)

        hook = self._rewritten.optimizer.register_step_pre_hook(note)
        try:
            return self._rewritten.step(self._batch)
        finally:
            hook.remove()
            self._with_gradient = tuple(with_gradient)


def compared(plan: Plan, device: Device) -> Parity:
    """Return the result of `rewrite.verify` for the plan on this device.

    Raises:
        MeasurementError: if there is no such card, or the plan is for a live model.
    """
    workload = workload_of(plan)
    device.begin()
    return verify(
        plan, workload.model, workload.batch, loss_fn=workload.loss_fn, step=workload.step,
        optimizer=workload.given_optimizer, device=device.name,
    )  # fmt: skip


Outcome = Ran | RanOut | Parity


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as JSON data."""
    kind = next(kind for kind, outcome_type in _KINDS.items() if isinstance(outcome, outcome_type))
    return {"kind": kind, **dataclasses.asdict(outcome)}


def outcome_from_json(data: dict[str, Any]) -> Outcome:
    """Return the outcome that a process wrote."""
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    outcome_type = _KINDS[fields.pop("kind")]
    if outcome_type is Ran:
        fields["peaks"] = tuple(tuple(pair) for pair in fields["peaks"])
    if outcome_type is Parity:
        fields["rows"] = tuple(Row(**row) for row in fields["rows"])
    return outcome_type(**fields)


_KINDS: dict[str, type[Outcome]] = {"ran": Ran, "ran out": RanOut, "parity": Parity}


def main(arguments: list[str], device: Device) -> int:
    """Run the command and return its exit code.

    It is 0 if a result was written, and 2 if the plan could not be run. The last line on stderr then says why.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=pathlib.Path)
    parser.add_argument("result", type=pathlib.Path)
    parser.add_argument("--cap", type=int)
    parser.add_argument("--find-op", action="store_true")
    parser.add_argument("--parity", action="store_true")
    options = parser.parse_args(arguments)
    try:
        plan = Plan.load(options.plan)
        outcome: Outcome
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
