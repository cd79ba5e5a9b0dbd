"""Plant faults in copies of this checkout, one at a time, and report which of them the tests see.

    python -m benchmarks.faults [NAME ...] [--list]

Each fault is a small wrong change (`benchmarks/faults/in_*.py`). It is killed if one of the tests that it names fails.
Exit code 1: a fault survived, no longer fits the source (stale), or made its tests impossible to run.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import sys
import time

from benchmarks.faults.listed import FAULTS
from benchmarks.faults.running import BaselineFails, Verdict, import_libraries, outcomes

ROOT = pathlib.Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to plant, or prefixes of names; default: all")
    parser.add_argument("--list", action="store_true", help="print the faults, and plant none")
    options = parser.parse_args()
    if unknown := [name for name in options.names if not any(fault.name.startswith(name) for fault in FAULTS)]:
        parser.error(f"there is no fault '{unknown[0]}': --list shows all")
    chosen = [fault for fault in FAULTS if not options.names or fault.name.startswith(tuple(options.names))]
    if options.list:
        for fault in chosen:
            print(f"{fault.name:44} {fault.path}: {fault.why}")
        return 0
    counts: collections.Counter[Verdict] = collections.Counter()
    began = time.perf_counter()
    import_libraries()
    try:
        for outcome in outcomes(chosen, ROOT):
            counts[outcome.verdict] += 1
            print(f"{outcome.fault.name:44} {outcome.verdict.value:8} {outcome.detail}", flush=True)
    except BaselineFails as error:
        print(f"the tests fail without any fault:\n{error}", file=sys.stderr)
        return 1
    listed = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items())
    print(f"{len(chosen)} faults: {listed}; {time.perf_counter() - began:.0f} s")
    return 0 if counts.keys() <= {Verdict.KILLED} else 1


if __name__ == "__main__":
    sys.exit(main())
