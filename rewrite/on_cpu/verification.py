"""Check a plan on a machine without a CUDA card: train by it on the CPU, in a fresh process.

1. Rehearse the planned step as the CPU runs it, train some steps, and compare the bytes of tensors at each step's peak.
2. Train copies with the plan and without it, and compare (`rewrite.verify`).

This checks the rewritten step and the planner's count of the bytes of tensors. It measures neither times nor the memory
of a card that belongs to no tensor: the allocator's slack, the CUDA context and workspaces.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from planner.plan_types.plan import Plan
from planner.rewrite.on_cpu.run import CpuRun, run_from_json
from planner.rewrite.on_gpu.verification import TOLERANCE, parity_to_json, result_of_process

RUN_ON_CPU = (sys.executable, "-m", "planner.rewrite.on_cpu.worker")
NOT_MEASURED = "times, and memory of the card that belongs to no tensor (allocator, CUDA context, workspaces)"
SAME_PLAN = "the plan is the baseline itself"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CpuVerification:
    """The result of checking a plan on the CPU."""

    plan: Plan
    ran: CpuRun

    @property
    def kept(self) -> bool:
        """True if no step took more bytes of tensors than predicted, and training gave the baseline's results.

        The tolerance of the bytes is that of a verification on a card.
        """
        within = all(step.measured_bytes <= TOLERANCE * step.predicted_bytes for step in self.ran.steps)
        return within and (self.ran.parity is None or self.ran.parity.passed)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON data, without the plan itself."""
        parity = self.ran.parity
        return {
            "device": "cpu",
            "kept": self.kept,
            "steps": [dataclasses.asdict(step) for step in self.ran.steps],
            "parity": None if parity is None else parity_to_json(parity),
            "why_no_parity": SAME_PLAN if parity is None else "",
            "notes": list(self.ran.notes),
            "not_measured": NOT_MEASURED,
        }


def cpu_verification(plan: Plan, *, run: Callable[[Plan], CpuRun] | None = None) -> CpuVerification:
    """Train with the plan on the CPU in a fresh process.

    Args:
        run: trains by the plan; None for `run_in_process`.

    Raises:
        MeasurementError: if the plan cannot be run on this machine, for example because memory is too small.
    """
    return CpuVerification(plan=plan, ran=(run or run_in_process)(plan))


def run_in_process(plan: Plan) -> CpuRun:
    """Run `planner.rewrite.on_cpu.worker` in its own process.

    Raises:
        MeasurementError: if the process ended without a result.
    """
    return run_from_json(result_of_process(plan, (), command=RUN_ON_CPU))
