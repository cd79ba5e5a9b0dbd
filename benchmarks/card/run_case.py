"""Predict and measure one case: this process rehearses and compares, and a second one trains on the card.

    python -m benchmarks.card.run_case NAME --gpu h100 --result RESULT.json --lock FILE [--predict-only]

Cases may run in parallel. The one that measures holds the lock, so that only one process at a time uses the card.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import pathlib
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.card.cases import CASES, Case
from benchmarks.card.environment import software
from benchmarks.card.history import signed
from benchmarks.card.measure_case import READY
from benchmarks.card.measuring import Measured
from benchmarks.card.predicting import Prediction, predict
from benchmarks.card.rows import facts, measured_row, predicted_row
from planner.errors import MeasurementError
from planner.profiles.device import DeviceProfile
from planner.workload.cards import resolve_card

ERROR_LINES = 3
MEASURE = (sys.executable, "-m", "benchmarks.card.measure_case")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """Result of a case, for the files."""

    row: dict[str, Any]
    step_ends: list[int] = dataclasses.field(default_factory=list)
    sizes: list[int] = dataclasses.field(default_factory=list)
    """Recorded stream in bytes; empty if nothing was measured."""
    history: dict[str, Any] | None = None


def run(case: Case, card: DeviceProfile, *, lock: pathlib.Path, predict_only: bool) -> Answer:
    """Predict, measure and compare.

    Raises:
        PlannerError: the case cannot be rehearsed.
        MeasurementError: there is no card, or the training step failed.
    """
    began = time.perf_counter()
    about = {**facts(case, case.workload("meta"), card), **software()}
    if predict_only:
        row = predicted_row(about, predict(case, card))
        return Answer(row={**row, "seconds": round(time.perf_counter() - began, 1)})
    with measuring(case) as process:
        prediction = predict(case, card)
        hardware, measured = process.measure(lock)
    return answer(case, {**about, **hardware}, prediction, measured, began)


def answer(case: Case, about: dict[str, Any], prediction: Prediction, measured: Measured, began: float) -> Answer:
    """Returns the answer with both halves."""
    row = measured_row(about, prediction, measured)
    return Answer(
        row={**row, "seconds": round(time.perf_counter() - began, 1)},
        step_ends=measured.step_ends,
        sizes=signed(measured.history),
        history=measured.history if case.keep_history else None,
    )


@dataclasses.dataclass(frozen=True)
class Measuring:
    """A process that prepares a measurement."""

    process: subprocess.Popen
    result: pathlib.Path
    errors: pathlib.Path

    def measure(self, lock: pathlib.Path) -> tuple[dict[str, Any], Measured]:
        """Wait until the process is ready and the card is free, let it measure, and wait for its end."""
        for line in self.process.stdout:
            if line.strip() == READY:
                break
        with lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with contextlib.suppress(BrokenPipeError):  # it has already ended; its errors are reported below
                self.process.stdin.write("measure\n")
                self.process.stdin.close()
            code = self.process.wait()
        if code != 0:
            lines = self.errors.read_text(errors="replace").strip().splitlines()
            raise MeasurementError(f"exit code {code}: " + " | ".join(lines[-ERROR_LINES:]))
        return pickle.loads(self.result.read_bytes())


@contextlib.contextmanager
def measuring(case: Case) -> Iterator[Measuring]:
    """Start the process, and end it on every way out."""
    with tempfile.TemporaryDirectory() as folder:
        result, errors = pathlib.Path(folder) / "result.pickle", pathlib.Path(folder) / "errors"
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                [*MEASURE, case.name, str(result)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        try:
            yield Measuring(process, result, errors)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def main() -> None:
    """Run the case and write the answer as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--gpu", required=True)
    parser.add_argument("--result", type=pathlib.Path, required=True)
    parser.add_argument("--lock", type=pathlib.Path, required=True)
    parser.add_argument("--predict-only", action="store_true")
    options = parser.parse_args()
    card = resolve_card(options.gpu, None)
    found = run(CASES[options.name], card, lock=options.lock, predict_only=options.predict_only)
    options.result.write_text(json.dumps(dataclasses.asdict(found)))


if __name__ == "__main__":
    main()
