"""A published figure of the memory in which a convolutional network was trained, and the program that predicts it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.published.several_cards.rows import Measure
from planner import profiles
from planner.allocator.replay import AllocatorOutcome
from planner.estimate.add_workspaces import with_workspaces
from planner.estimate.allocation_stream import allocation_stream
from planner.estimate.footprint import replayed
from planner.recording.rehearsal import Program, rehearse_program
from planner.recording.step_graph import StepGraph, Storage
from planner.virtual_gpu.backend import Target
from planner.workspaces.cudnn.dispatch import is_convolution

GB, MIB, GIB = 10**9, 1 << 20, 1 << 30
_FIRST_WITH_CUBLAS_BLOCKS = (2, 0)
"""The first release of PyTorch that takes the workspaces of cuBLAS from its allocator."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A published figure."""

    setting: str
    """Model, batch and image size."""
    source: str
    """Name of the module with the figure, its source, and what is not known."""
    card: str
    """Name of the card's profile."""
    cards: int = 1
    torch_version: str
    measure: Measure
    published: float
    """In units of `unit_bytes`."""
    unit_bytes: int
    digit: float
    """The figure is rounded to a multiple of this, in units of `unit_bytes`."""
    program: Program
    """Trains as the first rank."""
    doubt: str = ""
    """The reason why the settings of the run are not known; empty if they are known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predicted:
    """The bytes that are predicted for a row."""

    without_bytes: int
    """Without the workspaces of convolutions."""
    total_bytes: int


def graph_of(row: Row) -> StepGraph:
    """Returns the recording of the row's program."""
    return rehearse_program(row.program, Target.of(profiles.load(row.card), cards=row.cards))


def predicted(row: Row, graph: StepGraph) -> Predicted:
    """Returns the predictions from the recording of the row's program."""
    card = profiles.load(row.card)
    release = tuple(int(part) for part in row.torch_version.split(".")[:2])
    added = with_workspaces(graph, card, row.torch_version).storages[len(graph.storages) :]
    if release < _FIRST_WITH_CUBLAS_BLOCKS:
        added = [storage for storage in added if storage.lives[-1][1] != graph.ticks]

    def outcome(storages: list[Storage]) -> int:
        ids, sizes, _ = allocation_stream(dataclasses.replace(graph, storages=[*graph.storages, *storages]))
        return _measured(row, replayed((ids, sizes), card, None))

    def is_of_convolution(storage: Storage) -> bool:
        return storage.op is not None and is_convolution(graph.ops[storage.op].name)

    others = [each for each in added if not is_of_convolution(each)]
    return Predicted(without_bytes=outcome(others), total_bytes=outcome(added))


def _measured(row: Row, outcome: AllocatorOutcome) -> int:
    return outcome.peak_reserved_bytes if row.measure is Measure.RESERVED else outcome.peak_allocated_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A program that trains a network in fp32 as OpenMMLab's runner did up to 2022, on one card of several.

    The network is wrapped by `DistributedDataParallel`. Gradients are set to zero and not released, as
    `zero_grad()` did before PyTorch 2.0. SGD has momentum and weight decay, and updates parameter by parameter.
    """

    build: Callable[[], nn.Module]
    """Returns a network that returns its loss for the tensors of `batch`."""
    batch: Callable[[], tuple[torch.Tensor, ...]]
    """Returns a batch in host memory."""
    steps: int = 2
    clips: bool = True
    """True if the norm of the gradients is limited."""

    def __call__(self, device: torch.device) -> None:
        from torch.nn.parallel import DistributedDataParallel

        with device:
            model: Any = DistributedDataParallel(self.build())
        parameters = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-4, foreach=False)
        for _ in range(self.steps):
            loss = model(*(tensor.to(device) for tensor in self.batch()))
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            if self.clips:
                nn.utils.clip_grad_norm_(parameters, 40.0, foreach=False)
            optimizer.step()
