"""Compare the scratch memory of kernels, op by op, with the registered formulas (`planner/workspaces`).

    python -m benchmarks.workspaces_gpu --out DIR [--gpu NAME] [--seconds 300] [--programs NAME ...] [--list]
                                        [--predict-only]

Each program runs twice, the second time with the allocator's history read around every op. Each call appends one line
of JSON to DIR/workspaces.jsonl: op, arguments, measured blocks in order, the formula's blocks, and whether they are
equal. With --predict-only the programs run on the meta device, and only the formulas are evaluated. Programs that DIR
already has are left out.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import torch

from benchmarks.card import results
from benchmarks.card.environment import hardware, software
from benchmarks.card.op_blocks import Event, Events, run_program
from benchmarks.card.programs import NEEDS_A_CARD, PROGRAMS
from planner.profiles.device import DeviceProfile
from planner.profiles.finding import UNLISTED
from planner.workload.cards import GENERIC, resolve_card


def cuda_events() -> list[Event]:
    """Returns the allocator events of this process so far. Recording must be on."""
    entries = torch.cuda.memory._snapshot()["device_traces"][0]
    return [
        (entry["action"], entry.get("addr", 0), entry["size"]) for entry in entries if entry["action"] != "snapshot"
    ]


def restart_recording() -> None:
    """Clear the history: a short one is read faster."""
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(enabled=None)
    torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=sys.maxsize)


def rows_of(
    name: str, device: str, events: Events | None, card: DeviceProfile, restart: Callable[[], None]
) -> Iterator[dict[str, object]]:
    """Yields the rows of one program. If it fails, the last row has the error."""
    try:
        restart()
        found = run_program(PROGRAMS[name], device, events, card)
        restart()
        for row in found:
            yield {"program": name, **row, "error": None}
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:  # reported in a row
        message = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        yield {"program": name, "op": None, "error": message}


def summary(rows: list[dict]) -> str:
    """Formats, for each op, how many calls match the formula, how many do not, and how many have no formula."""
    counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for row in rows:
        if "equal" in row:
            kind = {True: "equal", False: "different", None: "took scratch" if row["scratch"] else "took none"}
            counts[row["op"]][kind[row["equal"]]] += 1
    lines = [f"{op:60s} {dict(kinds)}" for op, kinds in sorted(counts.items()) if set(kinds) - {"equal"}]
    total = sum((kinds for kinds in counts.values()), collections.Counter())
    failed = sum(row["error"] is not None for row in rows)
    return "\n".join([*lines, f"calls: {dict(total)}; programs that failed: {failed}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--gpu")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no program starts later than this")
    parser.add_argument("--programs", nargs="+", metavar="NAME", choices=list(PROGRAMS))
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--predict-only", action="store_true")
    options = parser.parse_args()
    names = options.programs or list(PROGRAMS)
    if options.list:
        print("\n".join(names))
        return
    if options.out is None:
        raise SystemExit("give --out DIR, the folder for the results")
    until = time.monotonic() + options.seconds
    card = resolve_card(options.gpu, None)
    if card.name in (GENERIC, UNLISTED):
        raise SystemExit("no CUDA card with a profile is here: name one, such as --gpu h100")
    path = options.out / ("workspaces-predicted.jsonl" if options.predict_only else "workspaces.jsonl")
    if options.predict_only:
        names = [name for name in names if name not in NEEDS_A_CARD]
        device, about, events, restart = "meta", software(), None, lambda: None
    else:
        device, events, restart = "cuda", cuda_events, restart_recording
        torch.cuda.init()
        about = {**software(), **hardware()}
    todo = results.still_to_do(names, results.rows(path), "program")
    print(f"{len(todo)} of {len(names)} programs to do, formulas for {card.name}", flush=True)
    for name in todo:
        if time.monotonic() > until:
            break
        for row in rows_of(name, device, events, card, restart):
            results.append(path, {"card": card.name, **{k: about[k] for k in ("date", "torch")}, **row})
        if device == "cuda":
            torch.cuda.synchronize()  # raises after a CUDA fault, which ends this process; run again to go on
    print(summary(results.rows(path)), flush=True)


if __name__ == "__main__":
    main()
