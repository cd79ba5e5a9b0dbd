"""Compare predicted process memory with published nvidia-smi readings of small networks. Needs no GPU.

    python -m benchmarks.nvidia_smi FOLDER/gpumemnet_mlp2.csv [--fit 20] [--predict 300] [--seed 1]

The table is GPUMemNet's (github.com/itu-rad/GPUMemNet, CC BY 4.0): MLPs on an A100-SXM4-40GB, and the largest
memory.used that nvidia-smi showed in a minute of training. Their script is rehearsed on an empty card (the model, a
forward of two samples for its summary, epochs with a shorter last batch) with the scratch memory and workspaces of
torch 2.5, and its allocations are replayed in the simulated allocator. Their driver places each new segment below the
previous one; with the opposite order one row in ten fragments differently, by up to 50 MiB. One constant is fitted, the
context with its libraries: the most frequent difference on `--fit` rows. The other rows are predicted.
"""

from __future__ import annotations

import argparse
import collections
import csv
import dataclasses
import pathlib
import random
import re
import statistics
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from planner import profiles
from planner.assemble import versions
from planner.estimate.add_workspaces import with_workspaces
from planner.estimate.allocation_stream import allocation_stream
from planner.estimate.footprint import replayed
from planner.recording.rehearsal import rehearse_program
from planner.virtual_gpu.backend import Target

MIB = 1 << 20
CARD = "a100-40gb"
TORCH_VERSION = "2.5.0"
"""Assumed: their version is not stated. Workspaces are the same from 2.4 to 2.8."""
SAMPLES = 4096
MOST_BATCHES, EPOCHS = 8, 3
"""Maximum number of full batches in an epoch, before its shorter last one, and the number of epochs."""

ACTIVATIONS = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "prelu": nn.PReLU,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "tanh": nn.Tanh,
    "softplus": nn.Softplus,
    "swish": nn.SiLU,
    "mish": nn.Mish,
    "gelu": nn.GELU,
    "identity": nn.Identity,
}
NAME = re.compile(
    r"input:(?P<inputs>\d+)_output:(?P<outputs>\d+)_depth:(?P<depth>\d+)_arch:(?P<shape>\w+)_batch:(?P<batch>\d+)"
    r"_act:(?P<activation>\w+?)_dropout:(?P<rate>[\d.]+)_dropout:(?P<dropout>\w+)_batchnorm:(?P<norm>\w+)\.out"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One row of the table: the training run and the measured memory."""

    name: str
    inputs: int
    outputs: int
    depth: int
    shape: str
    batch: int
    activation: str
    rate: float
    dropout: bool
    norm: bool
    measured_mib: int


def read(path: pathlib.Path) -> list[Run]:
    """Returns all rows of the table.

    Raises:
        ValueError: a name does not contain the settings.
    """
    runs = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            found = NAME.match(row["Filename"])
            if found is None:
                raise ValueError(f"{path}: '{row['Filename']}' does not contain the settings of the run")
            numbers = {name: int(found[name]) for name in ("inputs", "outputs", "depth", "batch")}
            runs.append(
                Run(
                    name=row["Filename"],
                    **numbers,
                    shape=found["shape"],
                    activation=found["activation"],
                    rate=float(found["rate"]),
                    dropout=found["dropout"] == "True",
                    norm=found["norm"] == "True",
                    measured_mib=int(row["Max GPU Memory (MiB)"]),
                )
            )
    return runs


def model_of(run: Run) -> nn.Sequential:
    """Returns the network that a row describes."""
    layers: list[nn.Module] = []

    def block(width: int, next_width: int) -> int:
        layers.append(nn.Linear(width, next_width))
        layers.extend([nn.BatchNorm1d(next_width)] if run.norm else [])
        layers.append(ACTIVATIONS[run.activation]())
        layers.extend([nn.Dropout(run.rate)] if run.dropout else [])
        return next_width

    width, step = run.inputs, (run.inputs - run.outputs) // run.depth
    narrower: dict[str, Callable[[int], int]] = {
        "pyramid": lambda width: max(width // 2, run.outputs),
        "bottleneck": lambda width: max(width // 2, run.outputs),
        "uniform": lambda width: width,
        "gradual": lambda width: max(width - step, run.outputs),
    }
    for _ in range(run.depth + (run.shape == "bottleneck")):
        width = block(width, narrower[run.shape](width))
    layers += [nn.Linear(width, run.outputs), nn.Softmax(dim=1) if run.outputs > 1 else nn.Identity()]
    return nn.Sequential(*layers)


def program_of(run: Run) -> Callable[[torch.device], None]:
    """Returns a program with the allocations of their script."""
    full, last = divmod(SAMPLES, run.batch)
    epoch = [run.batch] * min(full, MOST_BATCHES) + ([last] if last else [])
    sizes = epoch * EPOCHS
    if run.norm and 1 in sizes:  # BatchNorm refuses a single sample, which ended their run
        sizes = sizes[: sizes.index(1)]

    def program(device: torch.device) -> None:
        with device:
            model = model_of(run)
        model(torch.rand(2, 1, run.inputs).to(device).view(2, -1))
        optimizer = torch.optim.Adam(model.parameters())
        criterion = nn.CrossEntropyLoss() if run.outputs > 1 else nn.BCEWithLogitsLoss()
        for size in sizes:
            inputs, labels = torch.rand(size, run.inputs), torch.zeros(size, dtype=torch.int64)
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            outputs = model(inputs)
            if run.outputs == 1:
                labels = labels.view(-1, 1).float()
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()

    return program


def reserved_mib(run: Run) -> int:
    """Returns the peak of the memory reserved by the caching allocator, by rehearsal."""
    card = profiles.load(CARD)
    graph = rehearse_program(program_of(run), Target(compute_capability=card.compute_capability))
    ids, sizes, _ = allocation_stream(with_workspaces(graph, card, TORCH_VERSION))
    return replayed((ids, sizes), card, None).peak_reserved_bytes // MIB


def fitted_mib(differences: list[int]) -> int:
    """Returns the most frequent difference, or the smallest of several."""
    counts = collections.Counter(differences)
    return min(counts, key=lambda difference: (-counts[difference], difference))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=pathlib.Path)
    parser.add_argument("--fit", type=int, default=20)
    parser.add_argument("--predict", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    runs = read(options.table)
    random.Random(options.seed).shuffle(runs)
    console = Console(width=150)
    console.print(", ".join(f"{name} {version}" for name, version in versions().items()))
    chosen = runs[: options.fit + options.predict]
    reserved = [reserved_mib(run) for run in track(chosen, console=Console(stderr=True))]
    differences = [run.measured_mib - mib for run, mib in zip(chosen, reserved, strict=True)]
    constant = fitted_mib(differences[: options.fit])
    off = [difference - constant for difference in differences[options.fit :]]
    errors = sorted(abs(miss) / run.measured_mib for miss, run in zip(off, chosen[options.fit :], strict=True))
    console.print(f"constant fitted on {options.fit} rows: {constant} MiB; predicted: {len(off)} rows")
    console.print(
        f"exact to the MiB: {sum(miss == 0 for miss in off) / len(off):.1%}, within 2 MiB: "
        f"{sum(abs(miss) <= 2 for miss in off) / len(off):.1%}; error: median {statistics.median(errors):.3%}, "
        f"90th percentile {errors[int(0.9 * len(errors))]:.3%}, worst {errors[-1]:.3%}"
    )
    for miss, run in sorted(zip(off, chosen[options.fit :], strict=True), key=lambda pair: -abs(pair[0]))[:10]:
        console.print(f"  off by {-miss:+d} of {run.measured_mib} MiB: {run.name}", highlight=False)


if __name__ == "__main__":
    main()
