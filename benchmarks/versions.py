"""Compare the planning time of two checkouts of this project, in pairs of runs that take turns.

    python -m benchmarks.versions OLD NEW [--pairs 5] [--plan "WORDS OF A plan COMMAND"] ...

OLD and NEW are folders with a checkout each. Both run in this Python environment, with their folder first on the import
path. The table shows the median over pairs of new divided by old: CPU seconds of the process and its children, wall
time, and the seconds that the plan states. A pair whose two plans differ in their promised bytes is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import shlex
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

PLANS = (
    "examples/roberta_84m --vram 6GiB --batch-size 64 --seq-len 128 --gpu rtx-2060",
    "examples/llama_8b --vram 141GB --batch-size 1 --seq-len 2048 --gpu h200",
)


class Run(NamedTuple):
    cpu_seconds: float
    wall_seconds: float
    planning_seconds: float


def run(folder: pathlib.Path, words: str) -> tuple[Run, int]:
    """Plan once in a new process; returns its times and the bytes that the plan promises."""
    code = "import sys; from planner.cli import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    before, began = os.times(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, *shlex.split(words), "--json"], cwd=folder, env=environment, text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    after, wall = os.times(), time.perf_counter() - began
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    plan = json.loads(done.stdout)
    return Run(cpu, wall, plan["seconds"]), plan["peak"]["total_bytes"]


def compare(old: pathlib.Path, new: pathlib.Path, words: str, pairs: int) -> Run:
    """Returns the median of new divided by old for each of the times."""
    ratios = []
    for number in range(pairs):
        order = (old, new) if number % 2 == 0 else (new, old)
        runs = {folder: run(folder, words) for folder in order}
        (before, promised), (after, promised_now) = runs[old], runs[new]
        if promised != promised_now:
            raise SystemExit(f"the two plans of '{words}' promise {promised:,} and {promised_now:,} bytes")
        ratios.append(Run(*(b / a for a, b in zip(before, after, strict=True))))
    return Run(*(statistics.median(values) for values in zip(*ratios, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=pathlib.Path, help="folder of the checkout to compare with")
    parser.add_argument("new", type=pathlib.Path, help="folder of the checkout that is measured")
    parser.add_argument("--pairs", type=int, default=5, help="number of pairs of runs (5)")
    parser.add_argument("--plan", action="append", help="words of a plan command (two examples)")
    options = parser.parse_args()
    table = Table(
        title=f"new / old, torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPUs"
    )
    for column in ("plan", "CPU seconds", "wall time", "planning seconds"):
        table.add_column(column)
    for words in options.plan or PLANS:
        medians = compare(options.old.resolve(), options.new.resolve(), words, options.pairs)
        table.add_row(words, *(f"{value:.3f}" for value in medians))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
