"""Writes the files that need the recordings of a plan: the page (--report) and the memory snapshots (--snapshot)."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Iterator

from planner.cli.output_files import baseline_path
from planner.cli.page.page import page
from planner.cli.page.recorded import PlanRecordings, Recorded, rehearse_plan, rehearse_stages
from planner.errors import WorkloadError
from planner.estimate.memory_history import snapshot_origins
from planner.files.writing import write_atomically
from planner.plan_types.plan import Plan
from planner.plan_types.tradeoff import Tradeoff
from planner.rewrite.emitter.emit import source
from planner.snapshot.write import write_snapshot


def write_recordings(answer: Plan | Tradeoff, options: argparse.Namespace) -> Iterator[pathlib.Path]:
    """Rehearse the step without and with the plan, write the files that the options name, and yield their paths.

    The page of a trade-off shows the fastest plan inside the budget, or the smallest plan if there is none.

    Raises:
        PlannerError: the model cannot be loaded or rehearsed, or a file cannot be written.
    """
    tradeoff = answer if isinstance(answer, Tradeoff) else None
    plan = answer if isinstance(answer, Plan) else shown_plan(answer)
    recordings = rehearse_plan(plan, gpu=options.gpu)
    if options.report is not None:
        stages = rehearse_stages(plan, recordings)
        write_atomically(options.report, page(plan, recordings, stages, source(plan), tradeoff))
        yield options.report
    if options.snapshot is not None:
        yield from write_snapshots(recordings, options.snapshot)


def shown_plan(tradeoff: Tradeoff) -> Plan:
    """Returns the plan of a trade-off that the page shows. Its budget is the user's."""
    plan = tradeoff.chosen or (tradeoff.points[-1] if tradeoff.points else tradeoff.as_it_is)
    return dataclasses.replace(plan, vram_bytes=tradeoff.vram_bytes, fits=tradeoff.fits)


def write_snapshots(recordings: PlanRecordings, path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Write the allocations of the step as memory snapshots, and yield the paths of the files.

    If the plan changes nothing, the only file is that of the baseline, at `path` itself.

    Raises:
        WorkloadError: the card has no allocator.
        PlanFileError: a file cannot be written.
    """
    if recordings.planned is None:
        yield _write(recordings.baseline, path)
    else:
        yield _write(recordings.planned, path)
        yield _write(recordings.baseline, baseline_path(path))


def _write(recorded: Recorded, path: pathlib.Path) -> pathlib.Path:
    if recorded.history is None:
        raise WorkloadError(f"the card '{recorded.card.name}' has no allocator: name another card with --gpu")
    origins = snapshot_origins(recorded.graph, recorded.history, recorded.times_ns)
    write_snapshot(path, recorded.history.simulated, origins)
    return path
