"""Check a plan's promise on a card: train with the plan in a fresh process under the budget, and measure.

1. Train with the plan. The allocator is capped at the budget minus the promised CUDA context, so that the whole process
   stays within the budget. If memory runs out, a second run finds the op that asked for it.
2. Time the baseline, without a cap, if the card is large enough for it.
3. Train copies with the plan and without it, and compare (`rewrite.verify`).

Each run has its own process (`planner.rewrite.on_gpu.worker`), and this process does not use the card.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from planner import profiles
from planner.errors import MeasurementError
from planner.plan_types.plan import Plan
from planner.rewrite.on_gpu.worker import Outcome, Ran, RanOut, outcome_from_json
from planner.rewrite.parity.result import Parity

TOLERANCE = 1.01
"""Maximum ratio of measured to promised bytes for a promise that counts as kept."""
RUN_ON_CARD = (sys.executable, "-m", "planner.rewrite.on_gpu.worker")
_ERROR_LINES = 3
"""Number of lines of the output of a failed process that an error message quotes."""
_OUT_OF_MEMORY = "OutOfMemoryError"

Execute = Callable[[list[str], BinaryIO], "int | None"]
"""Runs a command with its output written to a file; returns the exit code, None if the process was terminated."""
Run = Callable[[Plan, Sequence[str]], Outcome]
"""Runs `planner.rewrite.on_gpu.worker` with a plan and options, and returns the outcome."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantity:
    """One promised or predicted number, and its measurement."""

    name: str
    """'allocated', 'reserved' and 'total' in bytes, 'step time' in milliseconds, 'slowdown' as a ratio."""
    promised: float
    measured: float | None
    """The measured value; None if the quantity was not measured."""
    kept: bool | None
    """True if the promise was kept; None if nothing was promised (a prediction only) or nothing was measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of checking a plan on a card."""

    plan: Plan
    cap_bytes: int | None
    """Maximum number of bytes that the allocator could reserve; None if the plan has no budget."""
    planned: Ran | RanOut
    """The run with the plan, under the cap."""
    plain: Ran | RanOut | None
    """The run of the baseline, without a cap; None if it was not run."""
    parity: Parity | None
    """The comparison of the two trainings; None if they were not compared."""
    why_no_parity: str = ""
    """The reason why the trainings were not compared; empty if they were."""
    same_card: bool = True
    """False if the plan was checked on a card that is known to be another one than the planned card."""

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """Each promised or predicted number with its measurement."""
        ran, peak = self.planned if isinstance(self.planned, Ran) else None, self.plan.peak
        plain = self.plain if isinstance(self.plain, Ran) else None
        step_ms = None if ran is None else ran.step_ms
        slowdown = None if ran is None or plain is None else ran.step_ms / plain.step_ms
        return (
            _promised("allocated", peak.allocated_bytes, None if ran is None else ran.allocated_bytes),
            _promised("reserved", peak.reserved_bytes, None if ran is None else ran.reserved_bytes),
            self._total(ran),
            Quantity(name="step time", promised=peak.step_ns / 1e6, measured=step_ms, kept=None),
            Quantity(name="slowdown", promised=self.plan.slowdown, measured=slowdown, kept=None),
        )

    @property
    def kept(self) -> bool:
        """True if the step ran within the promised memory, and trained like the baseline, if that was compared."""
        measured = isinstance(self.planned, Ran)
        return measured and all(q.kept is not False for q in self.quantities) and self._trains_alike

    @property
    def _trains_alike(self) -> bool:
        return self.parity is None or self.parity.passed

    def _total(self, ran: Ran | None) -> Quantity:
        """Return the total memory of the process.

        It is promised only on the planned card, because the size of the CUDA context depends on the card.
        """
        total = _promised("total", self.plan.peak.total_bytes, None if ran is None else ran.total_bytes)
        if ran is None or not self.same_card:
            return dataclasses.replace(total, kept=None)
        inside = self.plan.vram_bytes is None or ran.total_bytes <= self.plan.vram_bytes
        return dataclasses.replace(total, kept=total.kept and inside)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON data, with the promised numbers but without the plan itself."""
        parity = self.parity
        return {
            "kept": self.kept,
            "cap_bytes": self.cap_bytes,
            "same_card": self.same_card,
            "quantities": [dataclasses.asdict(quantity) for quantity in self.quantities],
            "planned": dataclasses.asdict(self.planned),
            "out_of_memory": isinstance(self.planned, RanOut),
            "plain": None if self.plain is None else dataclasses.asdict(self.plain),
            "parity": None if parity is None else parity_to_json(parity),
            "why_no_parity": self.why_no_parity,
        }


def parity_to_json(parity: Parity) -> dict[str, Any]:
    """Return a comparison of two trainings as JSON data, with the text of each row that did not pass."""
    return {
        "passed": parity.passed,
        "quantities": len(parity.rows),
        "failures": [str(row) for row in parity.failures],
        "notes": list(parity.notes),
    }


def verification(plan: Plan, *, run: Run | None = None, beside_plain: bool = True) -> Verification:
    """Train with the plan on the available card, in fresh processes, and measure.

    Args:
        run: starts a process with the worker; None for `run_in_process`.
        beside_plain: also time the baseline, and compare the results of the two trainings.

    Raises:
        MeasurementError: if the plan cannot be run on this machine.
    """
    run = run or run_in_process
    cap_bytes = None
    if plan.usable_bytes is not None:
        cap_bytes = plan.usable_bytes - (plan.peak.total_bytes - plan.peak.reserved_bytes)
    options = () if cap_bytes is None else ("--cap", str(cap_bytes))
    planned = _trained(run(plan, options))
    if isinstance(planned, RanOut):
        planned = _with_location(planned, run(plan, (*options, "--find-op")))
    plain: Ran | RanOut | None = None
    parity, why = None, ""
    if beside_plain and isinstance(planned, Ran):
        plain = _trained(run(dataclasses.replace(plan, decisions=()), ())) if plan.decisions else planned
        parity, why = _parity(plan, plain, run)
    known = profiles.matching(planned.device)
    return Verification(
        plan=plan,
        cap_bytes=cap_bytes,
        planned=planned,
        plain=plain,
        parity=parity,
        why_no_parity=why,
        same_card=known is None or known.name == plan.card,
    )


def _parity(plan: Plan, plain: Ran | RanOut, run: Run) -> tuple[Parity | None, str]:
    """Return the comparison of the trainings, or None and the reason."""
    if not plan.decisions:
        return None, "the plan is the baseline itself"
    if isinstance(plain, RanOut):
        return None, 'the baseline does not fit this card: use rewrite.verify(..., device="cpu") to compare on the host'
    parity = run(plan, ("--parity",))
    if not isinstance(parity, Parity):
        raise MeasurementError(
            f"the process that compares the two trainings returned a {type(parity).__name__} instead of a Parity"
        )
    # If copies ran out of memory, nothing was compared there. If something else failed too, that is a result.
    if any(_OUT_OF_MEMORY in row.why for row in parity.failures):
        others = [row for row in parity.failures if _OUT_OF_MEMORY not in row.why]
        if not others:
            return None, 'the copies do not fit this card: use rewrite.verify(..., device="cpu") to compare on the host'
    return parity, ""


def _trained(outcome: Outcome) -> Ran | RanOut:
    if isinstance(outcome, Parity):
        raise MeasurementError("the process that measures a training returned a comparison instead of measurements")
    return outcome


def _with_location(first: RanOut, second: Outcome) -> RanOut:
    """Add the location that the second run found to the result of the first run.

    The message is that of the first run, because recording the location takes some memory itself.
    """
    return dataclasses.replace(first, place=second.place) if isinstance(second, RanOut) else first


def _promised(name: str, promised: int, measured: int | None) -> Quantity:
    kept = None if measured is None else measured <= TOLERANCE * promised
    return Quantity(name=name, promised=promised, measured=measured, kept=kept)


def run_in_process(
    plan: Plan, options: Sequence[str], *, command: Sequence[str] = RUN_ON_CARD, execute: Execute | None = None
) -> Outcome:
    """Run `planner.rewrite.on_gpu.worker` in its own process.

    Args:
        command: the command that starts the worker. Tests pass another command that takes the same arguments.
        execute: runs a command; None for `subprocess.run`.

    Raises:
        MeasurementError: if the process ended without a result.
    """
    return outcome_from_json(result_of_process(plan, options, command=command, execute=execute))


def result_of_process(
    plan: Plan, options: Sequence[str], *, command: Sequence[str], execute: Execute | None = None
) -> dict[str, Any]:
    """Return the JSON data that a worker writes. Its arguments are a plan, the path of the result, and the options.

    Raises:
        MeasurementError: if the process ended without a result.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, result, log = (pathlib.Path(folder) / name for name in ("plan.json", "result.json", "log"))
        plan.save(path)
        with log.open("wb") as output:
            code = (execute or _execute)([*command, str(path), str(result), *options], output)
        if code == 0:
            return json.loads(result.read_text())
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-_ERROR_LINES:]
        why = "it took too long" if code is None else f"it ended with exit code {code} and printed nothing"
        why = f"the process that trains with the plan gave no result: {why}"
        raise MeasurementError(" | ".join(last) or why)


def _execute(command: list[str], output: BinaryIO) -> int:
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False).returncode
