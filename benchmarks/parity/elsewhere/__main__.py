"""Compare trainings by plans with plain loops, in several processes, under trainers and with 8-bit optimizer state.

    python -m benchmarks.parity.elsewhere [--only processes | trainers | eight_bit ...] [--json FILE]

DistributedDataParallel and FSDP2 (sharded before the plan is applied, or afterwards) are compared with a plain loop
around the same wrapper, transformers' Trainer with the same Trainer without the plan, Lightning with the plain loop of
the judge, and 8-bit state with a plain loop that uses the optimizer of bitsandbytes. The exit code is 1 if a training
differs without an error, or fails with an error that is not the planner's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import pathlib
import sys
import time
from collections import Counter

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.parity.__main__ import listed
from benchmarks.parity.elsewhere import eight_bit, processes, trainers
from benchmarks.parity.judge import OUTCOMES, REFUSED, ROUNDED, Outcome
from planner.assemble import versions

WAYS = {"processes": processes.outcomes, "trainers": trainers.outcomes, "eight_bit": eight_bit.outcomes}


def table_of(found: list[Outcome]) -> Table:
    """Returns the numbers of trainings by way and outcome."""
    shown = [result for result in OUTCOMES if any(outcome.result == result for outcome in found)]
    counts = Counter((outcome.way, outcome.result) for outcome in found)
    table = Table("way", "techniques", *shown)
    for way in dict.fromkeys(outcome.way for outcome in found):
        techniques = {outcome.technique for outcome in found if outcome.way == way}
        table.add_row(way, str(len(techniques)), *(str(counts[way, result] or "") for result in shown))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=WAYS, default=list(WAYS), help="what to judge")
    parser.add_argument("--json", type=pathlib.Path, help="file for all outcomes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("planner").setLevel(logging.WARNING)
    console, began = Console(width=170), time.perf_counter()
    found = [outcome for way in options.only for outcome in WAYS[way]()]
    if options.json is not None:
        options.json.write_text(json.dumps([dataclasses.asdict(outcome) for outcome in found], indent=1))
    listed(console, found, *(result for result in OUTCOMES if result not in ("equal bits", ROUNDED)))
    console.print(table_of(found))
    for reason in (*trainers.SKIPPED, *eight_bit.SKIPPED):
        console.print(f"skipped: {reason}")
    rounded = max((outcome.size for outcome in found if outcome.result == ROUNDED), default=0.0)
    refused = sum(outcome.result == REFUSED for outcome in found)
    used = ", ".join(f"{name} {version}" for name, version in versions().items())
    seconds = time.perf_counter() - began
    console.print(f"{len(found)} trainings, {refused} refused, largest rounding {rounded:.1e}, {seconds:.0f} s; {used}")
    return int(any(outcome.failed for outcome in found))


if __name__ == "__main__":
    sys.exit(main())
