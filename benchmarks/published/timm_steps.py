"""Rehearses steps of image models that timm's authors timed, with the same batch.

The tables are timm's (github.com/huggingface/pytorch-image-models, results/, Apache 2.0), made by its `benchmark.py`
with autocast to fp16 and batches of random images. A training step is forward, backward and SGD with momentum; an
inference step is a forward. The name of a table contains the release of PyTorch, the card and the memory format of the
images. The script sets `torch.backends.cudnn.benchmark`, so that the fastest algorithms ran. It is not known which
these were, so the scratch memory is that of the algorithms that run without this setting.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import importlib.abc
import importlib.machinery
import pathlib
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from planner import profiles
from planner.estimate.add_workspaces import with_workspaces
from planner.plan_types.decisions import Precision
from planner.profiles.device import DeviceProfile
from planner.recording.step_graph import Op, Phase
from planner.rewrite.rehearse import start_rehearsal
from planner.workload.workload import workload

CARDS = {"rtx3090": "rtx-3090", "rtx4090": "rtx-4090", "4090": "rtx-4090", "5090": "rtx-5090"}
STEPS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """A line of a table."""

    model: str
    samples: int
    size: int
    """Height and width of an image in pixels."""
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A table, such as benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv."""

    name: str
    trains: bool
    channels_last: bool
    card: DeviceProfile
    torch_version: str
    lines: tuple[Timed, ...]


def published(path: pathlib.Path) -> Published:
    """Returns the table with the models that the installed timm knows."""
    import timm

    name = path.stem.removeprefix("benchmark-")
    mode, _, layout, release, *_, card = name.split("-")
    with path.open() as file:
        lines = tuple(
            Timed(
                model=line["model"],
                samples=int(line[f"{mode}_batch_size"]),
                size=int(line[f"{mode}_img_size"]),
                seconds=float(line[f"{mode}_step_time"]) / 1e3,
            )
            for line in csv.DictReader(file)
            if timm.is_model(line["model"])
        )
    return Published(
        name=name,
        trains=mode == "train",
        channels_last=layout == "nhwc",
        card=profiles.load(CARDS[card]),
        torch_version=torch_version_of(release),
        lines=lines,
    )


def torch_version_of(release: str) -> str:
    """Returns the version of PyTorch in the name of a table: '1.12' for 'pt112', and '2.4.0' for 'pt240'."""
    major, rest = release[2], release[3:]
    return f"{major}.{rest}" if major == "1" else f"{major}.{'.'.join(rest)}"


def ops_of(line: Timed, table: Published) -> list[Op]:
    """Returns the ops of the step that was timed, with the scratch memory of convolutions.

    Raises:
        PlannerError: the model cannot be rehearsed.
        RuntimeError: timm cannot build the model.
    """
    import timm

    model = timm.create_model(line.model).train(table.trains)
    images = torch.empty(line.samples, 3, line.size, line.size, device="meta")
    if table.channels_last:
        images, model = images.to(memory_format=torch.channels_last), model.to(memory_format=torch.channels_last)
    labels = torch.zeros(line.samples, dtype=torch.long, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=False)
    work = workload(model, (images, labels), loss_fn=_loss, optimizer=optimizer)
    decisions, sizes = (Precision(dtype="fp16"),), (line.samples,)
    graph = start_rehearsal(work, decisions, table.card, sizes=sizes, steps=STEPS, primed=False, what_if=False).result()
    graph = with_workspaces(graph, table.card, table.torch_version)
    phases = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER) if table.trains else (Phase.FORWARD,)
    return [op for op in graph.ops if op.step == STEPS - 1 and op.phase in phases]


def _loss(output: Any, batch: tuple) -> torch.Tensor:
    output = output[0] if isinstance(output, tuple) else output
    return torch.nn.functional.cross_entropy(output, batch[-1])


@contextlib.contextmanager
def without_torchvision() -> Iterator[None]:
    """Replace torchvision by an empty module: timm's data loading imports it, its models do not need it."""
    finder = _InPlaceOfTorchvision()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _InPlaceOfTorchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
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
