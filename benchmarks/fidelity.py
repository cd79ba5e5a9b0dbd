"""Compare promised and measured memory of training steps, case by case, on this machine's CUDA card.

    python -m benchmarks.fidelity --out DIR [--cases NAME ...] [--core] [--list] [--predict-only] [--gpu NAME]
                                  [--seconds 600] [--case-seconds 150] [--workers 4]

For each case, one process that has not used CUDA rehearses two steps, and another one trains three steps from an empty
allocator. The recorded stream of allocations is then aligned with the rehearsed one. Each case appends one line of JSON
to DIR/fidelity.jsonl (DIR/predicted.jsonl with --predict-only), its stream to DIR/streams.jsonl.gz, and a few cases
write their whole history to DIR/histories. Cases that DIR already has are not measured again; cases that failed before
are tried again, last.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from benchmarks.card import results
from benchmarks.card.cases import CASES
from benchmarks.card.environment import card_name
from benchmarks.card.history import append_stream, write_history
from benchmarks.card.processes import PROCESSES, end_with_this_process

MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run."""

    out: pathlib.Path
    gpu: str
    predict_only: bool
    until: float
    """Deadline in seconds of `time.monotonic()`: no case starts later."""
    case_seconds: float
    workers: int

    @property
    def rows(self) -> pathlib.Path:
        """File of the results."""
        return self.out / ("predicted.jsonl" if self.predict_only else "fidelity.jsonl")


RunCase = Callable[[str, Settings, pathlib.Path], dict]
"""Called with (case, settings, folder for temporary files); returns the answer of `benchmarks.card.run_case`."""


def run_in_process(name: str, settings: Settings, folder: pathlib.Path) -> dict:
    """Run a case in its own process. Returns an answer also if the process fails."""
    result, errors = folder / f"{name}.json", folder / f"{name}.errors"
    command = [sys.executable, "-m", "benchmarks.card.run_case", name, "--gpu", settings.gpu]
    command += ["--result", str(result), "--lock", str(folder / "lock")]
    command += ["--predict-only"] if settings.predict_only else []
    with errors.open("wb") as output:
        code = PROCESSES.run(command, output=output, seconds=settings.case_seconds)
    if code is None:
        return failed(name, f"not done after {settings.case_seconds:.0f} s")
    if code != 0:
        lines = errors.read_text(errors="replace").strip().splitlines()
        return failed(name, f"exit code {code}: {lines[-1] if lines else 'it printed nothing'}")
    return json.loads(result.read_text())


def failed(name: str, error: str) -> dict:
    """Returns the answer for a case that failed."""
    return {"row": {"case": name, "error": error}, "step_ends": [], "sizes": [], "history": None}


def run_cases(names: list[str], settings: Settings, run_case: RunCase) -> Iterator[dict]:
    """Yields a row as soon as a case is done. The row is written to the file first."""
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(settings.workers) as pool:
        waiting = iter(names)
        running = set()

        def begin() -> None:
            name = next(waiting, None)
            if name is not None and time.monotonic() < settings.until:
                running.add(pool.submit(run_case, name, settings, pathlib.Path(folder)))

        for _ in range(settings.workers):
            begin()
        while running:
            ended, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in ended:
                running.remove(future)
                begin()
                yield _written(future.result(), settings)


def _written(answer: dict, settings: Settings) -> dict:
    """Write the answer to the files, and return its row."""
    row = answer["row"]
    if answer["history"] is not None:
        write_history(settings.out / "histories" / f"{row['case']}.json.gz", answer["history"])
    if answer["sizes"]:
        append_stream(settings.out / "streams.jsonl.gz", row["case"], answer["step_ends"], answer["sizes"])
    results.append(settings.rows, row)
    return row


def line(row: dict) -> str:
    """Formats a row."""
    if row["error"] is not None:
        return f"{row['case']:36s} {row['error']}"
    promised = row["promised"]
    text = f"{row['case']:36s} {promised['allocated_bytes'] / MIB:9,.1f} {promised['reserved_bytes'] / MIB:9,.0f}"
    text += f" {promised['total_bytes'] / MIB:9,.0f} {promised['step_ms']:8.1f}"
    if "measured" in row:
        errors, share = row["errors"], row["stream"]["matched_share"]
        text += f" | {errors['allocated_bytes']:+8.3%} {errors['reserved_bytes']:+8.3%} {errors['total_bytes']:+8.3%}"
        text += f" {row['measured']['step_ms']:8.1f} ms | {'-' if share is None else f'{share:.4%}'}"
    return f"{text} | {row['seconds']:.0f} s"


def chosen(options: argparse.Namespace) -> list[str]:
    """Returns the names of the cases to run."""
    if unknown := [name for name in options.cases or () if name not in CASES]:
        raise SystemExit(f"case '{unknown[0]}' is unknown: --list shows all")
    return options.cases or [name for name, case in CASES.items() if case.core or not options.core]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--cases", nargs="+", metavar="NAME")
    parser.add_argument("--core", action="store_true", help="run only the most informative cases")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and exit")
    parser.add_argument("--predict-only", action="store_true", help="rehearse only; needs no card")
    parser.add_argument("--gpu", help="profile or TOML file (default: this machine's CUDA card)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no case starts later than this")
    parser.add_argument("--case-seconds", type=float, default=150.0)
    parser.add_argument("--workers", type=int, default=max(1, min(6, (os.cpu_count() or 1) // 3)))
    options = parser.parse_args()
    names = chosen(options)
    if options.list:
        print("\n".join(names))
        return
    if options.out is None:
        raise SystemExit("give --out DIR, the folder for the results")
    end_with_this_process()
    settings = Settings(
        out=options.out,
        gpu=card_name(options.gpu),
        predict_only=options.predict_only,
        until=time.monotonic() + options.seconds,
        case_seconds=options.case_seconds,
        workers=options.workers,
    )
    todo = results.still_to_do(names, results.rows(settings.rows), "case")
    print(f"{len(todo)} of {len(names)} cases to do, predicted for {settings.gpu}", flush=True)
    for row in run_cases(todo, settings, run_in_process):
        print(line(row), flush=True)


if __name__ == "__main__":
    main()
