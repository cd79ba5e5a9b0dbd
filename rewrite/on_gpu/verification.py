"""Hold a plan to its promise on a card: train by it in a fresh process under the budget, and compare.

The cap leaves the budget less the context that was promised to the allocator, so that the whole process stays inside.
Then the same step without the plan is timed, without a cap, where the card is large enough for it; and copies are
trained by the plan and without it, and compared (`rewrite.verify`). Each of the three has a process of its own, and
this one does not use the card.
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
"""What is measured may be so much of what was promised."""
RUN_ON_CARD = (sys.executable, "-m", "planner.rewrite.on_gpu.worker")
_ERROR_LINES = 3
_OUT_OF_MEMORY = "OutOfMemoryError"

Execute = Callable[[list[str], BinaryIO], "int | None"]
Run = Callable[[Plan, Sequence[str]], Outcome]
"""A plan and the options of `planner.rewrite.on_gpu.worker` -> what came of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantity:
    """One number that was promised."""

    name: str
    """'allocated', 'reserved', 'total', 'step time', 'slowdown'."""
    promised: float
    measured: float | None
    """In bytes, in milliseconds, or as a ratio; None: not measured."""
    kept: bool | None
    """None for what is told and not promised, and for what was not measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """What became of a plan on a card."""

    plan: Plan
    cap_bytes: int | None
    """What the allocator was allowed to take; None: no budget was given."""
    planned: Ran | RanOut
    """The step by the plan, under the cap."""
    plain: Ran | RanOut | None
    """The step as it is, with as much memory as the card has; None: not run."""
    parity: Parity | None
    """None: not compared."""
    why_no_parity: str = ""
    same_card: bool = True
    """Whether the card is the one that was planned for; else it stands for that one under the cap."""

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """What the plan promised or predicted, beside what was measured."""
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
        """Whether the step got through, in no more memory than promised, and trained as the step that it replaces."""
        measured = isinstance(self.planned, Ran)
        return measured and all(q.kept is not False for q in self.quantities) and self._trains_alike

    @property
    def _trains_alike(self) -> bool:
        return self.parity is None or self.parity.passed

    def _total(self, ran: Ran | None) -> Quantity:
        """Another card has another context: there the total is told, and nothing is promised of it."""
        found = _promised("total", self.plan.peak.total_bytes, None if ran is None else ran.total_bytes)
        if ran is None or not self.same_card:
            return dataclasses.replace(found, kept=None)
        inside = self.plan.vram_bytes is None or ran.total_bytes <= self.plan.vram_bytes
        return dataclasses.replace(found, kept=found.kept and inside)

    def to_json(self) -> dict[str, Any]:
        """Of the plan itself only what it promised."""
        parity = self.parity
        return {
            "kept": self.kept,
            "cap_bytes": self.cap_bytes,
            "same_card": self.same_card,
            "quantities": [dataclasses.asdict(quantity) for quantity in self.quantities],
            "planned": dataclasses.asdict(self.planned),
            "out_of_memory": isinstance(self.planned, RanOut),
            "plain": None if self.plain is None else dataclasses.asdict(self.plain),
            "parity": None
            if parity is None
            else {
                "passed": parity.passed,
                "quantities": len(parity.rows),
                "failures": [str(row) for row in parity.failures],
                "notes": list(parity.notes),
            },
            "why_no_parity": self.why_no_parity,
        }


def verification(plan: Plan, *, run: Run | None = None, beside_plain: bool = True) -> Verification:
    """Train by the plan on the card at hand, in fresh processes.

    Args:
        run: what starts them; None: processes of `planner.rewrite.on_gpu.worker`.
        beside_plain: also time the step as it is, and compare the training with it.

    Raises:
        MeasurementError: it cannot be run here; the message says why.
    """
    run = run or run_in_process
    cap_bytes = None
    if plan.vram_bytes is not None:
        cap_bytes = plan.vram_bytes - (plan.peak.total_bytes - plan.peak.reserved_bytes)
    options = () if cap_bytes is None else ("--cap", str(cap_bytes))
    planned = run(plan, options)
    if isinstance(planned, RanOut):
        planned = _with_place(planned, run(plan, (*options, "--find-op")))
    plain, parity, why = None, None, ""
    if beside_plain and isinstance(planned, Ran):
        plain = run(dataclasses.replace(plan, decisions=()), ()) if plan.decisions else planned
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
    """The comparison, or why there is none."""
    if not plan.decisions:
        return None, "the plan is the step as it is"
    if isinstance(plain, RanOut):
        return None, 'the step as it is does not fit this card: rewrite.verify(..., device="cpu") compares on the host'
    parity = run(plan, ("--parity",))
    if any(_OUT_OF_MEMORY in row.why for row in parity.failures):
        others = [row for row in parity.failures if _OUT_OF_MEMORY not in row.why]
        if not others:
            return None, 'the copies do not fit this card: rewrite.verify(..., device="cpu") compares on the host'
    return parity, ""


def _with_place(found: RanOut, again: Outcome) -> RanOut:
    """What the second run says of where; the first one says how much."""
    return dataclasses.replace(found, place=again.place) if isinstance(again, RanOut) else found


def _promised(name: str, promised: int, measured: int | None) -> Quantity:
    kept = None if measured is None else measured <= TOLERANCE * promised
    return Quantity(name=name, promised=promised, measured=measured, kept=kept)


def run_in_process(
    plan: Plan, options: Sequence[str], *, command: Sequence[str] = RUN_ON_CARD, execute: Execute | None = None
) -> Outcome:
    """Run `planner.rewrite.on_gpu.worker` in a process of its own.

    Args:
        command: what takes the arguments that it takes.
        execute: runs a command with its output in a file; returns the exit code, or None where it was ended.

    Raises:
        MeasurementError: it ended without a result.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, result, said = (pathlib.Path(folder) / name for name in ("plan.json", "result.json", "said"))
        plan.save(path)
        with said.open("wb") as output:
            code = (execute or _execute)([*command, str(path), str(result), *options], output)
        if code == 0:
            return outcome_from_json(json.loads(result.read_text()))
        last = [line for line in said.read_text(errors="replace").splitlines() if line.strip()][-_ERROR_LINES:]
        why = "it took too long" if code is None else f"it ended with exit code {code}"
        raise MeasurementError(" | ".join(last) or why)


def _execute(command: list[str], output: BinaryIO) -> int:
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False).returncode
