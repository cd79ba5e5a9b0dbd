"""Predicted against published step times of image models (`timm_steps`).

    pip install --no-deps timm==0.6.13
    python -m benchmarks.published.step_times FOLDER/benchmark-*.csv --rows rows.jsonl [--every 8] [--limit-s 1800]

Each step is rehearsed and timed by `planner.estimate.roofline` with the card's datasheet. Its row is added to the file,
and a later call goes on from there. The tables then show the errors of five predictions, after one common factor per
table (only ratios of times choose a plan):

- the planner's prediction;
- the same without the scratch memory of convolutions;
- a prediction from the datasheet alone;
- a prediction with the factor for the bytes of convolutions, which no datasheet contains, fitted on the other tables;
- a prediction with factors for all kinds of ops, fitted on four fifths of the table's models, for the other fifth.
"""

from __future__ import annotations

import argparse
import pathlib
import time
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.optimize import nnls

from benchmarks.card import results
from benchmarks.published.timm_steps import ops_of, published, without_torchvision
from planner.assemble import versions
from planner.errors import PlannerError
from planner.estimate.roofline import CONVOLUTION_PASSES, flops_rate, op_ns
from planner.profiles.device import DeviceProfile
from planner.recording.step_graph import Op

FOLDS = 5
KINDS = (
    "convolution FLOPs",
    "convolution bytes",
    "convolution scratch memory, twice",
    "product",
    "batch norm bytes",
    "other bytes",
    "launches",
)
PASSES, SCRATCH = 1, 2
"""Positions of the bytes of convolutions and of their scratch memory in `KINDS`."""


def rehearse(path: pathlib.Path, rows: pathlib.Path, *, every: int, deadline: float, console: Console) -> None:
    """Add the missing rows until the deadline."""
    table = published(path)
    done = {(row["table"], row["model"]) for row in results.rows(rows)}
    lines = [line for line in table.lines[::every] if (table.name, line.model) not in done]
    for line in track(lines, console=console, description=table.name):
        if time.monotonic() > deadline:
            console.print(f"{table.name}: stopped at the time limit")
            return
        row = {"table": table.name, "model": line.model, "seconds": line.seconds}
        try:
            ops = ops_of(line, table)
            row["predicted"] = sum(op_ns(op, table.card) for op in ops) / 1e9
            row["terms"] = terms_of(ops, table.card)
        except (PlannerError, RuntimeError) as why:
            row["error"] = str(why).splitlines()[0]
        results.append(rows, row)


def terms_of(ops: Sequence[Op], card: DeviceProfile) -> list[float]:
    """Returns the seconds at the rates of the card's datasheet, for each of `KINDS`."""
    seconds = [0.0] * len(KINDS)
    for op in ops:
        if op.is_view:
            continue
        by_flops = op.flops / flops_rate(op, card)
        by_bytes = op.moved_bytes / card.memory_bandwidth_bytes_per_s
        seconds[6] += card.launch_ns / 1e9
        if "convolution" in op.name:
            seconds[0] += by_flops
            seconds[PASSES] += by_bytes
            seconds[SCRATCH] += 2 * op.scratch_bytes / card.memory_bandwidth_bytes_per_s
        elif op.flops:
            seconds[3] += max(by_flops, by_bytes)
        else:
            seconds[4 if "batch_norm" in op.name else 5] += by_bytes
    return seconds


def fitted(shares: np.ndarray) -> np.ndarray:
    """Returns non-negative factors of the kinds with the least squared relative errors.

    Args:
        shares: [models, kinds], predicted time of each kind over the published time of the model.
    """
    return nnls(shares, np.ones(len(shares)))[0]


def predicted_by_folds(shares: np.ndarray) -> np.ndarray:
    """Returns predicted over published time, each with factors fitted on other models."""
    numbers, found = np.arange(len(shares)), np.zeros(len(shares))
    for number in range(FOLDS):
        of_fold = numbers % FOLDS == number
        found[of_fold] = shares[of_fold] @ fitted(shares[~of_fold])
    return found


def with_passes(shares: np.ndarray, passes: float, scratch: float = 1.0) -> np.ndarray:
    """Returns predicted over published time.

    Args:
        passes: how often convolutions move their bytes.
        scratch: how often convolutions write and read their scratch memory.
    """
    factors = np.ones(len(KINDS))
    factors[PASSES], factors[SCRATCH] = passes, scratch
    return shares @ factors


def fitted_passes(tables: Sequence[np.ndarray]) -> float:
    """Returns the passes of convolutions over their bytes with the least median error, averaged over tables."""
    choices = np.arange(1.0, 6.0, 0.1)
    means = [np.mean([np.median(errors(with_passes(shares, passes))) for shares in tables]) for passes in choices]
    return float(choices[int(np.argmin(means))])


def errors(ratios: np.ndarray) -> np.ndarray:
    """Returns the errors after scaling all ratios by one common factor."""
    return np.abs(ratios / np.exp(np.median(np.log(ratios))) - 1)


def summary(ratios: np.ndarray) -> str:
    """Formats the median, the 90 % quantile and the maximum of the errors."""
    off = errors(ratios)
    return f"{np.median(off):.1%}, {np.quantile(off, 0.9):.0%}, {off.max():.0%}"


def tables(rows: Sequence[results.Row]) -> list[Table]:
    timed = [row for row in rows if "terms" in row]
    shares, planned = {}, {}
    for name in dict.fromkeys(row["table"] for row in timed):
        of_table = [row for row in timed if row["table"] == name]
        shares[name] = np.array([np.array(row["terms"]) / row["seconds"] for row in of_table])
        planned[name] = np.array([row["predicted"] / row["seconds"] for row in of_table])
    accuracy = Table(
        "table", "models", "as planned", "without scratch memory", "datasheet alone", "passes of the other tables",
        "all kinds, five folds", title="errors of step times: median, 90 % quantile, maximum",
    )  # fmt: skip
    factors = Table("fit of", *KINDS, title="fitted times over those of the datasheet")
    for name, each in shares.items():
        passes = fitted_passes([other for other in shares.values() if other is not each] or [each])
        of_others = f"{summary(with_passes(each, passes))} ({passes:.1f})"
        by_folds = summary(predicted_by_folds(each))
        without = summary(with_passes(each, CONVOLUTION_PASSES, scratch=0.0))
        datasheet = summary(with_passes(each, 1.0))
        accuracy.add_row(name, str(len(each)), summary(planned[name]), without, datasheet, of_others, by_folds)
        factors.add_row(name, *(f"{factor:.2f}" for factor in fitted(each)))
    return [accuracy, factors]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=pathlib.Path, nargs="+")
    parser.add_argument("--rows", type=pathlib.Path, required=True, help="file of the rehearsed steps, which grows")
    parser.add_argument("--every", type=int, default=8, help="rehearse only every N-th model of a table")
    parser.add_argument("--limit-s", type=float, default=1800.0)
    given = parser.parse_args()
    console, deadline = Console(width=180), time.monotonic() + given.limit_s
    with without_torchvision():
        for path in given.tables:
            rehearse(path, given.rows, every=given.every, deadline=deadline, console=console)
    rows = results.rows(given.rows)
    console.print(", ".join(f"{name} {version}" for name, version in versions().items()))
    for row in rows:
        if "error" in row:
            console.print(f"{row['table']}, {row['model']}: {row['error'][:120]}")
    for table in tables(rows):
        console.print(table)


if __name__ == "__main__":
    main()
