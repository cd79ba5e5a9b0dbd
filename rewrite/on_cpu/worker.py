"""Train with a plan on the CPU, in its own process, and compare with a rehearsal.

    python -m planner.rewrite.on_cpu.worker PLAN.json RESULT.json

RESULT holds `CpuRun` as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import warnings
from collections.abc import Callable

import torch

from planner.errors import MeasurementError, PlannerError
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import format_size
from planner.rewrite.application import apply
from planner.rewrite.on_cpu.allocations import AllocationRecord, MeasuredPeak
from planner.rewrite.on_cpu.prediction import Prediction, predicted
from planner.rewrite.on_cpu.run import CpuRun, compared
from planner.rewrite.on_gpu.worker import COULD_NOT_RUN, STEPS, Steps, workload_of
from planner.rewrite.parity.comparisons import comparisons
from planner.rewrite.parity.result import Parity
from planner.rewrite.parity.verify import verify
from planner.workload.workload import Workload

WITHOUT_ONEDNN = (
    "oneDNN was off while bytes were measured: its LSTM saves a buffer for backward whose size is not public"
)
WITHOUT_GRADIENTS = "step 1 started without gradients of earlier batches, which its prediction includes"

Load = Callable[[bool], Workload]
"""`load(with_weights)` builds the workload of a plan, with seeded random weights or without weights."""


def run(plan: Plan, load: Load) -> CpuRun:
    """Train by the plan on the CPU, compare its memory with a rehearsal, and compare its results with the baseline's.

    Raises:
        MeasurementError: if this needs more memory than is free.
        PlannerError: if the model cannot be built, or the plan cannot be applied to it.
    """
    without_weights = load(False)
    has_lstm = any(isinstance(module, torch.nn.LSTM) for module in without_weights.model.modules())
    with torch.backends.mkldnn.flags(enabled=False) if has_lstm else contextlib.nullcontext():
        prediction = predicted(without_weights, plan.decisions)
        _refuse_if_too_large(plan, without_weights, prediction)
        measured = _measured(plan, load, prediction)
    parity: Parity | None = None
    if plan.decisions:
        workload = load(True)
        parity = verify(
            plan, workload.model, workload.batch, loss_fn=workload.loss_fn, step=workload.step,
            optimizer=workload.given_optimizer, device="cpu",
        )  # fmt: skip
    expected = (prediction.first, *[prediction.later] * (len(measured) - 1))
    notes = ((WITHOUT_ONEDNN, has_lstm), (WITHOUT_GRADIENTS, plan.workload.gradients_alive))
    return CpuRun(
        steps=tuple(compared(*pair) for pair in zip(expected, measured, strict=True)),
        parity=parity,
        notes=(*(note for note, applies in notes if applies), *prediction.assumptions),
    )


def _measured(plan: Plan, load: Load, prediction: Prediction) -> list[MeasuredPeak]:
    """Train `STEPS` steps, not counting skipped ones, and return the peaks of those steps."""
    record, trained = AllocationRecord(), []
    with record.recording():
        workload = load(True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the plan does not fit its budget")
            rewritten = apply(
                plan, workload.model, workload.given_optimizer, loss_fn=workload.loss_fn, step=workload.step
            )
        rewritten.step.observers = ()  # they allocate memory, which would be counted as memory of the step
        steps = Steps(plan, rewritten, workload.batch)
        while steps.trained < STEPS:
            before = steps.trained
            with record.step():
                steps.one()
            trained.append(steps.trained > before)
    return [peak for peak, counts in zip(record.peaks(prediction.ops), trained, strict=True) if counts]


def _refuse_if_too_large(plan: Plan, workload: Workload, prediction: Prediction) -> None:
    """Raise `MeasurementError` if training or the comparison with the baseline needs more memory than is free.

    The comparison needs memory for the model, for one step of the baseline, and for the gradients, the parameters
    before and after, and the optimizer state of each of two runs. Some comparisons are in double.
    """
    needed_bytes = max(prediction.first.tensor_bytes, prediction.later.tensor_bytes)
    if plan.decisions:
        baseline = predicted(workload, ())
        weights_bytes = sum(parameter.nbytes for parameter in workload.model.parameters())
        results_bytes = 2 * (3 * weights_bytes + baseline.state_bytes)
        factor = 2 if {"in double", "freeze"} & set(comparisons(plan)) else 1
        needed_bytes = max(needed_bytes, weights_bytes + factor * (baseline.later.tensor_bytes + results_bytes))
    if needed_bytes > (free := free_bytes()):
        raise MeasurementError(
            f"there is no CUDA card here, and verifying this plan on the CPU needs about {format_size(needed_bytes)}, "
            f"but {format_size(free)} of memory are free: verify on a card, or plan for a smaller batch or model"
        )


def free_bytes() -> int:
    """Return the bytes of memory that programs on this machine can still take, or all of its memory if not known."""
    facts = pathlib.Path("/proc/meminfo")
    if facts.exists():
        values = dict(line.split(":", 1) for line in facts.read_text().splitlines())
        return int(values["MemAvailable"].split()[0]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code.

    It is 0 if a result was written, and 2 if the plan could not be run. The last line on stderr then says why.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=pathlib.Path)
    parser.add_argument("result", type=pathlib.Path)
    options = parser.parse_args(arguments)
    try:
        plan = Plan.load(options.plan)
        outcome = run(plan, lambda with_weights: workload_of(plan, with_weights=with_weights))
    except PlannerError as error:
        print(str(error), file=sys.stderr)
        return COULD_NOT_RUN
    options.result.write_text(json.dumps(dataclasses.asdict(outcome)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
