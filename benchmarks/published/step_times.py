"""Predicted against published step times: image models that timm's authors trained on an RTX 3090.

    pip install --no-deps timm==0.6.13
    python -m benchmarks.published.step_times FOLDER/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv [--every 8]

The table is timm's (github.com/huggingface/pytorch-image-models, results/, Apache 2.0): one step of forward, backward
and SGD with momentum under autocast to fp16, batches of random images, torch 1.12, its `benchmark.py`. Each step is
rehearsed with the same batch, and timed by `planner.cost` on the card's datasheet. Other tables say what the roofline
lacks: the time is fitted as a sum over kinds of ops, on four fifths of the models, and predicted for the others.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib.abc
import importlib.machinery
import pathlib
import sys
import time
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.optimize import nnls

import profiles
from planner.cost import op_ns
from planner.decisions import Precision
from planner.errors import PlannerError
from planner.pipeline import versions
from planner.step_graph import Op, Phase
from planner.workload import workload
from profiles.device import DeviceProfile
from rewrite.certify import start_rehearsal

CARD = "rtx-3090"
STEPS = 2
FOLDS = 5
KINDS = ("convolutions, FLOPs", "convolutions, bytes", "products", "batch norm, bytes", "others, bytes", "launches")


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    seconds: float
    """Published."""
    predicted: float
    kinds: np.ndarray
    """Seconds at the rates of the datasheet, a number for each of `KINDS`."""


def rows_of(path: pathlib.Path, *, every: int, limit_s: float, console: Console) -> list[Row]:
    """Steps that could be rehearsed before the time was over; the others are named."""
    card, started, found = profiles.load(CARD), time.monotonic(), []
    with path.open() as file:
        published = list(csv.DictReader(file))[::every]
    for row in track(published, console=console, description="rehearsing"):
        if time.monotonic() - started > limit_s:
            console.print(f"stopped after {limit_s:.0f} s")
            break
        try:
            ops = _ops_of(row["model"], int(row["train_batch_size"]), int(row["train_img_size"]), card)
        except (PlannerError, ImportError, RuntimeError) as why:
            console.print(f"{row['model']}: {why}")
            continue
        predicted = sum(op_ns(op, card) for op in ops) / 1e9
        found.append(Row(row["model"], float(row["train_step_time"]) / 1e3, predicted, _by_kind(ops, card)))
    return found


def _ops_of(name: str, samples: int, size: int, card: DeviceProfile) -> list[Op]:
    import timm

    model = timm.create_model(name)
    images = torch.empty(samples, 3, size, size, device="meta")
    labels = torch.zeros(samples, dtype=torch.long, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=False)
    work = workload(model, (images, labels), loss_fn=_loss, optimizer=optimizer)
    graph = start_rehearsal(
        work, (Precision(dtype="fp16"),), card, sizes=(samples,), steps=STEPS, primed=False, what_if=False
    ).result()
    return [op for op in graph.ops if op.step == STEPS - 1 and op.phase is not Phase.SETUP]


def _loss(output: Any, batch: tuple) -> torch.Tensor:
    output = output[0] if isinstance(output, tuple) else output
    return torch.nn.functional.cross_entropy(output, batch[-1])


def _by_kind(ops: Sequence[Op], card: DeviceProfile) -> np.ndarray:
    seconds = np.zeros(len(KINDS))
    for op in ops:
        if op.is_view:
            continue
        by_flops = op.flops / card.flops_per_s.get(op.dtype, card.flops_per_s["fp32"])
        by_bytes = op.moved_bytes / card.memory_bandwidth_bytes_per_s
        if "convolution" in op.name:
            seconds[:2] += by_flops, by_bytes
        elif op.flops:
            seconds[2] += max(by_flops, by_bytes)
        else:
            seconds[3 if "batch_norm" in op.name else 4] += by_bytes
        seconds[5] += card.launch_ns / 1e9
    return seconds


def fitted(rows: Sequence[Row], chosen: np.ndarray) -> np.ndarray:
    """Factors of the kinds, none below zero, with the least squares of relative errors."""
    shares = np.array([row.kinds / row.seconds for row in rows])[chosen]
    return nnls(shares, np.ones(len(shares)))[0]


def tables(rows: Sequence[Row]) -> list[Table]:
    ratios = np.array([row.predicted / row.seconds for row in rows])
    scale = float(np.exp(np.median(np.log(ratios))))
    roofline = Table("model of time", "median error", "90 % are within", "lowest and highest ratio")
    numbers, fold = np.arange(len(rows)), np.zeros(len(rows))
    for number in range(FOLDS):
        factors = fitted(rows, numbers[numbers % FOLDS != number])
        for at in numbers[numbers % FOLDS == number]:
            fold[at] = rows[at].kinds @ factors / rows[at].seconds
    for name, each in ((f"roofline, all divided by {scale:.2f}", ratios / scale), ("fitted on other models", fold)):
        errors = np.abs(each - 1)
        spread = f"{each.min():.2f}, {each.max():.2f}"
        roofline.add_row(name, f"{np.median(errors):.1%}", f"{np.quantile(errors, 0.9):.1%}", spread)
    factors = Table("kind of op", "times what the datasheet says")
    for kind, factor in zip(KINDS, fitted(rows, numbers), strict=True):
        factors.add_row(kind, f"{factor:.2f}")
    extremes = Table("predicted / published", "model")
    order = np.argsort(ratios)
    for at in (*order[:6], *order[-6:]):
        extremes.add_row(f"{ratios[at]:.2f}", rows[at].name)
    return [roofline, factors, extremes]


class _InPlaceOfTorchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """timm's data loading imports torchvision, whose packages need CUDA's libraries; its models do not."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Anything(spec.name)

    def exec_module(self, module):
        pass


class _Anything(types.ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class _Named(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=pathlib.Path)
    parser.add_argument("--every", type=int, default=8, help="take each eighth model of the table, or so")
    parser.add_argument("--limit-s", type=float, default=1800.0)
    given = parser.parse_args()
    sys.meta_path.insert(0, _InPlaceOfTorchvision())
    console = Console(width=120)
    rows = rows_of(given.table, every=given.every, limit_s=given.limit_s, console=console)
    console.print(", ".join(f"{name} {version}" for name, version in versions().items()), f"; {len(rows)} models")
    for table in tables(rows):
        console.print(table)


if __name__ == "__main__":
    main()
