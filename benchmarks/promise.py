"""Train plans for many budgets on this machine's CUDA card, each under its memory cap, and count the kept promises.

    python -m benchmarks.promise --out DIR [--cases NAME ...] [--gpu NAME] [--seconds 600] [--workers 4] [--plan-only]

Plans are computed once, in parallel processes that do not use the card, and saved in DIR/plans. They are then trained
one at a time, each in a fresh process (`on_gpu.verification`). Each (model, budget) appends one line of JSON to
DIR/promise.jsonl. Pairs that DIR already has are not measured again; pairs that failed before are tried again, last.
The baseline of each model is trained once, for the slowdown.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.card import results
from benchmarks.card.budgets import CASES, Case, pairs
from benchmarks.card.environment import card_name, software
from benchmarks.card.plan_case import AS_IT_IS
from benchmarks.card.processes import PROCESSES, end_with_this_process
from planner.errors import PlannerError
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import format_size
from planner.profiles.process_memory import driver_version
from planner.rewrite.on_gpu.verification import Run, Verification, run_in_process, verification
from planner.rewrite.on_gpu.worker import Ran

PLAN_SECONDS, RUN_SECONDS = 300.0, 240.0
BYTES = ("allocated", "reserved", "total")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run."""

    out: pathlib.Path
    gpu: str
    until: float
    """Deadline in seconds of `time.monotonic()`: nothing starts later."""
    workers: int
    about: dict[str, Any]
    """Fields of every row that describe the machine."""

    def plan_path(self, name: str, budget: str) -> pathlib.Path:
        """File of the plan of a case for a budget."""
        return self.out / "plans" / f"{name}-{budget.replace('%', '-percent')}.json"


class NoAnswerError(Exception):
    """Planning or training failed. The message is the last line that the process printed."""


def pair_name(case: Case, budget: str) -> str:
    return f"{case.name} at {budget}"


def plan_in_process(case: Case, budget: str, settings: Settings) -> Plan:
    """Returns the saved plan. If there is none, computes and saves it.

    Raises:
        NoAnswerError: planning failed.
    """
    path = settings.plan_path(case.name, budget)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        errors = path.with_suffix(".errors")
        command = [sys.executable, "-m", "benchmarks.card.plan_case", case.name, budget, str(path)]
        with errors.open("wb") as output:
            code = PROCESSES.run([*command, "--gpu", settings.gpu], output=output, seconds=PLAN_SECONDS)
        if code != 0:
            lines = errors.read_text(errors="replace").strip().splitlines()
            last = lines[-1] if lines else f"exit code {code} without a message"
            raise NoAnswerError(f"no plan after {PLAN_SECONDS:.0f} s" if code is None else last)
        errors.unlink()
    return Plan.load(path)


def train_in_process(plan: Plan, options: Any) -> Any:
    """Calls `planner.rewrite.on_gpu.verification.run_in_process` so that its process ends with this one."""
    return run_in_process(
        plan, options, execute=lambda command, output: PROCESSES.run(command, output=output, seconds=RUN_SECONDS)
    )


def run_pairs(wanted: list[tuple[Case, str]], settings: Settings, make_plan: Callable, train: Run) -> Iterator[dict]:
    """Yields rows as pairs are done. Plans are computed a few pairs ahead of the training."""
    with concurrent.futures.ThreadPoolExecutor(settings.workers) as pool:
        waiting, ahead = iter(wanted), []

        def begin() -> None:
            pair = next(waiting, None)
            if pair is not None and time.monotonic() < settings.until:
                ahead.append((pair, pool.submit(make_plan, *pair, settings)))

        for _ in range(2 * settings.workers):
            begin()
        plain: dict[str, float | None] = {}
        while ahead:
            (case, budget), future = ahead.pop(0)
            began = time.monotonic()
            about = {"pair": pair_name(case, budget), "case": case.name, "budget": budget, **settings.about}
            try:
                plan = future.result()
                row = {**about, **_measured(plan, case, plain, settings, make_plan, train)}
            except (NoAnswerError, PlannerError) as error:
                row = {**about, "error": str(error)}
            begin()
            yield {**row, "seconds": round(time.monotonic() - began, 1)}


def _measured(
    plan: Plan, case: Case, plain: dict[str, float | None], settings: Settings, make_plan: Callable, train: Run
) -> dict[str, Any]:
    """Returns the measured part of a row. If no plan fits, that is the result, and nothing is trained."""
    about = _promise(plan)
    if not plan.fits:
        return {**about, "measured": None, "kept": None, "error": None}
    if case.name not in plain:
        ran = train(make_plan(case, AS_IT_IS, settings), ())
        plain[case.name] = ran.step_ms if isinstance(ran, Ran) else None
    return {**about, **_outcome(verification(plan, run=train, beside_plain=False), plain[case.name])}


def _promise(plan: Plan) -> dict[str, Any]:
    """Returns the fields of a row that state the plan and its promise."""
    peak = plan.peak
    return {
        "card": plan.card,
        "card_source": plan.card_source,
        "model": plan.model.name,
        "parameters": plan.model.parameters,
        "vram_bytes": plan.vram_bytes,
        "fits": plan.fits,
        "plan": [decision.describe() for decision in plan.decisions],
        "promised": {
            "allocated_bytes": peak.allocated_bytes,
            "reserved_bytes": peak.reserved_bytes,
            "total_bytes": peak.total_bytes,
            "step_ms": round(peak.step_ns / 1e6, 3),
            "slowdown": round(plan.slowdown, 4),
        },
    }


def _outcome(found: Verification, plain_ms: float | None) -> dict[str, Any]:
    if not isinstance(found.planned, Ran):
        return {"measured": None, "out_of_memory": dataclasses.asdict(found.planned), "kept": False, "error": None}
    ran = found.planned
    return {
        "cuda_name": ran.device,
        "measured": {
            "allocated_bytes": ran.allocated_bytes,
            "reserved_bytes": ran.reserved_bytes,
            "total_bytes": ran.total_bytes,
            "total_source": ran.total_source,
            "step_ms": round(ran.step_ms, 3),
            "step_ms_spread": round(ran.step_ms_spread, 3),
            "slowdown": None if plain_ms is None else round(ran.step_ms / plain_ms, 4),
            "losses": list(ran.losses),
        },
        "out_of_memory": None,
        "kept": found.kept,
        "error": None,
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """Returns a table with one row for each pair, and the number of kept promises in its title."""
    done = [row for row in rows if row.get("error") is None]
    trained = [row for row in done if row["fits"]]
    kept = sum(bool(row["kept"]) for row in trained)
    shown = Table(
        title=f"{kept} of {len(trained)} promises kept; no plan fits {len(done) - len(trained)} of the budgets"
    )
    for name in (
        "model at budget",
        "promised",
        "promised over measured: allocated",
        "reserved",
        "total",
        "slowdown",
        "",
    ):
        shown.add_column(name, justify="left" if name in ("model at budget", "") else "right")
    for row in done:
        shown.add_row(*_cells(row))
    for row in rows:
        if row.get("error") is not None:
            shown.add_row(row["pair"], *[""] * 5, row["error"])
    return shown


def _cells(row: dict[str, Any]) -> list[str]:
    promised, measured = row["promised"], row["measured"]
    size = format_size(promised["total_bytes"])
    if not row["fits"]:
        return [row["pair"], size, "", "", "", "", "no plan fits"]
    if measured is None:
        return [row["pair"], size, "", "", "", "", "OUT OF MEMORY"]
    shares = [f"{promised[f'{name}_bytes'] / measured[f'{name}_bytes'] - 1:+.2%}" for name in BYTES]
    slowdown = "-" if measured["slowdown"] is None else f"{promised['slowdown']:.2f} / {measured['slowdown']:.2f}"
    return [row["pair"], size, *shares, slowdown, "kept" if row["kept"] else "BROKEN"]


def plan_all(wanted: list[tuple[Case, str]], settings: Settings) -> int:
    """Compute the plans only. Returns their number."""
    made = 0
    with concurrent.futures.ThreadPoolExecutor(settings.workers) as pool:
        for (case, budget), found in zip(
            wanted, pool.map(functools.partial(_plan_only, settings), wanted), strict=True
        ):
            made += isinstance(found, Plan)
            print(f"{pair_name(case, budget):36s} {_in_brief(found)}", flush=True)
    return made


def _in_brief(found: Plan | str) -> str:
    if isinstance(found, str):
        return found
    return f"{'fits' if found.fits else 'no plan fits'}, {found.seconds:.0f} s"


def _plan_only(settings: Settings, pair: tuple[Case, str]) -> Plan | str:
    if time.monotonic() > settings.until:
        return "no time left"
    try:
        return plan_in_process(*pair, settings)
    except (NoAnswerError, PlannerError) as error:
        return str(error)


def main() -> int:
    """Returns 0 if all promises that were measured are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--cases", nargs="+", metavar="NAME", choices=list(CASES))
    parser.add_argument("--gpu", help="profile or TOML file (default: this machine's CUDA card)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="nothing starts later than this")
    parser.add_argument("--workers", type=int, default=max(1, min(5, (os.cpu_count() or 1) // 3)))
    parser.add_argument("--plan-only", action="store_true", help="compute the plans only; needs no card")
    options = parser.parse_args()
    end_with_this_process()
    settings = Settings(
        out=options.out,
        gpu=card_name(options.gpu),
        until=time.monotonic() + options.seconds,
        workers=options.workers,
        about={**software(), "driver": None if options.plan_only else driver_version()},
    )
    file = settings.out / "promise.jsonl"
    wanted = [pair for pair in pairs() if not options.cases or pair[0].name in options.cases]
    if options.plan_only:
        return 0 if plan_all(wanted, settings) == len(wanted) else 1
    names = {pair_name(*pair): pair for pair in wanted}
    todo = results.still_to_do(list(names), results.rows(file), "pair")
    print(f"{len(todo)} of {len(names)} promises to measure on {settings.gpu}", flush=True)
    for row in run_pairs([names[name] for name in todo], settings, plan_in_process, train_in_process):
        results.append(file, row)
        print(f"{row['pair']:36s} {row['error'] or {True: 'kept', False: 'BROKEN', None: 'no plan fits'}[row['kept']]}")
    latest = {row["pair"]: row for row in results.rows(file)}
    Console(width=150).print(table(list(latest.values())))
    return 0 if all(row.get("error") is None and row["kept"] is not False for row in latest.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
