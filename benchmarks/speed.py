"""Compare step times under one memory cap: our plan and common methods, each with the largest micro-batch that fits.

    python -m benchmarks.speed --out DIR [--cases NAME ...] [--gpu NAME] [--seconds 600]

Each run is a fresh process whose allocator may use the cap minus the card's context. It trains with bf16 autocast and
AdamW, one whole batch per step. Common methods are tried with the whole batch as one micro-batch, then with half, until
the step does not run out of memory. Each (model, cap, way) appends one line of JSON to DIR/speed.jsonl. Rows that DIR
already has are not measured again; rows that failed before are tried again, last.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.card import results
from benchmarks.card.budgets import CASES, Case
from benchmarks.card.environment import card_name, software
from benchmarks.card.peer_run import WAYS
from benchmarks.card.processes import PROCESSES, end_with_this_process
from benchmarks.promise import NoAnswerError, Settings, plan_in_process, train_in_process
from planner.errors import PlannerError
from planner.plan_types.sizes import parse_size
from planner.profiles.process_memory import driver_version
from planner.rewrite.on_gpu.worker import Ran
from planner.workload.cards import resolve_card

OURS = "ours"
RUN_SECONDS = 240.0
CAPS = {
    "roberta_84m": "4GiB",
    "gpt2_medium": "9GiB",
    "vit_large": "10GiB",
    "llama_1b": "26GiB",
    "unet": "3GiB",
    "resnet50": "10GiB",
    "t5_base": "8GiB",
    "gpt2_xl": "32GiB",
}
"""Memory cap of each model. Each is too small for the baseline."""

RunPeer = Callable[[Case, str, int, int], dict[str, Any]]
"""(case, way, micro-batch, cap of the allocator in bytes) -> the result of `benchmarks.card.peer_run.run`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """One way of training a model under a cap."""

    case: Case
    cap: str
    way: str

    @property
    def name(self) -> str:
        """Key of the row."""
        return f"{self.case.name} at {self.cap}: {self.way}"


def asked(names: list[str] | None) -> list[Asked]:
    """Returns all runs: our plan for every model first, then one method after the other."""
    return [
        Asked(case=CASES[name], cap=cap, way=way)
        for way in (OURS, *WAYS)
        for name, cap in CAPS.items()
        if not names or name in names
    ]


def run_peer_in_process(case: Case, way: str, micro_batch: int, cap_bytes: int) -> dict[str, Any]:
    """Run one method in its own process.

    Raises:
        NoAnswerError: the process failed, or took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, log = pathlib.Path(folder) / "result.json", pathlib.Path(folder) / "log"
        command = [sys.executable, "-m", "benchmarks.card.peer_run", case.name, way, str(micro_batch), str(result)]
        with log.open("wb") as output:
            code = PROCESSES.run([*command, "--cap", str(cap_bytes)], output=output, seconds=RUN_SECONDS)
        if code == 0:
            return json.loads(result.read_text())
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise NoAnswerError(f"not done after {RUN_SECONDS:.0f} s" if code is None else " ".join(last) or "no message")


def largest_that_fits(case: Case, way: str, cap_bytes: int, run_peer: RunPeer) -> dict[str, Any]:
    """Halves the micro-batch, from the whole batch on, until it fits. 'step_ms' is None if none fits."""
    micro_batch, ran_out = case.batch_size, []
    while True:
        found = run_peer(case, way, micro_batch, cap_bytes)
        if "out_of_memory" not in found:
            return {"micro_batch": micro_batch, "ran_out_at": ran_out, **found}
        ran_out.append(micro_batch)
        if micro_batch == 1:
            return {"micro_batch": None, "ran_out_at": ran_out, "step_ms": None}
        micro_batch = -(-micro_batch // 2)


def our_plan(one: Asked, settings: Settings) -> dict[str, Any]:
    """Plan for the cap, and train with the plan."""
    plan = plan_in_process(one.case, one.cap, settings)
    if not plan.fits:
        return {"step_ms": None, "plan": []}
    context_bytes = plan.peak.total_bytes - plan.peak.reserved_bytes
    ran = train_in_process(plan, ("--cap", str(plan.vram_bytes - context_bytes)))
    about = {"plan": [decision.describe() for decision in plan.decisions], "predicted_ms": plan.peak.step_ns / 1e6}
    if not isinstance(ran, Ran):
        return {**about, "step_ms": None, "out_of_memory": ran.message}
    return {
        **about, "step_ms": round(ran.step_ms, 3), "step_ms_spread": round(ran.step_ms_spread, 3),
        "allocated_bytes": ran.allocated_bytes, "reserved_bytes": ran.reserved_bytes, "losses": list(ran.losses),
    }  # fmt: skip


def run_all(
    wanted: list[Asked], settings: Settings, context_bytes: int, ours: Callable, run_peer: RunPeer
) -> Iterator[dict[str, Any]]:
    """Yields a row as soon as a run is done."""
    for one in wanted:
        if time.monotonic() > settings.until:
            return
        began = time.monotonic()
        row = {"name": one.name, "case": one.case.name, "cap": one.cap, "way": one.way, "card": settings.gpu}
        row = {**row, **settings.about}
        cap_bytes = parse_size(one.cap, device_bytes=None) - context_bytes
        try:
            if one.way == OURS:
                found = ours(one, settings)
            else:
                found = largest_that_fits(one.case, one.way, cap_bytes, run_peer)
            row = {**row, **found, "error": None}
        except (NoAnswerError, PlannerError) as error:
            row["error"] = str(error)
        yield {**row, "seconds": round(time.monotonic() - began, 1)}


def table(rows: list[dict[str, Any]]) -> Table:
    """Returns a table with a row for each model. Numbers in parentheses below 1 are faster than ours."""
    shown = Table(title="step time in ms (and relative to our plan at the same cap)")
    for name in ("model at cap", OURS, *WAYS):
        shown.add_column(name, justify="left" if name == "model at cap" else "right")
    by_model: dict[str, dict[str, dict]] = {}
    for row in rows:
        by_model.setdefault(f"{row['case']} at {row['cap']}", {})[row["way"]] = row
    for name, ways in by_model.items():
        ours_ms = (ways.get(OURS) or {}).get("step_ms")
        shown.add_row(name, *(_cell(ways.get(way), ours_ms) for way in (OURS, *WAYS)))
    return shown


def _cell(row: dict[str, Any] | None, ours_ms: float | None) -> str:
    if row is None:
        return ""
    if row.get("error") is not None:
        return "failed"
    if row["step_ms"] is None:
        return "out of memory"
    share = "" if row["way"] == OURS or ours_ms is None else f" ({row['step_ms'] / ours_ms:.2f})"
    micro_batch = "" if row["way"] == OURS else f", micro-batch {row['micro_batch']}"
    return f"{row['step_ms']:,.1f}{share}{micro_batch}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--cases", nargs="+", metavar="NAME", choices=list(CAPS))
    parser.add_argument("--gpu", help="profile or TOML file (default: this machine's CUDA card)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="nothing starts later than this")
    options = parser.parse_args()
    end_with_this_process()
    gpu = card_name(options.gpu)
    settings = Settings(
        out=options.out,
        gpu=gpu,
        until=time.monotonic() + options.seconds,
        workers=1,
        about={**software(), "driver": driver_version()},
    )
    file, all_asked = settings.out / "speed.jsonl", {one.name: one for one in asked(options.cases)}
    todo = results.still_to_do(list(all_asked), results.rows(file), "name")
    print(f"{len(todo)} of {len(all_asked)} to run on {gpu}", flush=True)
    context_bytes = resolve_card(gpu, None).context_bytes
    for row in run_all([all_asked[name] for name in todo], settings, context_bytes, our_plan, run_peer_in_process):
        results.append(file, row)
        print(f"{row['name']:48s} {row['error'] or _cell(row, None)}", flush=True)
    Console(width=170).print(table(list({row["name"]: row for row in results.rows(file)}.values())))


if __name__ == "__main__":
    main()
