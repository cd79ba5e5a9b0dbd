"""Measure one case in its own process. It uses the card only after it reads a line from standard input.

    python -m benchmarks.card.measure_case NAME RESULT.pickle

Imports and building the model take longer than the measurement, so they come first; then it prints 'ready'.
"""

from __future__ import annotations

import pathlib
import pickle
import sys

from benchmarks.card.cases import CASES
from benchmarks.card.device import Device, RecordingCuda
from benchmarks.card.environment import hardware
from benchmarks.card.measuring import measure

READY = "ready"


def main(name: str, result: pathlib.Path, device: Device) -> int:
    """Returns 0 if the case was measured, 3 if standard input ended first."""
    case = CASES[name]
    work = case.workload("cpu")
    print(READY, flush=True)
    if not sys.stdin.readline():
        return 3
    measured = measure(case, work, device)
    facts = hardware() if device.name == "cuda" else {}
    result.write_bytes(pickle.dumps((facts, measured)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], pathlib.Path(sys.argv[2]), RecordingCuda()))
