"""Thousands of damaged files and odd command lines: no traceback, no hang, no wrong exit code.

By default a few cases run. `.ci/run fuzz` runs 2,000, from a seed that it prints:

    PLANNER_FUZZ_CASES=2000 PLANNER_FUZZ_SEED=7 pytest tests/fuzz
    PLANNER_FUZZ_ONLY=plan-123 pytest tests/fuzz    # one case again, as a failure names it
"""

from __future__ import annotations

import os
import pathlib
import random
import time

import pytest

from tests.fuzz.cases import KINDS

CASES = int(os.environ.get("PLANNER_FUZZ_CASES", "100"))
SEED = int(os.environ.get("PLANNER_FUZZ_SEED", "0"))
ONLY = os.environ.get("PLANNER_FUZZ_ONLY", "")
SECONDS = 30
"""A case that takes longer counts as a hang."""
CORPUS = pathlib.Path(__file__).with_name("corpus.txt").read_text().split()
"""Cases that once failed. They always run."""

pytestmark = pytest.mark.slow


def cases_of(kind: str) -> list[str]:
    if ONLY:
        return [ONLY] if ONLY.startswith(f"{kind}-") else []
    number = max(1, round(CASES * KINDS[kind][1]))
    return [case for case in CORPUS if case.startswith(f"{kind}-")] + [f"{kind}-{SEED + n}" for n in range(number)]


@pytest.mark.parametrize("kind", KINDS)
def test_no_input_ends_in_a_traceback_a_hang_or_a_wrong_exit_code(kind, tmp_path, monkeypatch, capfd):
    run, _ = KINDS[kind]
    for case in cases_of(kind):
        folder = tmp_path / case
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        began = time.perf_counter()
        try:
            run(random.Random(case), folder)
        except Exception as error:
            error.add_note(f"PLANNER_FUZZ_ONLY={case}")
            raise
        _, error = capfd.readouterr()
        assert "Traceback" not in error and "bug of the planner" not in error, f"{case}: {error}"
        assert "\x1b" not in error and len(error) < 6000, f"{case}: {error[:2000]}"
        assert time.perf_counter() - began < SECONDS, f"{case} took {time.perf_counter() - began:.0f} s"
